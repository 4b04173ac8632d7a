"use strict";
// A table whose columns sort when their heading is pressed; with onRow, each row is something to press, too.
function table(columns, rows, { onRow, key, rowClass } = {}) {
  let by = null, down = true;
  const body = make("tbody");
  const fill = () => {
    const sorted = by === null ? rows : [...rows].sort((a, b) => {
      const x = columns[by].value(a), y = columns[by].value(b);
      if (x === null || y === null) return (x === null) - (y === null); // what is not known comes last
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
    });
    const press = (row) => (onRow ? { tabindex: 0, class: "press", onclick: () => onRow(row),
      onkeydown: (event) => { if (event.key === "Enter") { onRow(row); event.stopPropagation(); } } } : { class: rowClass && rowClass(row) });
    body.replaceChildren(...sorted.slice(0, 2000).map((row) => make("tr", { "data-key": key ? key(row) : undefined, ...press(row) },
      columns.map((column) => make("td", { class: column.number ? "number" : "name" }, column.show ? column.show(row) : String(column.value(row)))))));
  };
  const heads = columns.map((column, index) => make("th", { scope: "col", class: column.number ? "number" : "" },
    make("button", { type: "button", class: "sort", onclick: () => turn(index) }, column.title)));
  const turn = (index) => {
    down = by === index ? !down : Boolean(columns[index].number);
    by = index;
    heads.forEach((head, place) => { if (place === by) head.setAttribute("aria-sort", down ? "descending" : "ascending"); else head.removeAttribute("aria-sort"); });
    fill();
  };
  fill();
  return make("table", {}, make("thead", {}, make("tr", {}, heads)), body);
}

function signed(count) { return (count > 0 ? "+" : count < 0 ? "−" : "±") + shownBytes(Math.abs(count)); }

// What each module has in one graph and in another: nodes by kind, and bytes.
function moduleRows(tree) {
  const rows = new Map();
  tree.record.nodes.forEach((node, id) => {
    const name = node.module || "";
    if (!rows.has(name)) rows.set(name, { module: name, nodes: 0, bytes: 0, kinds: new Map() });
    const row = rows.get(name);
    row.nodes++; row.bytes += tree.bytes[id];
    row.kinds.set(node.kind, (row.kinds.get(node.kind) || 0) + 1);
  });
  const order = new Intl.Collator("en", { numeric: true });
  return new Map([...rows].sort((a, b) => order.compare(a[0], b[0])));
}

function differences(before, after) {
  const old = moduleRows(before), now = moduleRows(after), none = { nodes: 0, bytes: 0, kinds: new Map() }, found = [];
  for (const module of new Set([...old.keys(), ...now.keys()])) {
    const a = old.get(module) || none, b = now.get(module) || none, added = [], removed = [];
    for (const kind of new Set([...a.kinds.keys(), ...b.kinds.keys()])) {
      const change = (b.kinds.get(kind) || 0) - (a.kinds.get(kind) || 0);
      if (change > 0) added.push(`+${change} ${kind}`); else if (change < 0) removed.push(`−${-change} ${kind}`);
    }
    if (added.length || removed.length || a.bytes !== b.bytes) found.push({ module, before: a, after: b, added, removed });
  }
  return found;
}
