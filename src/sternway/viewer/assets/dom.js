"use strict";
// Elements, and numbers as people read them.
const SVG = new Set(["svg", "g", "rect", "path", "text", "line", "title", "polyline", "defs", "marker", "circle", "pattern"]);

// Text goes in as text: a module named like a piece of HTML is a name and nothing else.
function make(tag, attributes = {}, ...children) {
  const element = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== null) element.setAttribute(key, value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) element.append(child);
  return element;
}

const UNITS = {
  s: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]],
  B: [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]],
};

// For numbers up to about `size` of a unit: what to divide them by, and what to write behind them.
function scaleOf(unit, size) {
  const steps = UNITS[unit];
  if (!steps) return [1, unit ? " " + unit : ""];
  const [by, name] = steps.find(([least]) => Math.abs(size) >= least) || steps[steps.length - 1];
  return [by, " " + name];
}

function short(number, digits = 4) { return Number(number.toPrecision(digits)).toString(); }

// One number with its unit: 0.0123 s is "12.3 ms".
function shown(value, unit, digits = 4) {
  const [by, name] = scaleOf(unit, value);
  return short(value / by, digits) + name;
}

function shownBytes(count) {
  const [by, name] = scaleOf("B", count);
  return by === 1 ? `${count} B` : (count / by).toFixed(1) + name;
}

function shownShare(share) { return (100 * share).toFixed(1) + "%"; }

// Round numbers from low to high, in steps of 1, 2 or 5 times a power of ten, about `count` of them; each with its text.
function ticks(low, high, unit = "", count = 5) {
  const [by, name] = scaleOf(unit, Math.max(Math.abs(low), Math.abs(high)));
  const rough = (high - low) / by / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((n) => n * power >= rough * 0.999) * power;
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9)), found = [];
  for (let i = Math.ceil(low / by / step - 1e-9); i * step <= (high / by) * (1 + 1e-12) && found.length < 100; i++) {
    found.push({ at: i * step * by, text: (i * step).toFixed(digits) + name });
  }
  return found;
}
