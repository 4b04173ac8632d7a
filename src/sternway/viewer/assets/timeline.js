"use strict";
// Timelines (planned, measured: one below the other, on one scale) and curves.
const OPS = { F: 212, I: 28, W: 140, B: 280, send: 0, recv: 0 };

function hue(name) {
  if (name in OPS) return OPS[name];
  let hash = 7;
  for (const letter of String(name)) hash = (hash * 31 + letter.codePointAt(0)) % 360;
  return hash;
}

function colourOf(name) { return `hsl(${hue(name)} 55% ${document.documentElement.dataset.theme === "dark" ? 42 : 72}%)`; }

function short(number) { return Number(number.toPrecision(4)).toString(); }

// Round numbers from low to high, four to ten of them.
function ticks(low, high) {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find((n) => n * power >= rough) * power;
  return Array.from({ length: Math.floor(high / step) - Math.ceil(low / step) + 1 }, (_, i) => (Math.ceil(low / step) + i) * step);
}

class TimelineView {
  constructor(data) {
    this.data = data;
    this.scale = 1;
    this.body = make("div", { class: "scroll" });
    const button = (text, factor) => make("button", { onclick: () => { this.scale = factor ? this.scale * factor : 1; this.draw(); } }, text);
    this.bar = make("div", { class: "bar" }, button("+", 1.5), button("−", 1 / 1.5), button("Fit", 0), make("span", { id: "about" }));
    this.element = make("div", { class: "view", id: "timeline" }, make("div", { class: "left" }, this.bar, this.body));
  }
  start() { this.draw(); }
  draw() {
    const { series } = this.data, row = 26, left = 52;
    const every = series.flatMap((one) => one.events), end = every.reduce((most, event) => Math.max(most, event.end), 0) || 1;
    const ranks = this.data.ranks || 1 + every.reduce((most, event) => Math.max(most, event.rank), 0);
    const wide = Math.max(500, (this.body.clientWidth || window.innerWidth) - left - 40) * this.scale, x = (t) => left + (t / end) * wide;
    const ops = [...new Set(every.map((event) => event.op))];
    this.body.replaceChildren(make("div", { class: "legend" }, ops.map((op) => make("span", {}, make("i", { style: `background:${colourOf(op)}` }), op))));
    for (const one of series) {
      const height = ranks * row + 22, chart = make("svg", { class: "chart", width: left + wide + 16, height, role: "img", "aria-label": one.name });
      for (let rank = 0; rank < ranks; rank++) chart.append(make("text", { x: 4, y: rank * row + 17 }, `rank ${rank}`));
      for (let tick = 0; tick <= 8; tick++) {
        const t = (end * tick) / 8;
        chart.append(make("line", { x1: x(t), x2: x(t), y1: 0, y2: ranks * row }), make("text", { x: x(t) - 8, y: ranks * row + 15, class: "dim" }, Number(t.toPrecision(3)).toString()));
      }
      for (const event of one.events) {
        const width = Math.max(0.5, x(event.end) - x(event.start));
        chart.append(make("g", { tabindex: -1 }, make("rect", { class: "event", x: x(event.start), y: event.rank * row + 2, width, height: row - 4, fill: colourOf(event.op), rx: 2 },
          make("title", {}, `${event.label}: ${short(event.start)} to ${short(event.end)}${this.data.unit || ""}, rank ${event.rank}`)),
        width > 7.4 * event.label.length ? make("text", { x: x(event.start) + 2, y: event.rank * row + 17 }, event.label) : null));
      }
      this.body.append(make("div", { class: "series" }, make("h2", {}, one.name), chart));
    }
  }
  key(event) {
    if (event.key === "+" || event.key === "=") this.scale *= 1.5;
    else if (event.key === "-") this.scale /= 1.5;
    else if (event.key === "0") this.scale = 1;
    else return false;
    this.draw();
    return true;
  }
}

class CurvesView {
  constructor(data) {
    this.charts = Array.isArray(data) ? data : [data];
    this.body = make("div", { class: "scroll" });
    this.element = make("div", { class: "view", id: "curves" }, make("div", { class: "left" }, this.body));
  }
  start() { this.body.replaceChildren(...this.charts.map((chart) => this.draw(chart))); }
  draw({ name, series, x: across = "", y: up = "" }) {
    const points = series.flatMap((one) => one.points), left = 60, high = this.charts.length > 1 ? 240 : 380;
    const wide = Math.max(400, (this.body.clientWidth || 900) - left - 50), top = 24, line = (one) => `hsl(${hue(one.name)} 60% 50%)`;
    const range = (index) => { let low = Infinity, most = -Infinity; for (const p of points) { low = Math.min(low, p[index]); most = Math.max(most, p[index]); } return most > low ? [low, most] : [low - 1, low + 1]; };
    const [x0, x1] = range(0), [y0, y1] = range(1), x = (v) => left + ((v - x0) / (x1 - x0)) * wide, y = (v) => top + (1 - (v - y0) / (y1 - y0)) * high;
    const chart = make("svg", { class: "chart", width: left + wide + 20, height: top + high + 40, role: "img", "aria-label": name || up || "curves" });
    for (const v of ticks(y0, y1)) chart.append(make("line", { x1: left, x2: left + wide, y1: y(v), y2: y(v) }), make("text", { x: 4, y: y(v) + 4, class: "dim" }, short(v)));
    for (const v of ticks(x0, x1)) chart.append(make("text", { x: x(v) - 4, y: top + high + 16, class: "dim" }, short(v)));
    for (const one of series) {
      chart.append(make("polyline", { fill: "none", stroke: line(one), "stroke-width": 1.6, points: one.points.map((p) => x(p[0]).toFixed(1) + "," + y(p[1]).toFixed(1)).join(" ") }));
      if (one.points.length <= 2000) {
        for (const p of one.points) chart.append(make("circle", { class: "point", cx: x(p[0]), cy: y(p[1]), r: 4, fill: line(one) }, make("title", {}, `${one.name}: ${up} ${short(p[1])} at ${across} ${short(p[0])}`)));
      }
    }
    chart.append(make("text", { x: left + wide / 2, y: top + high + 34, class: "dim" }, across), make("text", { x: 4, y: 11, class: "dim" }, up));
    const legend = make("div", { class: "legend" }, series.map((one) => make("span", {}, make("i", { style: `background:${line(one)}` }), one.name)));
    return make("div", { class: "series" }, name ? make("h2", {}, name) : null, legend, chart);
  }
  key() { return false; }
}
