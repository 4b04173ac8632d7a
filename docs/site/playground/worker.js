// Runs model.py in Pyodide. Messages in: first the files, then settings with a number; only the newest settings count.
// Messages out: {names}, {number, row}, {number, done} and {error}.
const HERE = "https://playground.invalid/"; // Pyodide asks for its files below this address; they are in memory
let files, python, newest = 0, settings = null, running = false;

self.fetch = async (request) => {
  const name = String(request.url || request).slice(HERE.length);
  const type = name.endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
  if (!(name in files)) throw new Error(`the playground has no file ${name}`);
  return new Response(files[name], { headers: { "Content-Type": type } });
};

async function start(data) {
  files = data;
  const pyodide = await loadPyodide({ indexURL: HERE });
  pyodide.unpackArchive(files["sternway.zip"], "zip", { extractDir: "/sternway" });
  pyodide.runPython('import sys; sys.path.insert(0, "/sternway")');
  python = pyodide.pyimport("model");
  postMessage({ names: JSON.parse(python.names()) });
}

async function answer() {
  if (running) return;
  running = true;
  const { named, searched } = JSON.parse(python.names());
  while (settings) {
    const { number, values } = settings;
    settings = null;
    for (const name of [...named, ...searched]) {
      postMessage({ number, row: JSON.parse(python.row(JSON.stringify(values), name)) });
      await new Promise((resume) => setTimeout(resume)); // newer settings may have come
      if (number !== newest) break;
    }
    if (number === newest) postMessage({ number, done: true });
  }
  running = false;
}

self.onmessage = async ({ data }) => {
  try {
    if (data.files) return await start(data.files);
    newest = data.number;
    settings = data;
    await answer();
  } catch (error) {
    postMessage({ error: String(error) });
  }
};
