"use strict";
// The picture: what is open of the tree, laid out by dagre, drawn as SVG, with panning and zooming.
const MOST = 700; // boxes at once; the layout takes seconds beyond

class Picture {
  constructor(tree, { onChoose, changes }) {
    this.tree = tree; this.onChoose = onChoose; this.changes = changes || new Map();
    this.open = new Set([tree.root]); this.out = new Set(); this.rests = new Map(); this.chosen = null; this.hits = new Set(); this.way = []; this.colour = "bytes";
    this.view = make("g");
    const arrow = make("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7,
      orient: "auto-start-reverse" }, make("path", { d: "M0,0.5 L8,4 L0,7.5 z", fill: "var(--edge)" }));
    this.svg = make("svg", { class: "picture", role: "application", "aria-label": "The graph: arrow keys walk from box to box, E opens one, C closes" }, make("defs", {}, arrow), this.view);
    this.at = { x: 0, y: 0, scale: 1 };
    this.move();
  }
  // The boxes to draw: for each node of the graph, the innermost one that is shown.
  visible() {
    const items = new Map(), itemOf = new Int32Array(this.tree.record.nodes.length), list = [];
    const add = (item) => { item.key = "b" + list.length; list.push(item); items.set(item.key, item); return list.length - 1; };
    const stack = [this.tree.root];
    while (stack.length) {
      const group = stack.pop();
      for (const inner of group.isFold ? this.unfolded(group) : group.groups) {
        if (this.open.has(inner)) stack.push(inner);
        else { const at = add({ group: inner, parent: group }); for (const id of this.tree.ids(inner)) itemOf[id] = at; }
      }
      for (const id of group.nodes) itemOf[id] = add({ node: id, parent: group });
    }
    return { list, items, itemOf };
  }
  // The members of an open fold: those taken out of it, and what is left between them, folded.
  unfolded(group) {
    const shown = [];
    let rest = [];
    const flush = () => {
      if (rest.length > 1) {
        const key = `${group.name} ${rest[0].first} ${rest.length}`;
        if (!this.rests.has(key)) this.rests.set(key, restOf(this.tree, group, rest));
        shown.push(this.rests.get(key));
      } else shown.push(...rest);
      rest = [];
    };
    for (const member of group.groups) if (this.out.has(member)) { flush(); shown.push(member); } else rest.push(member);
    flush();
    return shown;
  }
  // At first everything is closed, but for what has folds inside: they show how the model is made.
  openAroundFolds() {
    for (const each of this.tree.folds) {
      const way = [];
      for (let g = each.parent; g && !this.open.has(g); g = g.parent) way.push(g);
      if (way.some((g) => g.isFold) || this.visible().list.length + way.reduce((sum, g) => sum + g.groups.length + g.nodes.length, 0) > 40) continue;
      for (const g of way) this.open.add(g);
    }
  }
  draw(fit) {
    const nodes = this.tree.record.nodes, { list, items, itemOf } = this.visible();
    const g = new LAYOUT.graphlib.Graph({ compound: true, multigraph: false });
    g.setGraph({ rankdir: "TB", nodesep: 16, ranksep: 30, marginx: 16, marginy: 16 });
    g.setDefaultEdgeLabel(() => ({}));
    const boxes = new Map();
    const box = (group) => { // an open group is a box around its members
      if (group === this.tree.root) return null;
      if (!boxes.has(group)) {
        const key = "g" + boxes.size;
        boxes.set(group, key);
        g.setNode(key, { group });
        const outer = box(group.parent);
        if (outer) g.setParent(key, outer);
      }
      return boxes.get(group);
    };
    for (const item of list) {
      item.label = item.group ? item.group.label : this.label(nodes[item.node]);
      item.small = item.group ? this.tree.about(item.group) : this.small(item.node);
      g.setNode(item.key, { width: Math.max(74, 16 + 7.1 * Math.max(item.label.length + 2, item.small.length * 0.92)), height: 40 });
      const outer = box(item.parent);
      if (outer) g.setParent(item.key, outer);
    }
    const seen = new Set();
    nodes.forEach((node, id) => {
      for (const target of node.next) {
        if (!target) continue;
        const a = itemOf[id], b = itemOf[target[0]], key = a * list.length + b;
        if (a !== b && !seen.has(key)) { seen.add(key); g.setEdge(list[a].key, list[b].key); }
      }
    });
    layOut(g, [...boxes.values()]);
    this.items = list; this.itemOf = itemOf; this.laid = g;
    this.paint(boxes);
    if (fit) this.fit();
  }
  label(node) { return node.parameter || node.kind.replace(/Backward0?$/, ""); }
  small(id) {
    const node = this.tree.record.nodes[id], bytes = this.tree.bytes[id];
    const out = node.outputs.length ? shownTensor(this.tree.record, node.outputs[0]) : "";
    return bytes ? `${out} · ${shownBytes(bytes)}` : out;
  }
  paint(boxes) {
    const g = this.laid, way = new Set(this.way), largest = Math.max(1, ...this.items.map((item) => this.weight(item)));
    const layer = make("g"), headings = [];
    for (const [group, key] of boxes) {
      const at = g.node(key);
      const x = at.x - at.width / 2, y = at.y - at.height / 2;
      layer.append(make("g", { class: "open" },
        make("rect", { x, y, width: at.width, height: at.height }),
        make("rect", { class: "handle", x, y, width: at.width, height: HEADING, onclick: () => this.close(group) })));
      headings.push(make("text", { x: x + 8, y: y + 14, class: "heading" }, this.heading(group, at.width)));
    }
    const steps = new Set();
    for (let i = 1; i < this.way.length; i++) steps.add(this.itemOf[this.way[i - 1]] + " " + this.itemOf[this.way[i]]);
    for (const edge of g.edges()) {
      const d = g.edge(edge).points.map((p, i) => (i ? "L" : "M") + p.x.toFixed(1) + "," + p.y.toFixed(1)).join("");
      const on = steps.has(`${edge.v.slice(1)} ${edge.w.slice(1)}`) || steps.has(`${edge.w.slice(1)} ${edge.v.slice(1)}`);
      layer.append(make("path", { class: on ? "edge way" : "edge", d, "marker-end": "url(#arrow)" }));
    }
    layer.append(...headings); // over the edges
    for (const item of this.items) layer.append(this.paintItem(item, g.node(item.key), largest, way));
    this.view.replaceChildren(layer);
  }
  heading(group, width) { // as much as there is room for
    const words = [`▾ ${group.label}`, this.tree.classOf(group), shownBytes(group.bytes)].filter(Boolean);
    while (words.length > 1 && 6.8 * words.join(" · ").length > width - 12) words.pop();
    return words.join(" · ");
  }
  weight(item) { return item.group ? item.group.bytes : this.tree.bytes[item.node]; }
  paintItem(item, at, largest, way) {
    const ids = item.group ? this.tree.ids(item.group) : [item.node];
    const marks = ["item", item.group ? "group" : "node"];
    if (item === this.chosen || (this.chosen && (item.group ? item.group === this.chosen.group : item.node === this.chosen.node))) {
      marks.push("chosen"); this.chosen = item;
    }
    if (this.hits.size && ids.some((id) => this.hits.has(id))) marks.push("hit");
    if (way.size && ids.some((id) => way.has(id))) marks.push("way");
    const change = this.changes.get(item.group ? item.group.name : "");
    if (item.group && change) marks.push(change);
    const element = make("g", { class: marks.join(" "), tabindex: 0, role: "button", "data-key": item.key,
      "data-module": item.group ? item.group.name : undefined, "data-node": item.group ? undefined : item.node,
      transform: `translate(${(at.x - at.width / 2).toFixed(1)},${(at.y - at.height / 2).toFixed(1)})`,
      onclick: (event) => this.choose(item, event.shiftKey), ondblclick: () => this.toggle(item),
      onfocus: () => { this.focused = item; } },
    make("rect", { width: at.width, height: at.height, fill: this.fill(item, largest) }),
    make("text", { x: 8, y: 16 }, (item.group ? "▸ " : "") + item.label),
    make("text", { x: 8, y: 32, class: "sub" }, item.small));
    item.element = element;
    return element;
  }
  fill(item, largest) {
    const dark = document.documentElement.dataset.theme === "dark";
    if (this.colour === "bytes") {
      const share = Math.sqrt(this.weight(item) / largest);
      return `hsl(212 ${Math.round(20 + 60 * share)}% ${dark ? Math.round(16 + 22 * share) : Math.round(96 - 20 * share)}%)`;
    }
    const name = this.colour === "kind" && !item.group ? this.tree.record.nodes[item.node].kind : item.label;
    let hash = 7;
    for (const letter of name) hash = (hash * 31 + letter.codePointAt(0)) % 360;
    return `hsl(${hash} 45% ${dark ? 26 : 88}%)`;
  }
  choose(item, asEnd) { this.chosen = item; this.onChoose(item, asEnd); }
  toggle(item) {
    if (!item || !item.group) return;
    const folded = item.group.isFold, inner = folded ? item.group.groups[0] : item.group, more = inner.groups.length + inner.nodes.length;
    if (this.items.length + more > MOST) { this.onChoose(item, false, "Too many boxes are open: close one first (c)."); return; }
    if (folded) this.takeOut(inner); // of identical ones, one is opened
    this.open.add(inner);
    if (inner.unit) this.open.add(inner.unit);
    this.chosen = null;
    this.draw(false);
    const first = this.items.find((each) => each.parent === (inner.unit || inner));
    this.at.scale = Math.max(this.at.scale, 0.7);
    if (first) { this.centre(first); this.choose(first); first.element.focus({ preventScroll: true }); }
  }
  takeOut(member) { this.out.add(member); this.open.add(member.parent); }
  close(group) {
    const inside = (inner) => { let g = inner; while (g && g !== group) g = g.parent; return g === group; };
    for (const set of [this.open, this.out]) for (const inner of [...set]) if (inside(inner) && (set === this.open || inner !== group)) set.delete(inner);
    this.open.add(this.tree.root);
    this.chosen = { group };
    this.draw(false);
    const item = this.items.find((each) => each.group === group);
    if (item) { this.centre(item); this.choose(item); item.element.focus({ preventScroll: true }); }
  }
  // Open every box around a node, so that it is shown itself.
  reveal(id) {
    for (let g = this.tree.groupOf[id]; g; g = g.parent) { this.open.add(g); if (g.parent && g.parent.isFold) this.takeOut(g); }
    this.chosen = { node: id };
    this.draw(false);
    const item = this.items[this.itemOf[id]];
    this.at.scale = Math.max(this.at.scale, 0.7);
    this.centre(item); this.choose(item);
  }
  centre(item) {
    const at = this.laid.node(item.key), size = this.svg.getBoundingClientRect();
    this.at.x = size.width / 2 - at.x * this.at.scale; this.at.y = size.height / 2 - at.y * this.at.scale;
    this.place();
  }
  fit() {
    const size = this.svg.getBoundingClientRect(), { width, height } = this.laid.graph();
    const scale = Math.min(1.25, Math.max(0.05, Math.min(size.width / (width || 1), size.height / (height || 1))));
    this.at = { scale, x: (size.width - width * scale) / 2, y: Math.max(4, (size.height - height * scale) / 2) };
    this.place();
  }
  place() { this.view.setAttribute("transform", `translate(${this.at.x},${this.at.y}) scale(${this.at.scale})`); }
  zoom(factor, x, y) {
    const size = this.svg.getBoundingClientRect();
    const px = x === undefined ? size.width / 2 : x - size.left, py = y === undefined ? size.height / 2 : y - size.top;
    const scale = Math.min(4, Math.max(0.03, this.at.scale * factor)), ratio = scale / this.at.scale;
    this.at = { scale, x: px - (px - this.at.x) * ratio, y: py - (py - this.at.y) * ratio };
    this.place();
  }
  move() {
    let from = null;
    this.svg.addEventListener("wheel", (event) => { event.preventDefault(); this.zoom(event.deltaY < 0 ? 1.15 : 1 / 1.15, event.clientX, event.clientY); }, { passive: false });
    this.svg.addEventListener("pointerdown", (event) => { from = { x: event.clientX - this.at.x, y: event.clientY - this.at.y }; });
    window.addEventListener("pointermove", (event) => { if (from && event.buttons) { this.at.x = event.clientX - from.x; this.at.y = event.clientY - from.y; this.place(); } });
    window.addEventListener("pointerup", () => { from = null; });
  }
  // Along the edges with the arrow keys: down to what a box leads to, up to what leads to it, sideways to neighbours.
  step(direction) {
    if (!this.chosen || !this.chosen.key) { if (this.items.length) this.choose(this.items[0]); return; }
    const here = this.laid.node(this.chosen.key);
    const keys = direction === "down" ? this.laid.successors(this.chosen.key)
      : direction === "up" ? this.laid.predecessors(this.chosen.key) : this.items.map((item) => item.key);
    let best = null, least = Infinity;
    for (const key of keys || []) {
      const at = this.laid.node(key), dx = at.x - here.x, dy = at.y - here.y;
      if (key === this.chosen.key || (direction === "left" && dx >= 0) || (direction === "right" && dx <= 0)) continue;
      const far = direction === "left" || direction === "right" ? Math.abs(dx) + 4 * Math.abs(dy) : Math.abs(dx) + Math.abs(dy);
      if (far < least) { least = far; best = key; }
    }
    if (best) { const item = this.items.find((each) => each.key === best); this.choose(item); item.element.focus({ preventScroll: true }); this.centre(item); }
  }
}
