"use strict";
// A table whose columns sort when their heading is clicked (or Enter is pressed on it).
function table(columns, rows, { onRow, key } = {}) {
  let by = null, down = true;
  const body = make("tbody");
  const fill = () => {
    const sorted = by === null ? rows : [...rows].sort((a, b) => {
      const x = columns[by].value(a), y = columns[by].value(b);
      return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
    });
    body.replaceChildren(...sorted.slice(0, 2000).map((row) => make("tr",
      { tabindex: 0, "data-key": key ? key(row) : undefined, onclick: () => onRow && onRow(row),
        onkeydown: (event) => { if (event.key === "Enter" && onRow) { onRow(row); event.stopPropagation(); } } },
      columns.map((column) => make("td", { class: column.number ? "number" : "name" },
        column.show ? column.show(row) : String(column.value(row)))))));
  };
  const turn = (index) => { down = by === index ? !down : true; by = index; fill(); };
  const head = make("tr", {}, columns.map((column, index) => make("th",
    { tabindex: 0, class: column.number ? "number" : "", onclick: () => turn(index),
      onkeydown: (event) => { if (event.key === "Enter") { turn(index); event.stopPropagation(); } } }, column.title)));
  fill();
  return make("table", {}, make("thead", {}, head), body);
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
