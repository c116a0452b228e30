"use strict";

// Tables of many rows, which can be searched and sorted, and a map of their bytes.
// Text is set as text, never as HTML: names in a checkpoint may be hostile.

const PALETTE = ["#8ecae6", "#ffb454", "#9bd48a", "#e79ac0", "#c9b6f2", "#f4e06d", "#7fd1c7", "#f0907f"];
const REST = "#c3c7cc"; // the color of all further values
const STEP = 200; // rows that are added at a time
const SMALLEST = 0.004; // the share of the map below which a box is not drawn
const UNITS = ["kB", "MB", "GB", "TB", "PB"];

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function size(nbytes) {
  if (nbytes < 1000) return `${nbytes} B`;
  let power = 1;
  while (nbytes >= 999.95 * 1000 ** power && power < UNITS.length) power += 1;
  return `${(nbytes / 1000 ** power).toFixed(1)} ${UNITS[power - 1]}`;
}

const count = (n) => n.toLocaleString("en");

function decoded(column) {
  if (column.numbers) return column.numbers;
  if (column.at) return column.at.map((n) => column.texts[n]);
  const texts = [];
  let before = "";
  for (let n = 0; n < column.front.length; n += 2) {
    before = before.slice(0, column.front[n]) + column.front[n + 1];
    texts.push(before);
  }
  return texts;
}

// The keys of a dotted name; a dot within quotes or parentheses divides nothing.
function keysOf(name) {
  const keys = name.match(/(?:"(?:[^"\\]|\\.)*"|\([^)]*\)|[^."(]+|["(])+/g);
  return keys || [name];
}

// -- a table ------------------------------------------------------------------------------------

class Rows {
  constructor(section, data) {
    this.data = data;
    this.columns = data.columns.map(decoded);
    this.length = this.columns.length ? this.columns[0].length : 0;
    this.within = null; // the rows of the part of the map that is shown; null for all
    this.order = null;
    this.body = make("tbody");
    this.status = make("span", { role: "status" });
    this.search = make("input", { type: "search", autocomplete: "off" });
    this.more = make("button", { type: "button", class: "more" });
    this.heads = data.head.map((title, n) => this.head(title, n));
    this.search.addEventListener("input", () => this.show());
    this.more.addEventListener("click", () => this.add());
    section.append(
      make("div", { class: "bar" }, make("label", {}, "Search", this.search), this.status),
      make("div", { class: "wide" },
        make("table", {}, make("thead", {}, make("tr", {}, ...this.heads)), this.body)),
      this.more,
    );
    this.show();
  }

  head(title, n) {
    const button = make("button", { type: "button" }, title);
    const cell = make("th", { scope: "col", "aria-sort": "none" }, button);
    if (this.data.right.includes(n)) cell.classList.add("right");
    button.addEventListener("click", () => this.sort(n, cell));
    return cell;
  }

  sort(n, cell) {
    const falling = cell.getAttribute("aria-sort") === "ascending";
    for (const each of this.heads) each.setAttribute("aria-sort", "none");
    cell.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const column = this.columns[n];
    const sign = falling ? -1 : 1;
    const compare = new Intl.Collator("en", { numeric: true }).compare;
    const by = typeof column[0] === "string" ? compare : (a, b) => (a ?? -1) - (b ?? -1);
    this.order = Array.from({ length: this.length }, (_, row) => row);
    this.order.sort((a, b) => sign * by(column[a], column[b]));
    this.show();
  }

  text(row, n) {
    const value = this.columns[n][row];
    if (this.data.counts.includes(n)) return count(value);
    if (this.data.bars.includes(n)) return value === null ? "" : `${Number(value.toPrecision(3))}`;
    return typeof value === "number" ? size(value) : value;
  }

  cell(row, n) {
    const cell = make("td", {}, this.text(row, n));
    if (this.data.right.includes(n)) cell.classList.add("right");
    if (this.data.bars.includes(n)) {
      this.most ??= new Map();
      if (!this.most.has(n)) this.most.set(n, this.columns[n].reduce((a, b) => Math.max(a, b), 0));
      const bar = make("div", { class: "of-most", "aria-hidden": "true" });
      bar.style.width = `${(100 * (this.columns[n][row] || 0)) / (this.most.get(n) || 1)}%`;
      cell.append(bar);
    }
    return cell;
  }

  show() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (row) => {
      const text = this.columns.map((_, n) => this.text(row, n)).join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    };
    let rows = this.order || Array.from({ length: this.length }, (_, row) => row);
    if (this.within) {
      const within = new Set(this.within);
      rows = rows.filter((row) => within.has(row));
    }
    this.shown = words.length ? rows.filter(matches) : rows;
    this.body.replaceChildren();
    const all = count(this.length);
    const some = this.shown.length === this.length ? all : `${count(this.shown.length)} of ${all}`;
    this.status.textContent = `${some} ${this.data.what}`;
    this.add();
  }

  add() {
    const start = this.body.children.length;
    for (const row of this.shown.slice(start, start + STEP)) {
      this.body.append(make("tr", {}, ...this.columns.map((_, n) => this.cell(row, n))));
    }
    const left = this.shown.length - this.body.children.length;
    this.more.hidden = left <= 0;
    this.more.textContent = `Show more: ${count(left)} left`;
  }
}

// -- a drawing ----------------------------------------------------------------------------------

// Rectangles of these sizes within one of width w and height h, each close to a square:
// Bruls, Huizing, van Wijk, "Squarified Treemaps" (2000).
function squarified(sizes, x, y, w, h) {
  const placed = [];
  let left = sizes.reduce((sum, each) => sum + each, 0);
  let n = 0;
  while (n < sizes.length && left > 0) {
    const side = Math.min(w, h);
    const scale = (w * h) / left;
    let sum = 0;
    let best = Infinity;
    let end = n;
    while (end < sizes.length) {
      const next = sum + sizes[end];
      const strip = (next * scale) / side;
      const worst = Math.max(
        ...[sizes[n], sizes[end]].map((each) => {
          const long = (each * scale) / strip;
          return Math.max(long / strip, strip / long);
        }),
      );
      if (worst > best) break;
      best = worst;
      sum = next;
      end += 1;
    }
    const strip = (sum * scale) / side;
    let along = 0;
    for (; n < end; n += 1) {
      const long = (sizes[n] * scale) / strip;
      placed.push(w >= h ? [x, y + along, strip, long] : [x + along, y, long, strip]);
      along += long;
    }
    if (w >= h) { x += strip; w -= strip; } else { y += strip; h -= strip; }
    left -= sum;
  }
  return placed;
}

// Rows that are drawn by the keys of their names: one can go into a part, and back.
class Drawn {
  constructor(section, rows, spec, names, sizes) {
    this.rows = rows;
    this.spec = spec;
    this.names = names;
    this.sizes = sizes;
    this.root = { label: "all", depth: 0, rows: names.map((_, row) => row), above: null };
    this.at = this.root;
    this.path = make("div", { class: "bar path" });
    this.area = make("div", { role: "group" });
    this.legend = make("div", { class: "legend" });
    this.area.addEventListener("keydown", (event) => this.key(event));
    section.append(this.path, this.area, this.legend);
  }

  sum(node) {
    node.sum ??= node.rows.reduce((sum, row) => sum + this.sizes[row], 0);
    return node.sum;
  }

  // What is one key further down; a chain of single keys is one step.
  below(node) {
    if (node.below) return node.below;
    node.below = this.parts(node).map(([label, rows]) => {
      let depth = node.depth + 1;
      const first = this.names[rows[0]];
      const same = () => rows.every((row) => this.names[row][depth] === first[depth]);
      while (rows.length > 1 && first[depth] !== undefined && same()) {
        label += `.${first[depth]}`;
        depth += 1;
      }
      return { label, rows, depth, above: node };
    });
    return node.below;
  }

  isLeaf(node) {
    return node.rows.length === 1 || this.names[node.rows[0]].length <= node.depth;
  }

  go(node) {
    this.at = node;
    this.rows.within = node.above ? node.rows : null;
    this.draw();
    this.rows.show();
  }

  full(node) {
    return this.names[node.rows[0]].slice(0, node.depth).join(".");
  }

  trail() {
    const nodes = [];
    for (let node = this.at; node; node = node.above) nodes.unshift(node);
    this.path.replaceChildren(...nodes.map((node) => {
      const button = make("button", { type: "button" }, `${node.label} ${this.told(this.sum(node))}`);
      if (node === this.at) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => this.go(node));
      return button;
    }));
  }

  key(event) {
    const boxes = [...this.area.querySelectorAll('.box[tabindex="0"]')];
    const n = boxes.indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step && n >= 0) boxes[(n + step + boxes.length) % boxes.length].focus();
    else if ((event.key === "Enter" || event.key === " ") && n >= 0) boxes[n].click();
    else if ((event.key === "Escape" || event.key === "Backspace") && this.at.above) this.go(this.at.above);
    else return;
    event.preventDefault();
    if (!step) this.area.querySelector(".box")?.focus();
  }

  // What the colors mean, and how much there is of each.
  explain(values, colors, sums) {
    const whole = this.sum(this.root) || 1;
    this.legend.replaceChildren(...values.map((value) => {
      const mark = make("i");
      mark.style.background = colors.get(value);
      const part = (100 * sums.get(value)) / whole;
      return make("span", {}, mark, `${value || "none"}: ${this.told(sums.get(value))} (${part && part < 0.1 ? "<0.1" : part.toFixed(1)} %)`);
    }));
  }
}

// Boxes within boxes, as large as the bytes.
class Area extends Drawn {
  constructor(section, rows, spec) {
    const names = rows.columns[spec.name].map((name, row) => {
      const above = spec.above.map((n) => rows.columns[n][row]);
      const keys = keysOf(name); // model.w of the section model is in one box model
      return above[above.length - 1] === keys[0] && keys.length > 1 ? [...above, ...keys.slice(1)] : [...above, ...keys];
    });
    super(section, rows, spec, names, typeof spec.nbytes === "number" ? rows.columns[spec.nbytes] : spec.nbytes);
    this.color = make("select");
    for (const n of spec.colors) this.color.append(make("option", { value: n }, rows.data.head[n]));
    this.color.addEventListener("change", () => this.draw());
    this.area.className = "map";
    this.area.setAttribute("aria-label", "map of bytes");
    section.prepend(make("div", { class: "bar" }, make("label", {}, "Color by", this.color)));
    this.draw();
  }

  told(nbytes) {
    return size(nbytes);
  }

  parts(node) {
    const parts = new Map();
    for (const row of node.rows) {
      const key = this.names[row][node.depth];
      if (key === undefined) continue;
      if (!parts.has(key)) parts.set(key, []);
      parts.get(key).push(row);
    }
    const nbytes = (rows) => rows.reduce((sum, row) => sum + this.sizes[row], 0);
    return [...parts].map((part) => [nbytes(part[1]), part]).sort((a, b) => b[0] - a[0]).map(([, part]) => part);
  }

  draw() {
    const column = this.rows.columns[Number(this.color.value)];
    const sums = new Map();
    for (const row of this.root.rows) {
      sums.set(column[row], (sums.get(column[row]) || 0) + this.sizes[row]);
    }
    const order = [...sums].sort((a, b) => b[1] - a[1]).map(([value]) => value);
    const colors = new Map(order.map((value, n) => [value, PALETTE[n] || REST]));
    this.explain(order.slice(0, 12), colors, sums);
    this.trail();
    this.area.replaceChildren();
    const all = [this.at];
    const boxes = this.isLeaf(this.at) ? all : this.below(this.at);
    this.place(boxes, [0, 0, 1, 1], column, colors, 0);
  }

  place(nodes, [x, y, w, h], column, colors, level) {
    const drawn = nodes.filter((node) => this.sum(node) > 0);
    const { width, height } = this.area.getBoundingClientRect();
    const wide = width || 900;
    const high = height || 400;
    const spots = squarified(drawn.map((node) => this.sum(node)), x * wide, y * high, w * wide, h * high);
    spots.forEach(([left, top, across, down], n) => {
      const node = drawn[n];
      const part = [left / wide, top / high, across / wide, down / high];
      if (part[2] < SMALLEST || part[3] < SMALLEST) return;
      this.area.append(this.box(node, part, column, colors, level));
      const inner = level === 0 && !this.isLeaf(node) && across > 60 && down > 40;
      if (inner) {
        const bar = 17 / high;
        const below = [part[0] + 2 / wide, part[1] + bar, part[2] - 4 / wide, part[3] - bar - 2 / high];
        this.place(this.below(node), below, column, colors, 1);
      }
    });
  }

  box(node, [x, y, w, h], column, colors, level) {
    const text = `${node.label} ${size(this.sum(node))}`;
    const rows = node.rows.length === 1 ? "" : `, ${count(node.rows.length)} ${this.rows.data.what}`;
    const box = make("div", {
      class: this.isLeaf(node) ? "box leaf" : "box",
      role: "button",
      tabindex: level === 0 ? "0" : "-1",
      title: `${this.full(node)}\n${size(this.sum(node))}${rows}`,
      "aria-label": `${text}${rows}`,
    }, text);
    const shares = new Map();
    for (const row of node.rows) {
      const color = colors.get(column[row]);
      shares.set(color, (shares.get(color) || 0) + this.sizes[row]);
    }
    let from = 0;
    const stops = [...shares].map(([color, nbytes]) => {
      const to = from + (100 * nbytes) / (this.sum(node) || 1);
      const stop = `${color} ${from}% ${to}%`;
      from = to;
      return stop;
    });
    Object.assign(box.style, {
      left: `${100 * x}%`, top: `${100 * y}%`, width: `${100 * w}%`, height: `${100 * h}%`,
      background: `linear-gradient(90deg, ${stops.join(", ")})`,
    });
    box.addEventListener("click", () => this.go(node));
    return box;
  }
}

// Rows in their order, from left to right, each in the lane of its device.
class Timeline extends Drawn {
  constructor(section, rows, spec) {
    const names = rows.columns[spec.name].map((name, row) => [
      ...spec.above.map((n) => rows.columns[n][row]),
      ...(name ? keysOf(name) : []),
      ...spec.below.map((n) => rows.columns[n][row]).filter(Boolean),
    ]);
    super(section, rows, spec, names, rows.columns[spec.length]);
    this.colors = new Map(spec.lanes.map((lane, n) => [lane, PALETTE[n] || REST]));
    this.area.className = "lanes";
    this.area.setAttribute("aria-label", "timeline");
    this.draw();
  }

  told(length) {
    return `${count(length)} ${length === 1 ? this.spec.unit.replace(/s$/, "") : this.spec.unit}`;
  }

  // What follows each other with one key is a part.
  parts(node) {
    const parts = [];
    for (const row of node.rows) {
      const key = this.names[row][node.depth] ?? "";
      if (parts.length && parts[parts.length - 1][0] === key) parts[parts.length - 1][1].push(row);
      else parts.push([key, [row]]);
    }
    return parts;
  }

  draw() {
    this.trail();
    const { columns } = this.rows;
    const lanes = columns[this.spec.lane];
    const starts = new Map();
    let whole = 0;
    for (const row of this.at.rows) {
      starts.set(row, whole);
      whole += Math.max(this.sizes[row], 1);
    }
    const groups = this.isLeaf(this.at) ? [this.at] : this.below(this.at);
    const tracks = new Map(["", ...this.spec.lanes].map((lane) => [lane, make("div", { class: "track" })]));
    this.area.replaceChildren(...[...tracks].map(([lane, track]) =>
      make("div", { class: lane ? "lane" : "lane parts" }, make("span", { class: "of" }, lane), track)));
    const add = (lane, first, last, node, text, title, color) => {
      const box = make("div", { class: this.isLeaf(node) ? "box leaf" : "box", title }, text);
      const to = starts.get(last) + Math.max(this.sizes[last], 1);
      box.style.left = `${(100 * starts.get(first)) / whole}%`;
      box.style.width = `max(1px, ${(100 * (to - starts.get(first))) / whole}%)`;
      box.style.background = color;
      box.addEventListener("click", () => this.go(node));
      tracks.get(lane).append(box);
      return box;
    };
    for (const node of groups) {
      const { rows } = node;
      const said = `${node.label}: ${this.told(this.sum(node))}`;
      const box = add("", rows[0], rows[rows.length - 1], node, node.label, said, REST);
      box.setAttribute("role", "button");
      box.setAttribute("tabindex", "0");
      box.setAttribute("aria-label", said);
      for (const row of rows) {
        const text = columns.map((_, n) => this.rows.text(row, n)).filter(Boolean);
        const label = keysOf(columns[this.spec.name][row]).slice(-2).join(".") || text[1];
        const one = add(lanes[row], row, row, node, label, text.join("\n"), this.colors.get(lanes[row]));
        if (columns[columns.length - 1][row]) one.classList.add("moved");
      }
    }
    const sums = new Map(this.spec.lanes.map((lane) => [lane, 0]));
    for (const row of this.root.rows) sums.set(lanes[row], sums.get(lanes[row]) + this.sizes[row]);
    this.explain(this.spec.lanes.slice(0, 12), this.colors, sums);
    const besides = columns[columns.length - 1];
    if (besides.some(Boolean)) this.legend.append(make("span", {}, make("i", { class: "moved" }), this.spec.marked));
  }
}

for (const section of document.querySelectorAll("section.columns")) {
  const data = JSON.parse(document.getElementById(section.dataset.of).textContent);
  const map = make("div");
  const table = make("div");
  section.append(map, table);
  const rows = new Rows(table, data);
  const drawn = { Drawing: Area, Lanes: Timeline }[data.drawn];
  if (drawn && rows.length) new drawn(map, rows, data.map);
}
