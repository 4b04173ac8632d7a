"use strict";
// The mouse on a timeline: the wheel zooms, a drag pans, a drag with Shift or on the ruler selects, a click chooses.
let scrolled = 0; // when the page was last scrolled: a scroll that goes on over a timeline stays a scroll
document.addEventListener("scroll", () => { scrolled = performance.now(); }, true);

class LaneHand {
  constructor(view, frame) {
    this.view = view; this.frame = frame; this.from = null;
    this.run = view.runs[Number(frame.dataset.run)];
    frame.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    frame.addEventListener("pointerdown", (event) => this.down(event));
    frame.addEventListener("pointermove", (event) => this.move(event));
    frame.addEventListener("pointerup", (event) => this.up(event));
    frame.addEventListener("pointerleave", () => { if (!this.from) view.pointer = null; });
  }
  x(event) { return event.clientX - this.frame.getBoundingClientRect().left; }
  wheel(event) {
    const view = this.view, sideways = event.shiftKey ? event.deltaY || event.deltaX : Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
    if (sideways) view.pan(sideways / 1000);
    else {
      const out = event.deltaY > 0;
      if ((out && view.whole) || performance.now() - scrolled < 250) return; // let the page scroll
      view.zoom(out ? 1.2 : 1 / 1.2, view.time(this.x(event)));
    }
    event.preventDefault();
  }
  down(event) {
    if (event.button !== 0) return;
    const x = this.x(event), y = event.clientY - this.frame.getBoundingClientRect().top, rows = this.run.high;
    const selects = event.shiftKey || (y > rows && y < rows + LANES.ruler);
    this.from = { x, time: this.view.time(x), view: [...this.view.view], selects, moved: false };
    this.frame.setPointerCapture(event.pointerId);
    this.frame.firstChild.focus({ preventScroll: true });
  }
  move(event) {
    const view = this.view, x = this.x(event), from = this.from;
    view.pointer = view.time(x);
    if (!from) return;
    if (Math.abs(x - from.x) > 3) from.moved = true;
    if (!from.moved) return;
    if (from.selects) view.select(from.time, view.time(x));
    else {
      const by = ((from.x - x) / view.span) * (from.view[1] - from.view[0]);
      view.show(from.view[0] + by, from.view[1] + by);
    }
  }
  up(event) {
    const from = this.from;
    this.from = null;
    if (!from || from.moved) return;
    const y = event.clientY - this.frame.getBoundingClientRect().top, lane = this.run.rows.find((row) => y >= row.top && y < row.top + row.high)?.events;
    const near = (2 / this.view.span) * (this.view.view[1] - this.view.view[0]); // what is two pixels away is meant, too
    const hit = lane && (lane.find((each) => each.start <= from.time && from.time < each.end) || lane.find((each) => each.start - near <= from.time && from.time < each.end + near));
    this.view.choose(this.run, hit || null);
  }
}
