"use strict";
// Search and theme. An index shard is a script that calls atlas.shard(); pages from disk may load scripts, not files.
const atlas = (() => {
  const root = document.currentScript.dataset.root + "/";
  const shards = new Map();
  const waiting = new Map();
  let files = null, known = new Set(), rows = [], chosen = 0;

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
  const key = (text) => [...text.replace(/^_+/, "").toLowerCase()].slice(0, 2)
    .map((c) => (/[a-z0-9]/.test(c) ? c : `-${c.codePointAt(0).toString(16)}-`)).join("");

  const score = (name, kind, query) => {
    const low = name.toLowerCase(), at = low.indexOf(query);
    if (at < 0) return Infinity;
    const rank = { class: 0, function: 0, struct: 0, method: 1, variable: 2, attribute: 2, key: 2, word: 6, name: 5 };
    return (low === query ? 0 : low.replace(/^_+/, "") === query ? 2 : at === 0 ? 10 : 20) + (rank[kind] ?? 3) + name.length / 100;
  };

  async function find(text) {
    const query = text.trim().toLowerCase();
    if (query.replace(/^_+/, "").length < 2) return null;
    await load("files");
    const name = key(query);
    if (known.has(name)) await load(name);
    const hits = [];
    for (const [word, count, places] of shards.get(name) ?? []) {
      places.forEach(([file, line, kind], i) => {
        const value = score(word, kind, query), [path, page] = files[file];
        if (value < Infinity) hits.push({ name: word, kind, value: value + i / 1000, path, line, page,
          more: i === 0 ? count - places.length : 0 });
      });
    }
    files.forEach(([path, page]) => {
      const at = path.toLowerCase().lastIndexOf(query);
      if (at >= 0) hits.push({ name: path.split("/").pop(), kind: "file", path, page, line: 0, more: 0,
        value: (at > path.lastIndexOf("/") ? 8 : 24) + path.length / 100 });
    });
    return hits.sort((a, b) => a.value - b.value);
  }

  const element = (tag, className, text) => Object.assign(document.createElement(tag), { className, textContent: text });

  async function show() {
    const input = document.getElementById("search"), list = document.getElementById("found"), text = input.value;
    const hits = await find(text);
    if (input.value !== text) return;
    list.replaceChildren();
    rows = [];
    list.hidden = hits === null;
    (hits ?? []).slice(0, 60).forEach((hit) => {
      const item = document.createElement("li"), row = document.createElement("a");
      row.href = root + hit.page + (hit.line ? `#L${hit.line}` : "");
      const where = hit.line ? `${hit.path}:${hit.line}` : hit.path;
      row.append(element("span", "name", hit.name), element("span", "kind", hit.kind),
        element("span", "where", where + (hit.more ? ` and ${hit.more} more` : "")));
      item.append(row);
      list.append(item);
      rows.push(row);
    });
    if (hits && hits.length !== rows.length) list.append(element("p", "", `${rows.length} of ${hits.length}`));
    if (hits && !hits.length) list.append(element("p", "", "Nothing found."));
    choose(0);
  }

  function choose(index) {
    rows[chosen]?.classList.remove("chosen");
    chosen = Math.max(0, Math.min(index, rows.length - 1));
    rows[chosen]?.classList.add("chosen");
    rows[chosen]?.scrollIntoView({ block: "nearest" });
  }

  const store = (value) => { try { return value === undefined ? localStorage.getItem("atlas-theme") : localStorage.setItem("atlas-theme", value); } catch { return null; } };
  const theme = store();
  if (theme) document.documentElement.dataset.theme = theme;

  const input = document.getElementById("search");
  input.addEventListener("input", show);
  input.addEventListener("focus", () => { if (input.value) show(); });
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") choose(chosen + 1);
    else if (event.key === "ArrowUp") choose(chosen - 1);
    else if (event.key === "Enter" && rows[chosen]) { rows[chosen].click(); document.getElementById("found").hidden = true; input.blur(); }
    else if (event.key === "Escape") { document.getElementById("found").hidden = true; input.blur(); }
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== input) { event.preventDefault(); input.focus(); input.select(); }
  });
  document.addEventListener("click", (event) => {
    if (!document.getElementById("finder").contains(event.target)) document.getElementById("found").hidden = true;
  });
  document.getElementById("theme").addEventListener("click", () => {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    store(dark ? "light" : "dark");
  });
  document.documentElement.dataset.ready = String(performance.now());
  return {
    shard(name, found) { shards.set(name, found); },
    files(names, found) { known = new Set(names); files = found; },
  };
})();
