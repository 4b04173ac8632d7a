"use strict";
// The search engine, without a page: every definition in memory, the words of docstrings and uses in shards.
const KINDS = { c: "class", f: "function", m: "method", v: "variable", o: "definition" };
const RANK = { c: 0, f: 1, m: 2, o: 3, v: 4 };

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
    this.low = names ? names.toLowerCase().split("\n") : [];
    this.kind = kinds;
    this.file = fileOf;
    this.line = lines;
    this.context = contexts.split("\n");
    this.mask = this.low.map(letters);
    this.ready = true;
  }

  shard(key, rows) { this.shards.set(key, rows); }

  // The results for a query, best first: { name, kind, path, page, line, anchor, context, more }.
  async find(query, only) {
    const words = query.toLowerCase().split(/\s+/).filter((word) => word.replace(/^_+/, "").length > 1);
    if (!words.length) return null;
    if (!this.ready) await this.load("names");
    await Promise.all(words.map((word) => {
      const key = shardKey(word);
      return this.keys.has(key) && !this.shards.has(key) ? this.load(key) : null;
    }));
    const documented = words.map((word) => this.documented(word));
    let hits = this.definitions(words, documented, only, false);
    if (!only || only === "file") hits = hits.concat(this.found(words, documented));
    if (!only || only === "use") hits = hits.concat(this.uses(words));
    if (hits.length < 8) {
      const seen = new Set(hits.map((hit) => hit.index));
      hits = hits.concat(this.definitions(words, documented, only, true).filter((hit) => !seen.has(hit.index)));
    }
    return hits.sort((a, b) => b.score - a.score || (a.name < b.name ? -1 : a.name > b.name ? 1 : 0));
  }

  // The definitions (and, as negative numbers, files) whose docstring has a word that starts with this one.
  documented(word) {
    const found = new Set();
    for (const [name, places] of this.shards.get(shardKey(word)) ?? []) {
      if (places.length && name.startsWith(word)) places.forEach((place) => found.add(place));
    }
    return found;
  }

  definitions(words, documented, only, fuzzy) {
    const hits = [];
    const masks = words.map(letters);
    for (let i = 0; i < this.low.length; i++) {
      const kind = this.kind[i];
      if (only && KINDS[kind] !== only) continue;
      let score = 0, missed = -1; // at most one word may be misspelt, and it is looked at last
      for (let w = 0; w < words.length; w++) {
        let one = matched(this.low[i], this.name[i], words[w]);
        if (!one && documented[w].has(i)) one = 26;
        if (!one && w > 0 && this.files[this.file[i]].low.includes(words[w])) one = 12;
        if (!one && (!fuzzy || missed >= 0)) { score = -1; break; }
        if (!one) missed = w;
        score += one;
      }
      if (score >= 0 && missed >= 0) {
        const one = bits(masks[missed] & ~this.mask[i]) <= 1 ? near(last(this.low[i]), words[missed]) : 0;
        score = one ? score + one : 0;
      }
      if (score > 0) hits.push(this.definition(i, score - RANK[kind] - this.low[i].length / 20));
    }
    return hits;
  }

  definition(i, score) {
    const file = this.files[this.file[i]], name = this.name[i];
    return { index: i, score, name, kind: KINDS[this.kind[i]], path: file.path, line: this.line[i],
      page: `${file.page}_docs.html`, anchor: anchorOf(name), context: this.context[i], more: 0 };
  }

  found(words, documented) {
    const hits = [];
    this.files.forEach((file, number) => {
      let score = 0;
      for (let w = 0; w < words.length; w++) {
        const at = file.low.lastIndexOf(words[w]);
        const one = at > file.low.lastIndexOf("/") ? (file.low.endsWith(words[w]) ? 92 : 62) : at >= 0 ? 20 : documented[w].has(-1 - number) ? 24 : 0;
        if (!one) { score = 0; break; }
        score += one;
      }
      if (score) hits.push({ score: score - file.path.length / 20, name: file.path.split("/").pop(), kind: "file",
        path: file.path, line: 0, page: `${file.page}_docs.html`, anchor: "", context: file.purpose, more: 0 });
    });
    return hits;
  }

  // Names that are used, and words; only where the query is one word.
  uses(words) {
    if (words.length > 1) return [];
    const hits = [], word = words[0];
    for (const [name, , count, places, context] of this.shards.get(shardKey(word)) ?? []) {
      if (!count || !name.toLowerCase().startsWith(word)) continue;
      const file = this.files[places[0]];
      hits.push({ score: (name.toLowerCase() === word ? 22 : 8) - name.length / 20, name, kind: "use", path: file.path,
        line: places[1], page: `${file.page}_source.html`, anchor: `L${places[1]}`, context, more: count - 1 });
    }
    return hits;
  }
}

const last = (name) => name.slice(Math.max(name.lastIndexOf("."), name.lastIndexOf(":")) + 1);

// How well a name matches one word: whole, at its start, at the start of a part, anywhere.
function matched(low, name, word) {
  const at = low.lastIndexOf(word);
  if (at < 0) return 0;
  const tail = last(low), plain = tail.replace(/^_+/, "");
  if (tail === word || low === word) return 100;
  if (plain === word) return 94;
  if (tail.startsWith(word)) return 70;
  if (plain.startsWith(word)) return 64;
  const start = low.length - tail.length, inside = low.indexOf(word, start);
  if (inside >= 0) return boundary(name, inside) ? 54 : 40;
  return boundary(name, at) ? 34 : 18; // in the class around it
}

const boundary = (name, at) => !at || /[._:]/.test(name[at - 1]) || (/[A-Z]/.test(name[at]) && /[a-z0-9]/.test(name[at - 1]));

// A few letters wrong, missing, added or swapped: 14 for one, 8 for two (in words of six letters or more).
function near(name, word) {
  const most = word.length < 4 ? 0 : word.length < 6 ? 1 : 2;
  if (!most || Math.abs(name.length - word.length) > most) return 0;
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
    if (least > most) return 0;
    before = row;
    row = next;
  }
  const cost = row[word.length];
  return cost > most ? 0 : cost === 1 ? 14 : 8;
}

// The letters of a word as bits, to leave out quickly what cannot be near.
function letters(word) {
  let mask = 0;
  for (let i = 0; i < word.length; i++) {
    const code = word.charCodeAt(i) - 97;
    if (code >= 0 && code < 26) mask |= 1 << code;
  }
  return mask;
}

function bits(value) {
  let count = 0;
  for (let left = value; left; left &= left - 1) count++;
  return count;
}

const shardKey = (word) => [...word.replace(/^_+/, "").toLowerCase()].slice(0, 2)
  .map((c) => (/[a-z0-9]/.test(c) ? c : `-${c.codePointAt(0).toString(16)}-`)).join("") || "other";

const anchorOf = (name) => "d-" + [...name].map((c) => (/[\p{L}\p{N}_.:~-]/u.test(c) ? c : `-${c.codePointAt(0).toString(16)}-`)).join("");
