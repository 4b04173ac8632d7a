"use strict";
// One run as a picture: a row for each rank, its idle time hatched, lower rows for its links, a ruler, and what each rank keeps.
const MEANING = { F: "forward", I: "input gradient", W: "weight gradient", B: "whole backward", "+": "forward and backward overlapped",
  UNSHARD: "gathers parameters", REDUCE_GRAD: "reduces gradients", RESHARD: "frees parameters", OFFLOAD: "moves away activations", RELOAD: "brings back activations" };

function colourOf(op, tint) {
  const base = MEANING[op] ? `var(--op-${op === "+" ? "both" : op})` : `hsl(${hue(op)} 55% 62%)`;
  return tint ? `color-mix(in srgb, ${base}, white ${Math.round(55 * tint)}%)` : base;
}

class Run {
  constructor(run, section) {
    Object.assign(this, run);
    const ranks = this.events.reduce((most, event) => Math.max(most, event.rank + 1), 0);
    const links = ["", ...new Set(this.events.map((event) => event.link).filter(Boolean))];
    this.rows = Array.from({ length: ranks }, (_, rank) => links.map((link) => ({ rank, link, events: [] }))).flat();
    this.events.forEach((event, index) => { event.index = index; this.rows[event.rank * links.length + links.indexOf(event.link)].events.push(event); });
    this.rows = this.rows.filter((row) => !row.link || row.events.length);
    this.high = 0;
    for (const row of this.rows) {
      row.events.sort((a, b) => a.start - b.start);
      row.top = this.high; row.high = row.link ? LANES.link : LANES.row;
      this.high += row.high;
    }
    this.lanes = this.rows.filter((row) => !row.link).map((row) => row.events); // what each rank computes
    this.idle = this.lanes.map(gaps);
    this.end = this.events.reduce((most, event) => Math.max(most, event.end), 0);
    this.shortest = this.events.reduce((least, event) => (event.end > event.start ? Math.min(least, event.end - event.start) : least), Infinity);
    this.critical = this.events.filter((event) => event.critical).sort((a, b) => a.start - b.start);
    this.most = Math.max(section.limit || 0, ...this.memory.map((curve) => curve.reduce((most, [, level]) => Math.max(most, level), 0)), 0) || 1;
  }
  rowOf(event) { return this.rows.find((row) => row.rank === event.rank && row.link === event.link); }
  // How long a rank works, and how long it does not, between two moments.
  sums(rank, from, to) {
    const inside = (a, b) => Math.max(0, Math.min(b, to) - Math.max(a, from)), ops = new Map();
    let busy = 0;
    for (const event of this.lanes[rank]) {
      const time = inside(event.start, event.end);
      if (time) { busy += time; ops.set(event.op, (ops.get(event.op) || 0) + time); }
    }
    return { busy, idle: to - from - busy, ops };
  }
}

function gaps(lane) {
  const found = [];
  let end = lane.length ? lane[0].start : 0;
  for (const event of lane) {
    if (event.start > end) found.push([end, event.start]);
    end = Math.max(end, event.end);
  }
  return found;
}

function drawRun(view, run, index) {
  const { left, strip, ruler } = LANES, rows = run.high, strips = run.memory.length ? run.memory.length * strip + 22 : 0;
  const high = rows + ruler + strips, right = left + view.span, hatch = `hatch-${view.number}-${index}`;
  const chart = make("svg", { class: "lanes", viewBox: `0 0 ${view.wide} ${high}`, tabindex: 0, role: "application", "aria-roledescription": "timeline",
    "aria-label": `${run.name}: ${run.lanes.length} ranks. Arrow keys walk from action to action, W and S zoom, A and D pan.`, "aria-describedby": `details-${view.number}` },
  make("defs", {}, make("pattern", { id: hatch, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    make("rect", { width: 6, height: 6, class: "hatch-back" }), make("line", { x1: 0, y1: 0, x2: 0, y2: 6, class: "hatch-line" }))));
  for (const tick of ticks(view.view[0], view.view[1], view.unit, view.span / 90)) {
    const x = view.x(tick.at).toFixed(1);
    chart.append(make("line", { class: "grid", x1: x, x2: x, y1: 0, y2: rows + 4 }), make("text", { x, y: rows + 17, class: "dim middle tick" }, tick.text));
  }
  for (const row of run.rows) {
    if (row.link) chart.append(make("text", { x: left - 8, y: row.top + 12, class: "dim end link" }, row.link));
    else drawLane(view, run, row, chart, hatch);
    drawBoxes(view, row, chart);
  }
  if (view.path && run.critical.length) drawPath(view, run, chart);
  run.memory.forEach((curve, rank) => drawStrip(view, run, curve, rank, rows + ruler + 22 + rank * strip, chart));
  if (strips) chart.append(make("text", { x: left, y: rows + ruler + 14, class: "dim" }, view.section.memory_title));
  if (view.range) {
    const from = Math.max(left, view.x(view.range[0])), to = Math.min(right, view.x(view.range[1]));
    if (to > from) chart.append(make("rect", { class: "range", x: from, y: 0, width: to - from, height: high }));
  }
  return chart;
}

function drawLane(view, run, { rank, events: lane, top: above }, chart, hatch) {
  const { left, box } = LANES, top = above + 2, [from, to] = view.view, clip = clipped(view);
  const { busy } = run.sums(rank, 0, run.end), whole = lane.length ? lane[lane.length - 1].end - lane[0].start : 0;
  chart.append(make("text", { x: 0, y: top + 15 }, `rank ${rank}`), make("text", { x: left - 8, y: top + 15, class: "dim end" }, whole ? `${Math.round(100 * busy / whole)}%` : "",
    make("title", {}, `rank ${rank} works ${shownShare(whole ? busy / whole : 0)} of the time from its first start to its last end`)));
  for (const [start, end] of run.idle[rank]) {
    if (end < from || start > to || view.x(end) - view.x(start) < 0.5) continue;
    const x = clip(start), width = clip(end) - x, text = `idle ${shown(end - start, view.unit, 3)}`;
    chart.append(make("rect", { class: "idle", x, y: top, width, height: box, fill: `url(#${hatch})` }, make("title", {}, text)));
    if (width > 7 * text.length) chart.append(make("text", { x: x + width / 2, y: top + 15, class: "gap-text middle" }, text));
  }
}

// A time as a place, no farther out than the picture.
function clipped(view) {
  const { left } = LANES, right = left + view.span;
  return (time) => Math.min(right, Math.max(left, view.x(time)));
}

function drawBoxes(view, row, chart) {
  const top = row.top + 2, box = row.high - 4, [from, to] = view.view, clip = clipped(view);
  let many = null; // actions too narrow to be seen alone are drawn together
  const flush = () => {
    if (many) chart.append(make("rect", { class: "event many", x: many.x, y: top, width: Math.max(0.8, many.end - many.x), height: box, style: `fill:${colourOf(many.op, 0)}` }));
    many = null;
  };
  for (const event of row.events) {
    if (event.end < from || event.start > to) continue;
    const x = clip(event.start), end = clip(event.end), width = end - x;
    if (width < 1.5) {
      if (many && x - many.end < 1 && end - many.x < 6) many.end = end;
      else { flush(); many = { x, end, op: event.op }; }
      continue;
    }
    flush();
    const chosen = view.chosen && view.chosen.event === event;
    chart.append(make("rect", { class: chosen ? "event chosen" : "event", x: x.toFixed(2), y: top, width: width.toFixed(2), height: box,
      style: `fill:${colourOf(event.op, event.tint)}`, "data-index": event.index }));
    const number = String(event.microbatch ?? ""), brief = event.link ? `${event.stage}${event.op[0]}${number}` : ""; // 0UNSHARD is 0U
    const label = [event.label, brief, number].find((text) => text && (event.link ? 8 : 6.8) * text.length + 3 < width);
    if (label) chart.append(make("text", { x: (x + width / 2).toFixed(1), y: top + (box + 8) / 2, class: "label middle" }, label));
  }
  flush();
}

// A line under the actions on the critical path, and from one rank to the next.
function drawPath(view, run, chart) {
  const { left } = LANES, right = left + view.span, foot = new Map(run.critical.map((event) => [event, run.rowOf(event).top + (event.link ? LANES.link - 2 : LANES.box)])), keep = (time) => Math.min(right + 1, Math.max(left - 1, view.x(time)));
  const points = run.critical.flatMap((event) => [event.start, event.end].map((time) => `${keep(time).toFixed(1)},${foot.get(event)}`));
  chart.append(make("polyline", { class: "path", points: points.join(" ") }));
}

function drawStrip(view, run, curve, rank, top, chart) {
  const { left, strip } = LANES, high = strip - 8, bottom = top + high, right = left + view.span, { limit, memory_unit: unit } = view.section;
  const y = (level) => (bottom - (level / run.most) * high).toFixed(1), keep = (time) => Math.min(right, Math.max(left, view.x(time)));
  const peak = curve.reduce((most, [, level]) => Math.max(most, level), 0), points = [`M${left},${bottom}`];
  let level = 0;
  for (const [time, next] of curve) {
    const x = keep(time).toFixed(1);
    points.push(`L${x},${y(level)}L${x},${y(next)}`);
    level = next;
  }
  points.push(`L${keep(run.end).toFixed(1)},${y(level)}L${keep(run.end).toFixed(1)},${bottom}`);
  const over = limit !== null && peak > limit * (1 + 1e-9);
  chart.append(make("line", { class: "grid", x1: left, x2: right, y1: bottom, y2: bottom }),
    make("path", { class: over ? "kept over" : "kept", d: points.join("") }, make("title", {}, `rank ${rank}: at most ${shown(peak, unit)}`)),
    make("text", { x: 0, y: top + 13 }, `rank ${rank}`), make("text", { x: 0, y: top + 27, class: "dim" }, shown(peak, unit, 3)));
  if (limit !== null) chart.append(make("line", { class: "limit", x1: left, x2: right, y1: y(limit), y2: y(limit) }), rank ? null : make("text", { class: "limit-text end", x: right, y: Number(y(limit)) - 4 }, `limit ${shown(limit, unit)}`));
}
