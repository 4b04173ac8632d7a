"use strict";
// Identical neighbours become one box, "24 × Block"; and names for boxes that hold several modules.
const FOLD = 4; // so many or more; fewer are easier to read side by side

function fold(tree, groups) { // groups: inner ones first
  const numbers = new Map(), made = new Map();
  const number = (text) => { if (!numbers.has(text)) numbers.set(text, numbers.size); return numbers.get(text); };
  tree.folds = [];
  for (const group of groups) {
    const parts = tree.members(group).map((member) => (member.group ? `${member.group.label}:${made.get(member.group)}` : tree.record.nodes[member.node].kind));
    made.set(group, number(`${tree.classes[group.name] || ""}|${parts.join(",")}`));
    foldMembers(tree, group, made);
  }
  tree.folds.reverse(); // outer ones first
}

// A unit is a module and the group's own nodes after it, such as the sum between two blocks.
function foldMembers(tree, group, made) {
  const units = [], kind = (node) => tree.record.nodes[node].kind, kinds = (unit) => unit.nodes.map(kind).join();
  for (const member of tree.members(group)) {
    if (member.group) units.push({ module: member.group, nodes: [] });
    else if (units.length) units[units.length - 1].nodes.push(member.node);
  }
  const folded = new Set(), boxes = [];
  for (let at = 0; at < units.length;) {
    let end = at + 1;
    while (end < units.length && made.get(units[end].module) === made.get(units[at].module) && kinds(units[end - 1]) === kinds(units[at])) end++;
    if (end - at >= FOLD) boxes.push(restOf(tree, group, units.slice(at, end).map((unit) => unitOf(tree, group, unit, units[at], folded, kind))));
    else boxes.push(...units.slice(at, end).map((unit) => unit.module));
    at = end;
  }
  for (const box of boxes) if (box.isFold) { tree.folds.push(box); for (const member of box.groups) member.parent = box; }
  group.groups = boxes;
  group.nodes = group.nodes.filter((node) => !folded.has(node));
}

// The module alone, or a box around it and its nodes; those that follow the last unit may be others.
function unitOf(tree, group, unit, first, folded, kind) {
  const nodes = first.nodes.every((node, place) => unit.nodes.length > place && kind(unit.nodes[place]) === kind(node)) ? unit.nodes.slice(0, first.nodes.length) : [];
  if (!nodes.length) return unit.module;
  const box = new Group(group.name, unit.module.label, group, false);
  box.unit = unit.module; box.groups = [unit.module]; box.nodes = nodes; box.first = unit.module.first;
  unit.module.parent = box;
  for (const node of nodes) folded.add(node);
  return box;
}

// A box for members of the same structure.
function restOf(tree, parent, members) {
  const rest = new Group(parent.name, "", parent, false);
  rest.isFold = true;
  rest.groups = members;
  rest.first = members[0].first;
  rest.low = members[0].low; rest.last = members[members.length - 1].last;
  for (const member of members) { rest.count += member.count; rest.bytes += member.bytes; }
  rest.label = `${members.length} × ${tree.classOf(members[0]) || "block"}`;
  return rest;
}

// The modules of a box that is not one module: "blocks 270–319", or its nodes.
function runName(group) {
  const modules = group.groups.map((inner) => inner.unit || inner).filter((inner) => inner.isModule), first = modules[0], last = modules[modules.length - 1];
  if (!first || modules.length < group.groups.length) return `nodes ${group.low}–${group.last}`;
  const outer = group.name ? `${group.name.slice(group.name.lastIndexOf(".") + 1)} ` : "";
  return first === last ? outer + first.label : `${outer}${first.label}–${last.label}`;
}
