"use strict";
// What the panel below a timeline says: about the chosen action, and about the selected range.
function describe(view) {
  const parts = [];
  if (view.chosen) parts.push(...aboutEvent(view, view.chosen.run, view.chosen.event));
  if (view.range) parts.push(...aboutRange(view));
  return parts.length ? parts : [make("p", { class: "dim" }, "Click an action for its details. Drag on the ruler, or with Shift, to sum up a range.")];
}

function aboutEvent(view, run, event) {
  const time = (value) => shown(value, view.unit), lane = run.rowOf(event).events, before = lane[lane.indexOf(event) - 1];
  const which = event.microbatch === null ? "" : ` for microbatch ${event.microbatch}`;
  const what = event.op === "+" ? MEANING[event.op] : MEANING[event.op] ? `${MEANING[event.op]} of stage ${event.stage}${which}` : event.op;
  const rows = [["what", what], ["where", `rank ${event.rank}${event.link ? `, beside its computation (${event.link})` : ""}, ${run.name}`], ["when", `${time(event.start)} to ${time(event.end)}`], ["takes", time(event.end - event.start)]];
  const wait = event.start - (before ? before.end : 0);
  rows.push(["waited before", wait > 1e-12 * view.end ? time(wait) : "not at all"]);
  for (const other of view.runs) {
    const alike = (each) => each.rank === event.rank && each.label === event.label; // a gather may come several times
    const same = other === run ? null : other.events.filter(alike)[run.events.filter(alike).indexOf(event)];
    if (!same) continue;
    const length = same.end - same.start, ratio = length ? (event.end - event.start) / length : 0;
    rows.push([other.name, `${time(length)}, from ${time(same.start)}${ratio ? `; here ${ratio.toFixed(2)} times that` : ""}`]);
  }
  if (run.critical.length) rows.push(["critical path", event.critical ? "on it: the step is longer by whatever this takes longer" : "not on it"]);
  return [make("h4", {}, event.label), make("dl", { class: "about" }, rows.map(([term, text]) => make("div", {}, make("dt", {}, term), make("dd", {}, text))))];
}

// F, I, W and B first, in this order.
function order(ops) {
  const known = Object.keys(MEANING), place = (op) => (known.includes(op) ? known.indexOf(op) : known.length);
  return [...ops].sort((a, b) => place(a) - place(b));
}

function aboutRange(view) {
  const [from, to] = view.range, [by, unit] = scaleOf(view.unit, to - from), time = (value) => short(value / by) + unit, parts = [make("h4", {}, `${time(from)} to ${time(to)}: ${time(to - from)}`)];
  for (const run of view.runs) {
    const rows = run.lanes.map((lane, rank) => run.sums(rank, from, to)), ops = order(new Set(rows.flatMap((row) => [...row.ops.keys()])));
    const total = { busy: 0, idle: 0, ops: new Map() };
    for (const row of rows) {
      total.busy += row.busy; total.idle += row.idle;
      for (const [op, each] of row.ops) total.ops.set(op, (total.ops.get(op) || 0) + each);
    }
    const cells = (name, row) => make("tr", {}, make("th", { scope: "row" }, name), [time(row.busy), time(row.idle), shownShare(row.busy + row.idle ? row.idle / (row.busy + row.idle) : 0), ...ops.map((op) => time(row.ops.get(op) || 0))]
      .map((text) => make("td", { class: "number" }, text)));
    parts.push(make("div", { class: "wide" }, make("table", { class: "sums", "data-run": run.name }, make("caption", {}, run.name),
      make("thead", {}, make("tr", {}, ["", "busy", "idle", "idle share", ...ops].map((text) => (text ? make("th", { scope: "col", class: "number" }, text) : make("td"))))),
      make("tbody", {}, rows.map((row, rank) => cells(`rank ${rank}`, row)), rows.length > 1 ? cells("all", total) : null))));
  }
  return parts;
}
