// The playground's page. It works from disk: browsers let a page opened from a file neither fetch files nor start
// workers from them, so everything that Python needs is in data.js, and the worker is made of that. (From disk, search
// puts something else in the place of Worker; docs/site/outside.py keeps the browser's own as RealWorker.)
(() => {
  const root = document.getElementById("simulator");
  const find = (what) => root.querySelector(what);
  const sliders = [...root.querySelectorAll("input")];
  const say = (words) => { find(".status").textContent = words; };
  let worker, number = 0, rows = new Map(), chosen = null, order = [];

  async function unpack(text) {
    const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).arrayBuffer();
  }

  function settings() {
    return Object.fromEntries(sliders.map((slider) => [slider.name, Number(slider.value)]));
  }

  function show() {
    for (const slider of sliders) slider.nextElementSibling.textContent = slider.value;
  }

  function ask() {
    show();
    if (!worker) return;
    rows = new Map();
    root.dataset.state = "computing";
    worker.postMessage({ number: ++number, values: settings() });
  }

  function best() {
    const fitting = [...rows.values()].filter((row) => row.fits);
    return fitting.sort((a, b) => a.period - b.period || a.makespan - b.makespan)[0] || [...rows.values()].find((row) => row.svg);
  }

  function draw() {
    const shown = (rows.get(chosen) || {}).svg ? rows.get(chosen) : best();
    if (shown) find(".drawing").innerHTML = shown.svg;
    const body = find("tbody");
    body.replaceChildren(...order.filter((name) => rows.has(name)).map((name) => line(rows.get(name), shown)));
  }

  function line(row, shown) {
    const made = document.createElement("tr");
    made.dataset.name = row.name;
    const choose = document.createElement("button");
    choose.type = "button";
    choose.textContent = row.name;
    choose.setAttribute("aria-pressed", String(row === shown));
    choose.onclick = () => {
      chosen = chosen === row.name ? null : row.name;
      draw();
      find(`tr[data-name="${row.name}"] button`).focus();
    };
    const cells = row.problem
      ? [row.problem]
      : [
          row.makespan.toFixed(2), row.period.toFixed(2), `${(100 * row.bubble).toFixed(1)}%`, row.memory.toFixed(2),
          row.fits ? "yes" : "no",
        ];
    for (const cell of [choose, ...cells]) made.insertCell().append(cell);
    if (row.problem) made.lastChild.colSpan = 5;
    made.classList.toggle("shown", row === shown);
    made.classList.toggle("outside", !row.fits);
    return made;
  }

  function heard({ data }) {
    if (data.error) {
      say(`It cannot run here: ${data.error}`);
      root.dataset.state = "failed";
    } else if (data.names) {
      order = [...data.names.named, ...data.names.searched];
      say("");
      ask();
    } else if (data.number === number && data.row) {
      rows.set(data.row.name, data.row);
      draw();
    } else if (data.number === number && data.done) {
      root.dataset.state = "ready";
    }
  }

  async function start() {
    const packed = globalThis.STERNWAY_PLAYGROUND;
    const files = Object.fromEntries(
      await Promise.all(Object.entries(packed).map(async ([name, text]) => [name, await unpack(text)])),
    );
    const code = ["pyodide.asm.js", "pyodide.js", "worker.js"].flatMap((name) => [files[name], "\n"]);
    worker = new RealWorker(URL.createObjectURL(new Blob(code, { type: "text/javascript" })));
    worker.onmessage = heard;
    worker.onerror = (event) => heard({ data: { error: event.message } });
    worker.postMessage({ files });
  }

  for (const slider of sliders) slider.addEventListener("input", ask);
  show();
  const script = document.createElement("script");
  script.src = document.currentScript.src.replace("page.js", "data.js");
  script.onload = start;
  document.head.append(script);
})();
