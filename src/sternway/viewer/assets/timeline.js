"use strict";
// Timelines one below the other (planned, measured), on one scale: zoom, pan, choose an action, select a range.
const LANES = { left: 86, right: 16, row: 26, box: 22, link: 18, strip: 40, ruler: 24 };
let timelines = 0;

class TimelineView {
  constructor(section, onActive) {
    this.section = section; this.unit = section.unit; this.number = timelines++;
    this.runs = section.runs.map((run) => new Run(run, section));
    this.end = this.runs.reduce((most, run) => Math.max(most, run.end), 0) || 1;
    this.least = this.runs.reduce((least, run) => Math.min(least, run.shortest), this.end) / 10;
    this.view = [0, this.end]; this.range = null; this.chosen = null; this.pointer = null; this.wide = 0;
    this.path = this.runs.some((run) => run.critical.length);
    this.details = make("div", { class: "details panel", role: "status", id: `details-${this.number}` });
    this.frames = this.runs.map((run, index) => make("div", { class: "frame", "data-run": index }));
    this.element = make("div", { class: "timeline" }, this.legend(), this.bar(),
      this.runs.map((run, index) => make("div", { class: "run" }, make("h3", {}, run.name, make("span", { class: "dim" }, this.heading(run))), this.frames[index])), this.details);
    this.element.addEventListener("focusin", onActive);
    this.element.addEventListener("pointerenter", onActive);
    for (const frame of this.frames) new LaneHand(this, frame);
    follow(this.frames[0] || this.element, (wide) => { this.wide = wide; this.draw(); });
    this.say();
  }
  heading(run) {
    const words = [` ${shown(run.end, this.unit)}`];
    if (run.bubble !== null) words.push(`bubble ${shownShare(run.bubble)}`);
    return words.join(" · ");
  }
  legend() {
    const ops = order(new Set(this.runs.flatMap((run) => run.events.map((event) => event.op))));
    const entry = (mark, text) => make("span", {}, mark, text);
    const entries = ops.map((op) => entry(make("i", { class: "swatch", style: `background:${colourOf(op, 0)}` }), MEANING[op] ? `${op === "+" ? "" : op + " "}${MEANING[op]}` : op));
    entries.push(entry(make("i", { class: "swatch hatch" }), "idle: the bubble"));
    if (this.runs.some((run) => run.events.some((event) => event.tint))) entries.push(make("span", { class: "dim" }, "lighter: the rank's later stages"));
    if (this.path) entries.push(entry(make("i", { class: "swatch path" }), "critical path"));
    if (ops.some((op) => MEANING[op])) entries.push(make("span", {}, make("b", {}, "3B0"), " is stage 3, B, microbatch 0"));
    return make("div", { class: "legend" }, entries);
  }
  bar() {
    const button = (text, label, action, more = {}) => make("button", { type: "button", "aria-label": label, title: label, onclick: action, ...more }, text);
    const keys = [["W S", "zoom"], ["A D", "pan"], ["wheel, drag", "the same"], ["Shift-drag", "range"], ["← → ↑ ↓", "walk"], ["[ ]", "range from, to"], ["F", "to what is chosen"], ["0", "all"], ["Esc", "clear"]];
    return make("div", { class: "bar" }, button("+", "Zoom in (W)", () => this.zoom(0.5)), button("−", "Zoom out (S)", () => this.zoom(2)), button("All", "Show all (0)", () => this.show(0, this.end)),
      this.path ? button("Critical path", "Show the critical path", (event) => { this.path = !this.path; event.currentTarget.setAttribute("aria-pressed", String(this.path)); this.later(); }, { "aria-pressed": "true", class: "critical" }) : null,
      make("span", { class: "keys" }, keys.flatMap(([key, what]) => [make("kbd", {}, key), ` ${what} `])));
  }
  // Places
  get span() { return Math.max(1, this.wide - LANES.left - LANES.right); }
  x(time) { return LANES.left + ((time - this.view[0]) / (this.view[1] - this.view[0])) * this.span; }
  time(x) { return this.view[0] + ((x - LANES.left) / this.span) * (this.view[1] - this.view[0]); }
  show(from, to) {
    const length = Math.min(this.end, Math.max(this.least, to - from)), start = Math.min(this.end - length, Math.max(0, from));
    this.view = [start, start + length];
    this.later();
  }
  zoom(factor, at = this.pointer) {
    const [from, to] = this.view, middle = at === null ? (from + to) / 2 : Math.min(to, Math.max(from, at));
    const length = Math.min(this.end, Math.max(this.least, (to - from) * factor)), share = (middle - from) / (to - from);
    this.show(middle - share * length, middle + (1 - share) * length);
  }
  pan(share) { const length = this.view[1] - this.view[0]; this.show(this.view[0] + share * length, this.view[1] + share * length); }
  get whole() { return this.view[1] - this.view[0] >= this.end * 0.999999; }
  // Drawing
  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.draw(); });
  }
  draw() {
    if (!this.wide) return;
    this.frames.forEach((frame, index) => {
      const focused = frame.firstChild && frame.firstChild === document.activeElement;
      frame.replaceChildren(drawRun(this, this.runs[index], index));
      if (focused) frame.firstChild.focus({ preventScroll: true });
    });
  }
  // Choosing
  choose(run, event, walk) {
    this.chosen = event ? { run, event } : null;
    if (event && walk && (event.start < this.view[0] || event.end > this.view[1])) {
      const length = this.view[1] - this.view[0];
      this.show((event.start + event.end - length) / 2, (event.start + event.end + length) / 2);
    }
    this.say(); this.later();
  }
  select(from, to) { this.range = from === null ? null : [Math.max(0, Math.min(from, to)), Math.min(this.end, Math.max(from, to))]; this.say(); this.later(); }
  say() { this.details.replaceChildren(...describe(this)); }
  walk(key) {
    const { run, event } = this.chosen || { run: this.runs[0], event: null };
    if (!run) return;
    const row = event ? run.rowOf(event) : null;
    let next = null;
    if (!event) next = run.lanes.flat()[0] || null;
    else if (key === "ArrowLeft" || key === "ArrowRight") next = row.events[row.events.indexOf(event) + (key === "ArrowRight" ? 1 : -1)];
    else {
      const other = run.rows[run.rows.indexOf(row) + (key === "ArrowDown" ? 1 : -1)]?.events, middle = (event.start + event.end) / 2;
      next = other && other.reduce((best, each) => (!best || Math.abs(each.start + each.end - 2 * middle) < Math.abs(best.start + best.end - 2 * middle) ? each : best), null);
    }
    if (next) this.choose(run, next, true);
  }
  key(event) {
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key, inside = this.element.contains(event.target), chosen = this.chosen && this.chosen.event;
    if (key === "w" || key === "+" || key === "=") this.zoom(0.8);
    else if (key === "s" || key === "-") this.zoom(1.25);
    else if (key === "a") this.pan(-0.15);
    else if (key === "d") this.pan(0.15);
    else if (key === "0") this.show(0, this.end);
    else if (key === "f" && (this.range || chosen)) { const [from, to] = this.range || [chosen.start, chosen.end]; this.show(from - 0.1 * (to - from), to + 0.1 * (to - from)); }
    else if (key === "[" && chosen) this.select(chosen.start, this.range ? Math.max(chosen.end, this.range[1]) : chosen.end);
    else if (key === "]" && chosen) this.select(this.range ? Math.min(chosen.start, this.range[0]) : chosen.start, chosen.end);
    else if (key === "Escape") { this.chosen = null; this.select(null); }
    else if (inside && key.startsWith("Arrow")) this.walk(key);
    else return false;
    return true;
  }
}
