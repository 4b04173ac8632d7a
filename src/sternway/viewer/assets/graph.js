"use strict";
// The graph's tab: the picture, the search, and the tables beside it.
class GraphView {
  constructor(data) {
    this.trees = [new Tree(data.graph)];
    if (data.other) this.trees.push(new Tree(data.other));
    this.changes = data.other ? differences(this.trees[0], this.trees[1]) : [];
    this.search = make("input", { type: "search", id: "search", placeholder: "Search: module, kind, parameter ( / )",
      "aria-label": "Search", oninput: () => this.find(), onkeydown: (event) => { if (event.key === "Enter") { this.next(event.shiftKey ? -1 : 1); event.stopPropagation(); } } });
    this.found = make("span", { id: "found", "aria-live": "polite" });
    this.colour = make("select", { id: "colour", "aria-label": "Colour by", onchange: () => { this.picture.colour = this.colour.value; this.picture.draw(); } },
      ["bytes", "kind", "name"].map((name) => make("option", { value: name }, `colour by ${name}`)));
    this.which = make("select", { id: "which", "aria-label": "Which graph", onchange: () => this.show(Number(this.which.value)) },
      ["before", "after"].map((name, index) => make("option", { value: index }, name)));
    const button = (text, title, action) => make("button", { title, onclick: action }, text);
    this.bar = make("div", { class: "bar" }, this.search, this.found, this.colour, data.other ? this.which : null,
      button("Open", "Open the chosen box (e)", () => this.picture.toggle(this.picture.chosen)),
      button("Close", "Close the box around the chosen one (c)", () => this.closeChosen()),
      button("Fit", "Show all (0)", () => this.picture.fit()));
    this.left = make("div", { class: "left" }, this.bar);
    this.side = make("div", { class: "side" });
    this.element = make("div", { class: "view", id: "graph" }, this.left, this.side);
  }
  start() { this.show(this.trees.length - 1); if (this.trees.length > 1) this.which.value = "1"; }
  show(index) {
    this.tree = this.trees[index];
    const marks = new Map();
    for (const change of this.changes) {
      const mark = index ? (change.after.nodes && change.added.length ? "added" : null) : (change.removed.length ? "removed" : null);
      for (let name = change.module; mark; name = name.slice(0, Math.max(0, name.lastIndexOf(".")))) { marks.set(name, mark); if (!name) break; }
    }
    if (this.picture) this.picture.svg.remove();
    this.picture = new Picture(this.tree, { onChoose: (item, asEnd, note) => this.chosen(item, asEnd, note), changes: marks });
    this.picture.colour = this.colour.value;
    this.left.append(this.picture.svg);
    this.details = make("div", { class: "details", id: "details" });
    this.side.replaceChildren(this.details, ...this.diffTable(), ...this.largest(),
      make("h2", {}, `Modules: ${this.tree.record.nodes.length} nodes, ${shownBytes(this.tree.total)} saved`), this.modules());
    this.explain();
    this.picture.openAroundFolds();
    this.picture.draw(true);
  }
  // The largest tensors that wait for the backward; each leads to its node.
  largest() {
    const rows = this.tree.kept(), first = 10, element = make("div", { id: "largest" });
    if (!rows.length) return [];
    const show = (some) => {
      const most = rows[0].bytes || 1;
      element.replaceChildren(table([
        { title: "tensor", value: (row) => row.text },
        { title: "saved by", value: (row) => row.by },
        { title: "bytes", number: true, value: (row) => row.bytes, show: (row) => [shownBytes(row.bytes), make("span", { class: "fill", style: `width:${Math.round(100 * row.bytes / most)}%` })] },
      ], some, { onRow: (row) => this.picture.reveal(row.node), key: (row) => row.node }));
      if (some.length < rows.length) element.append(make("button", { type: "button", class: "more", onclick: () => show(rows) }, `All ${rows.length}`));
    };
    show(rows.slice(0, first));
    return [make("h2", {}, "Largest saved tensors"), element];
  }
  modules() {
    const rows = [...moduleRows(this.tree).values()], most = rows.reduce((most, row) => Math.max(most, row.bytes), 1);
    const element = table([
      { title: "module", value: (row) => row.module, show: (row) => [row.module || "(none)", make("span", { class: "dim" }, ` ${this.tree.classes[row.module] || ""}`)] },
      { title: "nodes", number: true, value: (row) => row.nodes },
      { title: "saved", number: true, value: (row) => row.bytes, show: (row) => [shownBytes(row.bytes), make("span", { class: "fill", style: `width:${Math.round(100 * row.bytes / most)}%` })] },
    ], rows, { onRow: (row) => this.picture.reveal(this.firstOf(row.module)), key: (row) => row.module });
    element.id = "modules";
    return element;
  }
  firstOf(module) { return this.tree.record.nodes.findIndex((node) => (node.module || "") === module); }
  diffTable() {
    if (this.trees.length < 2) return [];
    const element = table([
      { title: "module", value: (row) => row.module, show: (row) => row.module || "(none)" },
      { title: "nodes", value: (row) => row.after.nodes - row.before.nodes,
        show: (row) => [make("div", { class: "plus" }, row.added.join(", ")), make("div", { class: "minus" }, row.removed.join(", "))] },
      { title: "saved", number: true, value: (row) => row.after.bytes - row.before.bytes, show: (row) => signed(row.after.bytes - row.before.bytes) },
    ], this.changes);
    element.id = "diff";
    const total = this.trees[1].total - this.trees[0].total;
    return [make("h2", {}, `Changes: ${this.changes.length} modules, ${signed(total)}`), element];
  }
  explain() {
    const keys = [["/", "search"], ["↑ ↓ ← →", "walk"], ["e Enter", "open"], ["c", "close"], ["p", "way to the last chosen (or Shift-click)"], ["+ − 0", "zoom"], ["Esc", "clear"]];
    this.details.replaceChildren(make("h2", {}, "Keys"), make("div", {}, keys.flatMap(([key, what]) => [make("kbd", {}, key), ` ${what}  `])));
  }
  chosen(item, asEnd, note) {
    const before = this.last;
    this.last = item.node !== undefined ? item.node : item.group.last;
    if (asEnd && before !== undefined && before !== this.last) { this.way(before, this.last); return; }
    for (const each of this.picture.items) each.element.classList.toggle("chosen", each === item);
    this.before = before;
    const rows = [];
    const say = (term, ...what) => rows.push(make("dt", {}, term), make("dd", {}, ...what));
    if (note) say("Note", note);
    if (item.group) {
      const group = item.group, kind = this.tree.classOf(group.isFold ? group.groups[0] : group);
      say(group.isModule ? "Module" : "Modules", group.isModule ? group.name || "(none)" : runName(group));
      if (kind) say("Class", kind);
      if (group.isFold) say("Folded", `${group.groups.length} of the same structure; opening it opens the first`);
      say("Nodes", String(group.count));
      say("Saved", `${shownBytes(item.group.bytes)} (${item.group.bytes} bytes)`);
    } else {
      const record = this.tree.record, node = record.nodes[item.node];
      say("Node", `${node.kind} [${item.node}]`); say("Module", node.module || "(none)");
      if (node.parameter) say("Parameter", node.parameter);
      if (node.source) say("Source", `${node.op} at ${node.source}`);
      say("Outputs", node.outputs.map((index) => shownTensor(record, index)).join("; "));
      if (node.inputs.length) say("Inputs", node.inputs.map((index) => index === null ? "no gradient" : shownTensor(record, index)).join("; "));
      if (node.hooks) say("Hooks", node.hooks.join(", "));
      for (const saved of node.saved || []) say(`Saved: ${saved.name}`, `${shownTensor(record, saved.tensor)}, ${shownBytes(saved.nbytes)}`
        + (saved.storage === null ? "" : `, storage ${saved.storage} of ${shownBytes(saved.storage_nbytes)}`)
        + (saved.role ? `, ${saved.view ? "view of " : ""}${saved.role} ${saved.of || ""}` : "") + (saved.hook ? `, by ${saved.hook}` : ""));
    }
    this.details.replaceChildren(make("h2", {}, "Chosen"), make("dl", {}, rows));
  }
  way(a, b) {
    const way = this.tree.path(a, b);
    this.picture.way = way || [];
    this.picture.draw();
    const kinds = way ? way.map((id) => this.tree.record.nodes[id].kind) : [];
    this.details.replaceChildren(make("h2", {}, way ? `A way of ${way.length} nodes` : "No way between these two"),
      make("div", {}, kinds.slice(0, 200).join(" → ")));
  }
  find() {
    const words = this.search.value.trim().toLowerCase();
    this.hits = [];
    if (words) {
      const nodes = this.tree.record.nodes;
      for (let id = 0; id < nodes.length; id++) {
        const node = nodes[id];
        if (node.kind.toLowerCase().includes(words) || (node.module || "").toLowerCase().includes(words)
          || (node.parameter || "").toLowerCase().includes(words) || (node.source || "").toLowerCase().includes(words)) this.hits.push(id);
      }
    }
    this.at = -1;
    this.found.textContent = words ? `${this.hits.length} found` : "";
    this.picture.hits = new Set(this.hits);
    this.picture.draw();
  }
  next(by) {
    if (!this.hits || !this.hits.length) return;
    this.at = (this.at + by + this.hits.length) % this.hits.length;
    this.picture.reveal(this.hits[this.at]);
    this.found.textContent = `${this.at + 1} of ${this.hits.length}`;
  }
  closeChosen() {
    const item = this.picture.chosen;
    if (item && item.parent && item.parent !== this.tree.root) this.picture.close(item.parent);
  }
  key(event) {
    const picture = this.picture, arrows = { ArrowUp: "up", ArrowDown: "down", ArrowLeft: "left", ArrowRight: "right" };
    if (event.key === "/") this.search.focus();
    else if (arrows[event.key]) picture.step(arrows[event.key]);
    else if (event.key === "e" || event.key === "Enter") picture.toggle(picture.focused || picture.chosen);
    else if (event.key === "c") this.closeChosen();
    else if (event.key === "p") { if (this.before !== undefined && this.last !== undefined) this.way(this.before, this.last); }
    else if (event.key === "+" || event.key === "=") picture.zoom(1.2);
    else if (event.key === "-") picture.zoom(1 / 1.2);
    else if (event.key === "0") picture.fit();
    else if (event.key === "Escape") { this.search.value = ""; picture.way = []; this.find(); this.explain(); }
    else return false;
    return true;
  }
}
