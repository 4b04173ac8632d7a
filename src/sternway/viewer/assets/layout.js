"use strict";
// Where boxes go: dagre's layout, and room above what is inside an open box for its heading.
const LAYOUT = dagre.layout ? dagre : dagre.default;
const HEADING = 20;

function layOut(g, open) {
  LAYOUT.layout(g);
  const top = (at) => at.y - at.height / 2, tops = [...new Set(open.map((key) => Math.round(top(g.node(key)))))].sort((a, b) => a - b);
  const moved = (y) => y + HEADING * tops.filter((each) => each <= y + 1).length;
  const boxes = new Set(open);
  for (const key of g.nodes()) {
    const at = g.node(key), from = top(at), to = from + at.height;
    if (boxes.has(key)) { // it grows by its own heading, and by those inside
      const start = moved(from) - HEADING, end = moved(to);
      at.height = end - start; at.y = (start + end) / 2;
    } else at.y = moved(from) + at.height / 2;
  }
  for (const edge of g.edges()) for (const point of g.edge(edge).points) point.y = moved(point.y);
  if (tops.length) g.graph().height = moved(g.graph().height);
}
