// The page: search box, theme, table of contents. An index is a script that calls atlas.names() or atlas.shard();
// pages from disk may load scripts, not files.
const atlas = (() => {
  const root = document.currentScript.dataset.root + "/";
  const waiting = new Map();
  const load = (name) => {
    if (!waiting.has(name)) {
      waiting.set(name, new Promise((done) => {
        const script = document.createElement("script");
        script.src = `${root}_site/search/${name}.js`;
        script.onload = script.onerror = done;
        document.head.append(script);
      }));
    }
    return waiting.get(name);
  };
  const index = new SearchIndex(load);
  let rows = [], chosen = 0, only = "";

  const element = (tag, className, text = "") => Object.assign(document.createElement(tag), { className, textContent: text });
  const finder = document.getElementById("finder");
  const input = Object.assign(element("input", ""), { id: "search", type: "search", placeholder: "Search  ( / )", autocomplete: "off", spellcheck: false });
  input.setAttribute("aria-label", "Search");
  const found = Object.assign(element("div", ""), { id: "found", hidden: true });
  const kinds = element("div", "kinds"), list = element("ol", ""), said = element("p", "");
  found.append(kinds, list, said);
  finder.append(input, found);
  for (const [kind, label] of [["", "All"], ["class", "Classes"], ["function", "Functions"], ["method", "Methods"], ["file", "Files"], ["use", "Uses"]]) {
    const button = Object.assign(element("button", "", label), { type: "button" });
    button.setAttribute("aria-pressed", String(kind === only));
    button.addEventListener("click", () => {
      only = kind;
      for (const other of kinds.children) other.setAttribute("aria-pressed", String(other === button));
      input.focus();
      show();
    });
    kinds.append(button);
  }

  // A name with the words of the query marked.
  function marked(name, words) {
    const span = element("span", "name"), low = name.toLowerCase();
    let at = 0;
    while (at < name.length) {
      const next = words.map((word) => [low.indexOf(word, at), word.length]).filter(([i]) => i >= 0).sort((a, b) => a[0] - b[0])[0];
      if (!next) break;
      span.append(name.slice(at, next[0]), element("mark", "", name.slice(next[0], next[0] + next[1])));
      at = next[0] + next[1];
    }
    span.append(name.slice(at));
    return span;
  }

  async function show() {
    const text = input.value, kind = only;
    const start = performance.now();
    const answer = await index.find(text, kind);
    if (input.value !== text || only !== kind) return;
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    rows = (answer?.hits ?? []).map((hit) => row(hit, words));
    list.replaceChildren(...rows.map((link) => { const item = element("li", ""); item.append(link); return item; }));
    said.textContent = !answer ? "" : !answer.total ? "Nothing found." : answer.total > rows.length ? `${rows.length} of ${answer.total.toLocaleString("en")}` : "";
    said.hidden = !said.textContent;
    found.hidden = answer === null;
    choose(0);
    document.documentElement.dataset.searched = `${text} ${(performance.now() - start).toFixed(1)}`;
  }

  function row(hit, words) {
    const link = document.createElement("a");
    link.href = `${root}${hit.page}${hit.anchor ? `#${hit.anchor}` : ""}`;
    const where = hit.line ? `${hit.path}:${hit.line}` : hit.path;
    link.append(marked(hit.name, words), element("span", "kind", hit.kind));
    if (hit.context) link.append(element("span", "context", hit.context));
    link.append(element("span", "where", where + (hit.more ? ` and ${hit.more.toLocaleString("en")} more files` : "")));
    return link;
  }

  function choose(number) {
    rows[chosen]?.classList.remove("chosen");
    chosen = Math.max(0, Math.min(number, rows.length - 1));
    rows[chosen]?.classList.add("chosen");
    rows[chosen]?.scrollIntoView({ block: "nearest" });
  }

  input.addEventListener("input", show);
  input.addEventListener("focus", () => { load("names"); if (input.value) show(); });
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") choose(chosen + 1);
    else if (event.key === "ArrowUp") choose(chosen - 1);
    else if (event.key === "Enter" && rows[chosen]) { rows[chosen].click(); found.hidden = true; input.blur(); }
    else if (event.key === "Escape") { found.hidden = true; input.blur(); }
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if ((event.key === "/" || (event.key === "k" && (event.ctrlKey || event.metaKey))) && document.activeElement !== input) {
      event.preventDefault();
      input.focus();
      input.select();
    }
  });
  document.addEventListener("click", (event) => { if (!finder.contains(event.target)) found.hidden = true; });

  const store = (value) => { try { return value === undefined ? localStorage.getItem("atlas-theme") : localStorage.setItem("atlas-theme", value); } catch { return null; } };
  const theme = store();
  if (theme) document.documentElement.dataset.theme = theme;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    store(dark ? "light" : "dark");
  });

  // A link into a folded list unfolds it; the table of contents shows where the reader is.
  const unfold = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let fold = target && target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    if (target && target.closest("details")) target.scrollIntoView();
  };
  addEventListener("hashchange", unfold);
  unfold();
  const contents = new Map([...document.querySelectorAll("aside a")].map((link) => [link.getAttribute("href").split("#")[1], link]));
  const marks = [...document.querySelectorAll("main section[id], main h3[id]")].filter((mark) => contents.has(mark.id));
  const follow = () => {
    const now = marks.filter((mark) => mark.getBoundingClientRect().top < 120).pop() ?? marks[0];
    for (const [id, link] of contents) link.classList.toggle("now", id === now?.id);
  };
  if (marks.length) { addEventListener("scroll", follow, { passive: true }); follow(); }
  document.documentElement.dataset.ready = String(performance.now());
  return { names: (...columns) => index.names(...columns), shard: (key, found) => index.shard(key, found), find: (text, kind) => index.find(text, kind) };
})();
