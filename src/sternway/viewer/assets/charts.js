"use strict";
// Charts of a report that do not move: what is known, a verdict, bars, curves, a table.
function hue(name) {
  let hash = 7;
  for (const letter of String(name)) hash = (hash * 31 + letter.codePointAt(0)) % 360;
  return hash;
}

const SECTIONS = {
  terms: ({ rows }) => make("dl", { class: "about" }, rows.map(([term, what]) => make("div", {}, make("dt", {}, term), make("dd", {}, what)))),
  verdict: ({ text, good }) => make("p", { class: good ? "verdict good" : "verdict bad" }, make("b", {}, good ? "✓ " : "✗ "), text),
  bars: ({ bars, unit, title, full }) => {
    const most = bars.reduce((most, bar) => Math.max(most, bar.value), full || 0) || 1;
    return make("table", { class: "bars", "aria-label": title }, make("tbody", {}, bars.map((bar) => make("tr", { class: bar.ours ? "ours" : "" },
      make("th", { scope: "row" }, bar.name),
      make("td", { class: "track" }, make("i", { style: `width:${(100 * bar.value / most).toFixed(2)}%` })),
      make("td", { class: "number" }, bar.text || shown(bar.value, unit, 3))))));
  },
  curves: (section) => {
    const frame = make("div", { class: "frame" });
    follow(frame, (wide) => frame.replaceChildren(...drawCurves(section, wide)));
    return frame;
  },
  sheet: ({ columns, rows, marked, dim, title }) => {
    const value = (cell) => (Array.isArray(cell) ? cell[0] : cell), text = (cell) => String((Array.isArray(cell) ? cell[1] : cell) ?? "");
    const element = table(columns.map((column, index) => ({ title: column,
      number: rows.some((cells) => typeof value(cells[index]) === "number"), value: (row) => value(row.cells[index]), show: (row) => text(row.cells[index]) })),
    rows.map((cells, place) => ({ cells, place })), { key: (row) => row.place, rowClass: (row) => (marked.includes(row.place) ? "marked" : dim.includes(row.place) ? "faint" : "") });
    element.setAttribute("aria-label", title);
    return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": title }, element);
  },
};

// Calls draw(width) now and whenever the element's width changes.
function follow(element, draw) {
  let before = 0;
  new ResizeObserver(() => {
    const wide = Math.floor(element.clientWidth);
    if (wide && wide !== before) { before = wide; draw(wide); }
  }).observe(element);
}

function drawCurves({ title, x: across, y: up, curves }, wide) {
  const left = 58, right = 14, top = 10, high = 180, bottom = 40, width = Math.max(60, wide - left - right);
  const points = curves.flatMap((one) => one.points), line = (one) => (curves.length > 1 ? `hsl(${hue(one.name)} 60% 45%)` : "var(--accent)");
  const range = (index) => {
    let low = Infinity, most = -Infinity;
    for (const p of points) { low = Math.min(low, p[index]); most = Math.max(most, p[index]); }
    return most > low ? [low, most] : most === low ? [low - 1, low + 1] : [0, 1];
  };
  const [x0, x1] = range(0), [y0, y1] = range(1);
  const x = (v) => left + ((v - x0) / (x1 - x0)) * width, y = (v) => top + (1 - (v - y0) / (y1 - y0)) * high;
  const ends = curves.map((one) => (one.points.length ? `${one.name} from ${short(one.points[0][1])} to ${short(one.points[one.points.length - 1][1])}` : one.name));
  const chart = make("svg", { class: "chart", viewBox: `0 0 ${wide} ${top + high + bottom}`, role: "img", "aria-label": `${title}: ${ends.join("; ")}` });
  for (const tick of ticks(y0, y1)) chart.append(make("line", { x1: left, x2: left + width, y1: y(tick.at), y2: y(tick.at) }), make("text", { x: left - 8, y: y(tick.at) + 4, class: "dim end" }, tick.text));
  for (const tick of ticks(x0, x1, "", Math.min(10, width / 60))) chart.append(make("text", { x: x(tick.at), y: top + high + 16, class: "dim middle" }, tick.text));
  for (const one of curves) {
    chart.append(make("polyline", { fill: "none", stroke: line(one), "stroke-width": 2, points: one.points.map((p) => x(p[0]).toFixed(1) + "," + y(p[1]).toFixed(1)).join(" ") }));
    for (const p of one.points.length <= 500 ? one.points : []) {
      chart.append(make("circle", { class: "point", cx: x(p[0]), cy: y(p[1]), r: 4, fill: line(one) }, make("title", {}, `${one.name}: ${up} ${short(p[1])} at ${across} ${short(p[0])}`)));
    }
  }
  chart.append(make("text", { x: left + width / 2, y: top + high + 34, class: "dim middle" }, across));
  if (curves.length < 2) return [chart];
  return [make("div", { class: "legend" }, curves.map((one) => make("span", {}, make("i", { style: `background:${line(one)}` }), one.name))), chart];
}

// The report's tab: its sections one after the other.
class ReportView {
  constructor(sections) {
    this.timelines = [];
    this.element = make("div", { class: "view report", id: "report" }, make("div", { class: "page" }, sections.map((section) => this.section(section))));
    this.active = this.timelines[0];
  }
  section(section) {
    let body;
    if (section.kind === "lanes") {
      const view = new TimelineView(section, () => { this.active = view; });
      this.timelines.push(view);
      body = view.element;
    } else body = SECTIONS[section.kind](section);
    return make("section", { class: `section ${section.kind}` }, section.title ? make("h2", {}, section.title) : null,
      section.note ? make("p", { class: "note" }, section.note) : null, body);
  }
  start() {}
  key(event) { return this.active ? this.active.key(event) : false; }
}
