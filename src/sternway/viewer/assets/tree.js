"use strict";
// A graph as a tree of groups: modules, and runs of neighbours where a group would have too many members to look at.
const MEMBERS = 60; // more than this in one box is a wall, not a picture

class Group { // isModule: one module of the model; isFold: neighbours of the same structure
  constructor(name, label, parent, isModule) {
    this.name = name; this.label = label; this.parent = parent; this.isModule = isModule; this.isFold = false;
    this.groups = []; this.nodes = []; this.count = 0; this.bytes = 0; this.first = Infinity;
  }
}

class Tree {
  constructor(record) {
    this.record = record;
    const nodes = record.nodes;
    this.bytes = this.attribute(nodes); // by node: each storage where it is first kept, as Graph.by_module counts
    this.total = this.bytes.reduce((a, b) => a + b, 0);
    this.root = new Group("", "everything", null, true);
    this.modules = new Map([["", this.root]]);
    this.groupOf = new Array(nodes.length);
    this.places = places(nodes);
    for (let id = 0; id < nodes.length; id++) {
      const group = this.module(nodes[id].module || "");
      group.nodes.push(id);
    }
    this.classes = record.classes || {};
    fold(this, this.order(this.root));
    this.split(this.root);
    this.sum(this.root);
  }
  attribute(nodes) {
    const seen = new Set(), bytes = new Float64Array(nodes.length);
    nodes.forEach((node, id) => {
      for (const saved of node.saved || []) {
        if (saved.storage === null || seen.has(saved.storage)) continue;
        seen.add(saved.storage);
        if (!saved.role) bytes[id] += saved.storage_nbytes; // no role written: an activation
      }
    });
    return bytes;
  }
  module(name) {
    let group = this.modules.get(name);
    if (!group) {
      const dot = name.lastIndexOf(".");
      const parent = this.module(dot < 0 ? "" : name.slice(0, dot));
      group = new Group(name, name.slice(dot + 1), parent, true);
      parent.groups.push(group);
      this.modules.set(name, group);
    }
    return group;
  }
  // Members in the order of the forward.
  members(group) {
    const all = [...group.groups.map((g) => ({ group: g, at: g.first })), ...group.nodes.map((n) => ({ node: n, at: this.places[n] }))];
    return all.sort((a, b) => a.at - b.at);
  }
  order(group) { // the first node in each group, without recursion: names may be deep
    const all = [group];
    for (let i = 0; i < all.length; i++) for (const inner of all[i].groups) all.push(inner);
    for (const each of all.reverse()) {
      each.first = each.nodes.reduce((least, node) => Math.min(least, this.places[node]), Infinity);
      for (const inner of each.groups) each.first = Math.min(each.first, inner.first);
    }
    return all;
  }
  split(root) {
    for (const group of this.order(root)) {
      if (group.isFold) continue;
      let members = this.members(group);
      while (members.length > MEMBERS) {
        const size = Math.max(2, Math.ceil(members.length / Math.ceil(members.length / MEMBERS)));
        const runs = [];
        for (let at = 0; at < members.length; at += size) {
          const run = new Group(group.name, "", group, false);
          for (const member of members.slice(at, at + size)) {
            if (member.group) { member.group.parent = run; run.groups.push(member.group); } else run.nodes.push(member.node);
          }
          run.first = members[at].at;
          runs.push(run);
        }
        group.groups = runs; group.nodes = [];
        members = runs.map((run) => ({ group: run, at: run.first }));
      }
    }
  }
  sum(root) {
    const all = [root];
    for (let i = 0; i < all.length; i++) for (const inner of all[i].groups) all.push(inner);
    for (const group of all.reverse()) {
      group.count = group.nodes.length;
      group.low = group.nodes.reduce((least, node) => Math.min(least, node), Infinity); group.last = group.nodes.reduce((most, node) => Math.max(most, node), -1);
      for (const node of group.nodes) { group.bytes += this.bytes[node]; this.groupOf[node] = group; }
      for (const inner of group.groups) {
        group.count += inner.count; group.bytes += inner.bytes; group.last = Math.max(group.last, inner.last); group.low = Math.min(group.low, inner.low);
      }
      if (group.isFold) group.label = `${group.groups.length} × ${this.classOf(group.groups[0]) || "block"}`;
      else if (!group.isModule && !group.unit) group.label = runName(group);
    }
  }
  classOf(group) { const module = group.unit || group; return module.isModule ? this.classes[module.name] || "" : ""; }
  // What stands below a box's name: its class, its modules if it is several, its size.
  about(group) {
    const size = `${group.count} nodes · ${shownBytes(group.bytes)}`, kind = group.isFold ? runName(group) : this.classOf(group);
    return kind ? `${kind} · ${size}` : size;
  }
  ids(group) {
    const found = [], stack = [group];
    while (stack.length) { const g = stack.pop(); for (const n of g.nodes) found.push(n); stack.push(...g.groups); }
    return found;
  }
  // Saved tensors by size: each storage where it is first kept, without parameters and buffers.
  kept() {
    const seen = new Set(), rows = [];
    this.record.nodes.forEach((node, id) => {
      for (const saved of node.saved || []) {
        if (saved.storage === null || seen.has(saved.storage)) continue;
        seen.add(saved.storage);
        if (saved.role) continue;
        const by = `${saved.name} of ${node.kind.replace(/Backward0?$/, "")}${node.module ? " in " + node.module : ""}`;
        rows.push({ node: id, bytes: saved.storage_nbytes, text: shownTensor(this.record, saved.tensor), by });
      }
    });
    return rows.sort((a, b) => b.bytes - a.bytes);
  }
  // A shortest way along the edges from a to b, or from b to a; null if there is none.
  path(a, b) { return this.search(a, b) || this.search(b, a); }
  search(from, to) {
    const nodes = this.record.nodes, came = new Map([[from, -1]]), queue = [from];
    for (let at = 0; at < queue.length; at++) {
      const id = queue[at];
      if (id === to) {
        const way = [];
        for (let step = id; step !== -1; step = came.get(step)) way.push(step);
        return way.reverse();
      }
      for (const target of nodes[id].next) {
        if (target && !came.has(target[0])) { came.set(target[0], id); queue.push(target[0]); }
      }
    }
    return null;
  }
}

// Where in the forward each node is: its number; a leaf is just before the first node that uses it.
function places(nodes) {
  const found = Float64Array.from(nodes, (node, id) => id);
  for (let id = nodes.length - 1; id >= 0; id--) for (const target of nodes[id].next) if (target && !nodes[target[0]].next.length) found[target[0]] = id - 0.5;
  return found;
}

function shownTensor(record, index) {
  const [shape, dtype, device] = record.tensors[index];
  const size = shape === null ? "?" : shape.join("×") || "scalar";
  return `${dtype} ${size}${device === "cpu" || !device ? "" : " on " + device}`;
}
