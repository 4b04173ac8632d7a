"use strict";
// The search engine, without a page: every definition in memory, the words of docstrings and uses in shards.
//
// All names are one string in lower case, so that the browser's own string search finds the names that have a word; the
// starts of names and of their last parts are in arrays of numbers. Only the best results are made into objects.
const KINDS = { c: "class", f: "function", m: "method", v: "variable", o: "definition" };
const RANK = { c: 0, f: 1, m: 2, o: 3, v: 4 };
const SHOWN = 50; // results that are returned; the others are counted

class SearchIndex {
  constructor(load) {
    this.load = load; // loads a script by name
    this.shards = new Map();
    this.ready = false;
  }

  names(keys, files, names, kinds, fileOf, lines, contexts) {
    this.keys = new Set(keys);
    this.files = files.map(([path, page, purpose]) => ({ path, page: page || path, purpose, low: path.toLowerCase() }));
    this.name = names ? names.split("\n") : [];
    this.text = names.toLowerCase();
    this.kind = kinds;
    this.file = fileOf;
    this.line = lines;
    this.context = contexts.split("\n");
    const count = this.name.length;
    this.start = new Uint32Array(count + 1); // of each name in the text
    this.tail = new Uint32Array(count); // of its last part
    this.mask = new Int32Array(count); // the letters of its last part
    for (let i = 0, at = 0; i < count; i++) {
      const next = this.text.indexOf("\n", at), end = next < 0 ? this.text.length : next;
      const low = this.text.slice(at, end);
      this.start[i] = at;
      this.tail[i] = at + Math.max(low.lastIndexOf("."), low.lastIndexOf(":")) + 1;
      this.mask[i] = letters(this.text, this.tail[i], end);
      at = end + 1;
    }
    this.start[count] = this.text.length + 1;
    this.ready = true;
  }

  shard(key, rows) { this.shards.set(key, rows); }

  // The best results of a query, and how many there are: { total, hits: [{ name, kind, path, page, line, … }] }.
  async find(query, only) {
    const words = query.toLowerCase().split(/\s+/).filter((word) => word.replace(/^_+/, "").length > 1);
    if (!words.length) return null;
    if (!this.ready) await this.load("names");
    await Promise.all(words.map((word) => {
      const key = shardKey(word);
      return this.keys.has(key) && !this.shards.has(key) ? this.load(key) : null;
    }));
    const documented = words.map((word) => this.documented(word));
    const named = words.map((word, w) => this.named(word, documented[w]));
    let found = this.definitions(words, named, only, false);
    const files = !only || only === "file" ? this.paths(words, documented) : new Found();
    const uses = !only || only === "use" ? this.uses(words) : new Found();
    const total = () => found.what.length + files.what.length + uses.what.length;
    if (total() < 8) found = this.definitions(words, named, only, true);
    const hits = [
      ...found.best((i) => this.definition(i)), ...files.best((number) => this.ofFile(number)), ...uses.best((row) => this.use(row)),
    ];
    hits.sort((a, b) => b.score - a.score || (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
    return { total: total(), hits: hits.slice(0, SHOWN) };
  }

  // The definitions (and, as negative numbers, files) whose docstring has a word that starts with this one.
  documented(word) {
    const found = new Set();
    for (const [name, places] of this.shards.get(shardKey(word)) ?? []) {
      if (places.length && name.startsWith(word)) places.forEach((place) => found.add(place));
    }
    return found;
  }

  // The definitions with a word in their name or their docstring: how well each matches, and which do.
  named(word, documented) {
    const score = new Uint8Array(this.name.length), numbers = [];
    let i = 0;
    for (let at = this.text.indexOf(word); at >= 0 && i < this.name.length; at = this.text.indexOf(word, this.start[i])) {
      i = this.at(at, i);
      score[i] = this.matched(i, at, word);
      numbers.push(i++);
    }
    for (const place of documented) {
      if (place >= 0 && !score[place]) {
        score[place] = 26;
        numbers.push(place);
      }
    }
    return { score, numbers };
  }

  // The name, not before the given one, that a place in the text is in.
  at(place, from) {
    let step = 1, low = from;
    while (low + step < this.name.length && this.start[low + step] <= place) { low += step; step *= 2; }
    let high = Math.min(low + step, this.name.length);
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.start[middle] <= place) low = middle; else high = middle;
    }
    return low;
  }

  // How well a name matches a word that it has: whole, at its start, at the start of a part, anywhere.
  matched(i, at, word) {
    const start = this.start[i], tail = this.tail[i], end = this.start[i + 1] - 1, length = word.length;
    if (at === start && start + length === end) return 100;
    const inside = at >= tail ? at : this.text.indexOf(word, tail);
    if (inside < 0 || inside + length > end) return boundary(this.name[i], at - start) ? 34 : 18; // in the class around it
    if (inside === tail) return tail + length === end ? 100 : 70;
    let plain = tail;
    while (this.text[plain] === "_") plain++;
    if (inside === plain) return plain + length === end ? 94 : 64;
    return boundary(this.name[i], inside - start) ? 54 : 40;
  }

  definitions(words, named, only, fuzzy) {
    const near = words.map((word) => new Near(this, word));
    const inPath = words.map((word, w) => (w ? this.files.map((file) => file.low.includes(word)) : []));
    const numbers = fuzzy ? named[0].numbers.concat(near[0].all().filter((i) => !named[0].score[i])) : named[0].numbers;
    const found = new Found();
    for (const i of numbers) {
      const kind = this.kind[i];
      if (only && KINDS[kind] !== only) continue;
      let score = 0, missed = 0; // at most one word may be misspelt
      for (let w = 0; w < words.length; w++) {
        let one = named[w].score[i] || (w && inPath[w][this.file[i]] ? 12 : 0);
        if (!one && fuzzy && !missed) missed = one = near[w].score(i);
        if (!one) { score = 0; break; }
        score += one;
      }
      if (score) found.add(i, score - RANK[kind] - (this.start[i + 1] - this.start[i] - 1) / 20);
    }
    return found;
  }

  definition(i) {
    const file = this.files[this.file[i]], name = this.name[i];
    return { name, kind: KINDS[this.kind[i]], path: file.path, line: this.line[i], page: `${file.page}_docs.html`,
      anchor: anchorOf(name), context: this.context[i], more: 0 };
  }

  paths(words, documented) {
    const found = new Found();
    this.files.forEach((file, number) => {
      let score = 0;
      for (let w = 0; w < words.length; w++) {
        const at = file.low.lastIndexOf(words[w]);
        const one = at > file.low.lastIndexOf("/") ? (file.low.endsWith(words[w]) ? 92 : 62) : at >= 0 ? 20 : documented[w].has(-1 - number) ? 24 : 0;
        if (!one) return;
        score += one;
      }
      found.add(number, score - file.path.length / 20);
    });
    return found;
  }

  ofFile(number) {
    const file = this.files[number];
    return { name: file.path.split("/").pop(), kind: "file", path: file.path, line: 0, page: `${file.page}_docs.html`,
      anchor: "", context: file.purpose, more: 0 };
  }

  // Names that are used, and words; only where the query is one word.
  uses(words) {
    const found = new Found(), word = words[0];
    for (const row of (words.length === 1 && this.shards.get(shardKey(word))) || []) {
      const low = row[0].toLowerCase();
      if (row[2] && low.startsWith(word)) found.add(row, (low === word ? 22 : 8) - low.length / 20);
    }
    return found;
  }

  use([name, , count, places, context]) {
    const file = this.files[places[0]];
    return { name, kind: "use", path: file.path, line: places[1], page: `${file.page}_source.html`, anchor: `L${places[1]}`,
      context, more: count - 1 };
  }
}

// What was found, with scores. ``best`` makes results of the best alone.
class Found {
  what = [];
  scores = [];

  add(one, score) { this.what.push(one); this.scores.push(score); }

  best(make) {
    const least = this.scores.length > SHOWN ? Float64Array.from(this.scores).sort().at(-SHOWN) : -Infinity;
    const kept = [];
    this.scores.forEach((score, at) => { if (score >= least) kept.push({ score, ...make(this.what[at]) }); });
    return kept;
  }
}

// The definitions whose last part is nearly a word: 14 for one mistake, 8 for two.
class Near {
  constructor(index, word) {
    ({ tail: this.tail, start: this.start, text: this.text, mask: this.masks } = index);
    this.word = word;
    this.most = word.length < 4 ? 0 : word.length < 6 ? 1 : 2;
    this.mask = letters(word, 0, word.length);
    this.known = new Map(); // the same last part has many definitions
  }

  score(i) {
    const start = this.tail[i], end = this.start[i + 1] - 1, mask = this.masks[i];
    if (!this.most || Math.abs(end - start - this.word.length) > this.most) return 0;
    if (bits(this.mask & ~mask) > this.most || bits(mask & ~this.mask) > this.most) return 0;
    const part = this.text.slice(start, end);
    if (!this.known.has(part)) this.known.set(part, [0, 14, 8][distance(part, this.word, this.most)] ?? 0);
    return this.known.get(part);
  }

  all() {
    const numbers = [];
    for (let i = 0; i < this.tail.length; i++) if (this.score(i)) numbers.push(i);
    return numbers;
  }
}

// Whether a part of a name starts here: after a mark, or with a capital.
function boundary(name, at) {
  if (!at) return true;
  const before = name.charCodeAt(at - 1), here = name.charCodeAt(at);
  if (before === 46 || before === 95 || before === 58) return true;
  return here >= 65 && here <= 90 && !(before >= 65 && before <= 90);
}

// How many letters are wrong, missing, added or swapped; more than ``most`` is all the same.
function distance(name, word, most) {
  let before = null, row = Array.from({ length: word.length + 1 }, (_, i) => i);
  for (let i = 1; i <= name.length; i++) {
    const next = [i];
    let least = i;
    for (let j = 1; j <= word.length; j++) {
      const same = name[i - 1] === word[j - 1] ? 0 : 1;
      let cost = Math.min(row[j] + 1, next[j - 1] + 1, row[j - 1] + same);
      if (i > 1 && j > 1 && name[i - 1] === word[j - 2] && name[i - 2] === word[j - 1]) cost = Math.min(cost, before[j - 2] + 1);
      next[j] = cost;
      least = Math.min(least, cost);
    }
    if (least > most) return most + 1;
    before = row;
    row = next;
  }
  return row[word.length];
}

// The letters of a part of a text as bits, to leave out quickly what cannot be near.
function letters(text, start, end) {
  let mask = 0;
  for (let i = start; i < end; i++) {
    const code = text.charCodeAt(i) - 97;
    if (code >= 0 && code < 26) mask |= 1 << code;
  }
  return mask;
}

function bits(value) {
  let left = value - ((value >>> 1) & 0x55555555);
  left = (left & 0x33333333) + ((left >>> 2) & 0x33333333);
  return (((left + (left >>> 4)) & 0x0f0f0f0f) * 0x01010101) >>> 24;
}

const shardKey = (word) => [...word.replace(/^_+/, "").toLowerCase()].slice(0, 2)
  .map((c) => (/[a-z0-9]/.test(c) ? c : `-${c.codePointAt(0).toString(16)}-`)).join("") || "other";

const anchorOf = (name) => "d-" + [...name].map((c) => (/[\p{L}\p{N}_.:~-]/u.test(c) ? c : `-${c.codePointAt(0).toString(16)}-`)).join("");
