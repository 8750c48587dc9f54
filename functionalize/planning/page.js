"use strict";
// The page of a plan. Everything it shows it computes from the columns of events that `page.py` packed.
(() => {
const $ = (id) => document.getElementById(id);
const BEFORE = -1, NEVER = -2, TOP = 10, TOP_OF_TABLE = 25;
const dark = matchMedia("(prefers-color-scheme: dark)");

// -- units and elements -----------------------------------------------------------------------------

const digits = (x) => { const size = Math.abs(x); return size < 9.995 ? x.toFixed(2) : size < 99.95 ? x.toFixed(1) : Math.round(x).toLocaleString("en"); };
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (Math.abs(n) >= 999.5 && unit < units.length - 1) { n /= 1024; unit++; }
  return (unit ? digits(n) : Math.round(n)) + " " + units[unit];
}
function seconds(t) {
  if (t === 0) return "0 s";
  const units = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]];
  const [name, unit] = units.find((u) => Math.abs(t) >= 0.9995 * u[1]) || units[3];
  return digits(t / unit) + " " + name;
}
const short = (text) => { const [number, unit] = text.split(" "); return (number.includes(".") ? number.replace(/\.?0+$/, "") : number) + " " + unit; };
const shorter = (text, width) => (text.length <= width ? text : `${text.slice(0, width / 2 - 1)}…${text.slice(text.length - width / 2)}`);
const brief = (name) => (name.startsWith("aten.") ? name.replace("aten.", "").replace(".default", "") : name);
/** `/home/me/train.py:12, in step: loss = ...` as `train.py:12`. */
const place = (line) => line.replace(/^(?:.*[\\/])?([^\\/]+?:\d+)(?:, in .*)?$/s, "$1");
/** A tick of a cropped axis: with as many digits as tell it from the next one. */
function exact(v, size) {
  const power = Math.max(0, Math.floor(Math.log2(Math.max(size, 1)) / 10)), unit = 1024 ** power;
  return `${count(v / unit)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}`;
}
const count = (n) => n.toLocaleString("en");

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}
const swatch = (colour) => { const box = make("i"); box.style.background = colour; return box; };

// -- data -------------------------------------------------------------------------------------------

async function inflated(id) {
  const packed = Uint8Array.from(atob($(id).textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function load() {
  const [text, buffer] = await Promise.all([inflated("data"), inflated("columns")]);
  const data = JSON.parse(new TextDecoder().decode(text));
  const types = { B: Uint8Array, i: Int32Array, I: Uint32Array, d: Float64Array };
  data.column = (number) => { const [type, offset, length] = data.columns[number]; return new types[type](buffer, offset, length); };
  return data;
}

/** A timeline with the bytes of every category after every event. */
class Timeline {
  constructor(data, raw) {
    Object.assign(this, { data, raw, name: raw.name, first: raw.first, peak: raw.peak, anchors: raw.anchors });
    for (const key of ["op_name", "op_phase", "op_module", "op_line", "bytes", "padding", "category", "name_of", "shape", "made", "freed", "last_use", "event_op", "event"])
      this[key] = data.column(raw[key]);
    this.reserved = raw.reserved === null ? null : data.column(raw.reserved);
    const n = this.n = this.event.length, many = this.bytes.length, padding = data.categories.findIndex((c) => c.name === "padding");
    this.begins = new Int32Array(many);
    this.ends = new Int32Array(many).fill(n);
    this.stacked = new Map();
    const of = (category) => { if (!this.stacked.has(category)) this.stacked.set(category, new Float64Array(n)); return this.stacked.get(category); };
    for (let e = 0; e < n; e++) {
      const a = this.event[e] >>> 1, made = this.event[e] & 1, sign = made ? 1 : -1;
      (made ? this.begins : this.ends)[a] = e;
      if (this.bytes[a] > this.padding[a]) of(this.category[a])[e] += sign * (this.bytes[a] - this.padding[a]);
      if (this.padding[a]) of(padding)[e] += sign * this.padding[a];
    }
    for (const column of this.stacked.values()) for (let e = 1; e < n; e++) column[e] += column[e - 1];
    this.stacked = new Map([...this.stacked].sort((a, b) => a[0] - b[0]));
    this.show(new Set());
  }
  /** The sum of what is not hidden. */
  show(hidden) {
    this.visible = [...this.stacked].filter(([category]) => !hidden.has(category));
    this.total = new Float64Array(this.n);
    for (const [, column] of this.visible) for (let e = 0; e < this.n; e++) this.total[e] += column[e];
  }
  live(event) {
    const found = [];
    for (let a = 0; a < this.bytes.length; a++) if (this.begins[a] <= event && event < this.ends[a] && this.bytes[a]) found.push(a);
    return found.sort((a, b) => this.bytes[b] - this.bytes[a]);
  }
  /** The largest of them: [name, category, bytes, allocations]; those of all layers together if `grouped`. */
  largest(event, limit, grouped) {
    const groups = new Map();
    for (const a of this.live(event)) {
      const name = this.data.strings[this.name_of[a]], key = grouped ? this.category[a] + name.replace(/\d+/g, "*") : a;
      const group = groups.get(key);
      if (group) { group.bytes += this.bytes[a]; group.all.push(a); } else groups.set(key, { name, category: this.category[a], bytes: this.bytes[a], all: [a] });
    }
    for (const group of groups.values()) {
      if (group.all.length > 1) group.name = group.name.replace(/\d+/g, "*");
      group.many = group.all.length > 1 ? ` ×${count(group.all.length)}` : "";
    }
    return [...groups.values()].sort((a, b) => b.bytes - a.bytes).slice(0, limit);
  }
  op(number) {
    if (number === BEFORE) return { name: "before the step", phase: "", module: "", line: "" };
    if (number === NEVER) return { name: "outlives the step", phase: "", module: "", line: "" };
    const s = this.data.strings;
    return { name: s[this.op_name[number]], phase: s[this.op_phase[number]], module: s[this.op_module[number]], line: s[this.op_line[number]] };
  }
  /** Where an event of this timeline lies on another one. */
  placed(other) {
    const anchors = this.anchors[other], at = new Float64Array(this.n);
    for (let e = 0, i = 0; e < this.n; e++) {
      while (i < anchors.length - 2 && e >= anchors[i + 1][0]) i++;
      const [a0, b0] = anchors[i], [a1, b1] = anchors[i + 1];
      at[e] = b0 + (e - a0) * (b1 - b0) / Math.max(a1 - a0, 1);
    }
    return at;
  }
}

// -- a canvas with a range --------------------------------------------------------------------------

/** A canvas over [start, end) of which [from, to) is shown; wheel, drag and keys change that. */
class Plot {
  constructor(canvas, start, end, least) {
    Object.assign(this, { canvas, start, end, least, from: start, to: end, left: 76, right: 10, cursor: null });
    this.context = canvas.getContext("2d");
    canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    canvas.addEventListener("pointerdown", (e) => this.down(e));
    canvas.addEventListener("pointermove", (e) => this.move(e));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { this.grabbed = null; canvas.style.cursor = ""; });
    canvas.addEventListener("pointerleave", () => { if (!this.grabbed) this.leave(); });
    canvas.addEventListener("dblclick", () => this.range(this.start, this.end));
    canvas.addEventListener("keydown", (e) => { if (!e.ctrlKey && !e.metaKey && !e.altKey && this.key(e)) e.preventDefault(); });
    canvas.addEventListener("blur", () => this.leave());
    new ResizeObserver(() => this.paint()).observe(canvas);
    dark.addEventListener("change", () => this.draw());
  }
  /** Paint with the next frame, once however often it is asked for. */
  draw() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; this.paint(); });
  }
  get width() { return Math.max(this.canvas.clientWidth - this.left - this.right, 1); }
  at(pixel) { return this.from + (pixel - this.left) / this.width * (this.to - this.from); }
  pixel(at) { return this.left + (at - this.from) / (this.to - this.from) * this.width; }
  range(from, to) {
    const size = Math.min(Math.max(to - from, this.least), this.end - this.start);
    from = Math.min(Math.max((from + to - size) / 2, this.start), this.end - size);
    this.from = from;
    this.to = from + size;
    this.changed();
    this.draw();
  }
  zoom(factor, around = (this.from + this.to) / 2) { this.range(around - (around - this.from) * factor, around + (this.to - around) * factor); }
  shift(by) { const size = this.to - this.from, from = Math.min(Math.max(this.from + by, this.start), this.end - size); this.range(from, from + size); }
  wheel(e) {
    const unit = e.deltaMode === 1 ? 16 : e.deltaMode === 2 ? 400 : 1;
    if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
      this.shift((e.deltaX || e.deltaY) * unit / this.width * (this.to - this.from));
    } else {
      if (e.deltaY > 0 && this.to - this.from >= this.end - this.start) return; // nothing to zoom out of: the page scrolls
      this.zoom(Math.exp(Math.max(-300, Math.min(300, e.deltaY * unit)) / 300), this.at(e.offsetX));
    }
    e.preventDefault();
    this.hover(e.offsetX, e.offsetY);
  }
  down(e) {
    if (e.button) return;
    this.grabbed = { x: e.offsetX, from: this.from };
    this.canvas.setPointerCapture(e.pointerId);
  }
  move(e) {
    if (this.grabbed && Math.abs(e.offsetX - this.grabbed.x) > 2) {
      this.canvas.style.cursor = "grabbing";
      this.shift(this.grabbed.from - this.from - (e.offsetX - this.grabbed.x) / this.width * (this.to - this.from));
    }
    this.hover(e.offsetX, e.offsetY);
  }
  key(e) {
    const act = { "+": () => this.zoom(1 / 1.6, this.focus()), "=": () => this.zoom(1 / 1.6, this.focus()), "-": () => this.zoom(1.6, this.focus()), "0": () => this.range(this.start, this.end) }[e.key];
    if (act) act();
    return Boolean(act);
  }
  focus() { return this.cursor === null ? (this.from + this.to) / 2 : this.cursor; }
  reveal(at) { if (at < this.from || at >= this.to) this.shift(at - (this.from + this.to) / 2); }
  begin() {
    const ratio = devicePixelRatio || 1, { clientWidth: w, clientHeight: h } = this.canvas, style = getComputedStyle(document.documentElement);
    if (this.canvas.width !== Math.round(w * ratio) || this.canvas.height !== Math.round(h * ratio)) { this.canvas.width = Math.round(w * ratio); this.canvas.height = Math.round(h * ratio); }
    this.colour = Object.fromEntries(["page", "ink", "muted", "line", "faint", "alert"].map((name) => [name, style.getPropertyValue("--" + name).trim()]));
    const c = this.context;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    c.clearRect(0, 0, w, h);
    c.font = `12px ${style.fontFamily}`;
    c.textBaseline = "middle";
    c.textAlign = "left";
    c.setLineDash([]);
    return c;
  }
  text(text, x, y, colour, halo) {
    if (halo) { this.context.strokeStyle = halo; this.context.lineWidth = 4; this.context.lineJoin = "round"; this.context.strokeText(text, x, y); }
    this.context.fillStyle = colour;
    this.context.fillText(text, x, y);
  }
  /** A tooltip beside a point, inside the canvas. */
  tip(box, x, y, ...children) {
    box.replaceChildren(...children);
    box.hidden = false;
    const { clientWidth: w, clientHeight: h } = this.canvas, { offsetWidth: bw, offsetHeight: bh } = box;
    box.style.left = `${Math.max(0, x + 16 + bw > w ? x - 16 - bw : x + 16)}px`;
    box.style.top = `${Math.max(0, Math.min(y + 12, h - bh))}px`;
  }
}

/** A round step of an axis of which about `parts` fit. */
function step(size, parts, base) {
  if (base === 2) return 2 ** Math.ceil(Math.log2(Math.max(size, 1) / parts));
  const power = 10 ** Math.floor(Math.log10(size / parts));
  return [1, 2, 5, 10].map((m) => m * power).find((s) => size / s <= parts);
}

// -- memory -----------------------------------------------------------------------------------------

class Memory extends Plot {
  constructor(data) {
    const timelines = data.timelines.map((raw) => new Timeline(data, raw));
    super($("timeline"), timelines[0].first, timelines[0].n, 8);
    Object.assign(this, { data, timelines, hidden: new Set(), tooltip: $("memory-tooltip"), top: 22, bottom: 44 });
    this.buttons = timelines.map((timeline, i) => {
      const button = make("button", { type: "button", textContent: timeline.name, onclick: () => this.choose(i) });
      button.dataset.timeline = timeline.name;
      return button;
    });
    $("lifetimes").append(...this.buttons);
    $("zoom-in").onclick = () => this.zoom(1 / 2, this.focus());
    $("zoom-out").onclick = () => this.zoom(2, this.focus());
    $("whole").onclick = () => this.range(this.start, this.end);
    $("to-peak").onclick = () => this.toPeak();
    $("crop").onchange = () => this.draw();
    $("grouped").onchange = () => { this.table(); this.describe(); };
    this.canvas.addEventListener("focus", () => { if (this.cursor === null && this.canvas.matches(":focus-visible")) this.put(this.now.peak.event); });
    $("memory").hidden = false;
    this.choose(0);
  }
  choose(i) {
    const before = this.now, relative = before && [(this.from - this.start) / (this.end - this.start), (this.to - this.start) / (this.end - this.start)];
    this.index = i;
    this.now = this.timelines[i];
    this.others = this.timelines.flatMap((timeline, j) => (j === i ? [] : [{ timeline, at: timeline.placed(i) }]));
    this.buttons.forEach((button, j) => button.setAttribute("aria-pressed", j === i));
    this.start = this.now.first;
    this.end = this.now.n;
    this.cursor = null;
    this.canvas.dataset.timeline = this.now.name;
    this.canvas.setAttribute("aria-valuemin", this.start);
    this.canvas.setAttribute("aria-valuemax", this.end - 1);
    $("peak").replaceChildren(make("strong", { textContent: `Peak of ${this.now.name}: ` }), this.now.peak.words, ...this.differences());
    $("table-title").textContent = `Live at the peak of ${this.now.name}`;
    $("lines").textContent = this.others.map(({ timeline }) => `Dashed: ${timeline.name}.`).concat(this.now.reserved ? ["Thin line: reserved by the allocator (simulated)."] : []).join(" ");
    this.legend();
    this.table();
    const size = this.end - this.start;
    this.range(this.start + (relative ? relative[0] : 0) * size, this.start + (relative ? relative[1] : 1) * size);
    this.describe();
  }
  differences() {
    return this.others.map(({ timeline }) => {
      const less = this.now.peak.bytes - timeline.peak.bytes;
      return ` With the lifetimes of ${timeline.name}: ${bytes(timeline.peak.bytes)}` + (less ? `, ${bytes(Math.abs(less))} ${less > 0 ? "less" : "more"}.` : ", the same.");
    });
  }
  toPeak() { const size = Math.max(200, (this.end - this.start) / 200); this.range(this.now.peak.event - size / 2, this.now.peak.event + size / 2); this.put(this.now.peak.event); }
  changed() {
    const from = Math.floor(this.from), to = Math.min(Math.ceil(this.to), this.end);
    Object.assign(this.canvas.dataset, { from, to });
    $("range").textContent = `events ${count(from - this.start)} to ${count(to - this.start - 1)} of ${count(this.end - this.start - 1)}`;
  }
  key(e) {
    const now = this.cursor === null ? this.now.peak.event : this.cursor, far = Math.max(1, Math.round((this.to - this.from) / 20));
    const to = { ArrowLeft: now - (e.shiftKey ? far : 1), ArrowRight: now + (e.shiftKey ? far : 1), Home: this.start, End: this.end - 1 }[e.key];
    if (to !== undefined) { this.put(Math.min(Math.max(to, this.start), this.end - 1)); return true; }
    if (e.key === "p" || e.key === "P") { this.toPeak(); return true; }
    return super.key(e);
  }
  /** The cursor at an event, by the keyboard. */
  put(event) {
    this.reveal(event);
    this.cursor = event;
    this.draw();
    this.describe();
    this.hint(this.pixel(event + 0.5), this.top + 4, null);
  }
  hover(x, y) {
    if (x < this.left || x > this.canvas.clientWidth - this.right) return this.leave();
    // the event that the column shows: that with the most bytes
    const column = this.column(this.at(Math.floor(x)), this.at(Math.floor(x) + 1));
    this.cursor = column;
    this.draw();
    this.describe();
    let category = null, sum = this.value(y);
    if (sum >= 0) for (const [c, values] of this.now.visible) { sum -= values[column]; if (sum < 0) { category = c; break; } }
    this.hint(x, y, category);
  }
  leave() { this.cursor = null; this.tooltip.hidden = true; this.draw(); this.describe(); }
  hint(x, y, category) {
    const t = this.now, e = this.cursor, a = t.event[e] >>> 1, op = t.op(t.event_op[e]), s = this.data.strings, lines = [];
    if (category !== null) {
      const c = this.data.categories[category];
      lines.push(make("b", {}, swatch(c.colour), ` ${c.name}: ${bytes(t.stacked.get(category)[e])}`));
    }
    lines.push(make("b", { textContent: `${bytes(t.total[e])}${this.hidden.size ? " shown" : " in all"}` }));
    const row = (label, text) => { if (text) lines.push(make("div", {}, make("span", { textContent: label + " " }), text)); };
    if (t.reserved) row("reserved", bytes(t.reserved[e]));
    row("op", op.name);
    row("module", op.module);
    row("line", shorter(op.line.replace(/^.*[\\/](?=[^\\/]+:\d)/, ""), 150));
    row("phase", op.phase);
    row(t.event[e] & 1 ? "allocates" : "frees", `${s[t.name_of[a]]}, ${bytes(t.bytes[a])}`);
    this.tip(this.tooltip, x, y, ...lines);
  }
  /** What the panel at the right says: of the cursor, else of the peak. */
  describe() {
    const t = this.now, at = this.cursor === null ? t.peak.event : this.cursor, op = t.op(t.event_op[at]);
    const said = [this.index, at, this.cursor === null, $("grouped").checked, ...this.hidden].join();
    if (said === this.said) return;
    this.said = said;
    const where = [op.phase, op.name, op.module].filter(Boolean).join(" · ");
    $("moment").textContent = this.cursor === null || at === t.peak.event ? `At the peak: ${bytes(t.peak.bytes)}` : `At event ${count(at - t.first)}: ${bytes(t.total[at])}`;
    $("moment-op").textContent = where;
    for (const [category, { button, value }] of this.entries) {
      const n = t.stacked.get(category)[at];
      value.textContent = bytes(n);
      button.classList.toggle("zero", !n);
    }
    $("live").replaceChildren(...t.largest(at, TOP, $("grouped").checked).map((group) =>
      make("li", { title: group.name + group.many }, swatch(this.data.categories[group.category].colour), make("span", { textContent: shorter(brief(group.name), 30) }), make("em", { textContent: group.many }), bytes(group.bytes))));
    this.canvas.setAttribute("aria-valuenow", at);
    this.canvas.setAttribute("aria-valuetext", `${bytes(t.total[at])}, ${where}`);
  }
  legend() {
    this.entries = new Map();
    this.said = null;
    const items = [...this.now.stacked.keys()].reverse().map((category) => {
      const { name, colour } = this.data.categories[category], value = make("b");
      const button = make("button", { type: "button", onclick: () => this.toggle(category) }, swatch(colour), make("span", { textContent: name }), value);
      button.setAttribute("aria-pressed", !this.hidden.has(category));
      button.dataset.category = name;
      this.entries.set(category, { button, value });
      return make("li", {}, button);
    });
    $("legend").replaceChildren(...items);
    for (const timeline of this.timelines) timeline.show(this.hidden);
  }
  toggle(category) {
    if (!this.hidden.delete(category)) this.hidden.add(category);
    this.entries.get(category).button.setAttribute("aria-pressed", !this.hidden.has(category));
    for (const timeline of this.timelines) timeline.show(this.hidden);
    this.draw();
    this.describe();
  }
  table() {
    const t = this.now, where = (number) => {
      const op = t.op(number);
      return make("td", { textContent: [op.name, op.module, place(op.line)].filter(Boolean).join(" · "), title: op.line });
    };
    const rows = t.largest(t.peak.event, TOP_OF_TABLE, $("grouped").checked).map((group) => {
      const a = group.all[0], category = this.data.categories[group.category];
      return [make("td", { className: "number", textContent: bytes(group.bytes), title: `${count(group.bytes)} bytes` }), make("td", { className: "what" }, swatch(category.colour), group.name + group.many),
        ...[category.name, this.data.strings[t.shape[a]]].map((textContent) => make("td", { textContent })), ...[t.made[a], t.last_use[a], t.freed[a]].map(where)];
    });
    const head = ["bytes", "what", "category", "shape", "made by", "last used by", "freed by"].map((textContent, i) => make("th", { textContent, scope: "col", className: i ? "" : "number" }));
    $("at-peak").replaceChildren(make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells))));
  }
  get height() { return this.canvas.clientHeight - this.top - this.bottom; }
  value(y) { return this.base + (this.top + this.height - y) / this.height * (this.scale - this.base); }
  y(value) { return this.top + this.height * (1 - (value - this.base) / (this.scale - this.base)); }
  /** Of the events in [a, b) the one with the most bytes that are shown. */
  column(a, b) {
    const total = this.now.total, end = Math.min(Math.max(Math.ceil(b), Math.floor(a) + 1), this.end);
    let best = Math.max(Math.min(Math.floor(a), this.end - 1), this.start);
    for (let e = best + 1; e < end; e++) if (total[e] > total[best]) best = e;
    return best;
  }
  paint() {
    if (!this.now || !this.canvas.clientWidth) return;
    const c = this.begin(), width = Math.floor(this.width), columns = new Int32Array(width);
    for (let i = 0; i < width; i++) columns[i] = this.column(this.at(this.left + i), this.at(this.left + i + 1));
    const lines = this.others.map((other) => this.line(other, width));
    const held = this.now.reserved && !this.hidden.size && !$("crop").checked && Array.from(columns, (e) => this.now.reserved[e]);
    if (held) lines.push(held);
    let most = 1;
    for (const e of columns) most = Math.max(most, this.now.total[e]);
    for (const heights of lines) for (const n of heights) most = Math.max(most, n);
    const limit = this.data.limit, near = limit && limit < 1.5 * most && !this.hidden.size && !$("crop").checked;
    this.base = 0;
    if ($("crop").checked) {
      let least = most;
      for (const e of columns) least = Math.min(least, this.now.total[e]);
      this.base = Math.max(0, least - 0.3 * (most - least) - 0.001 * most);
    }
    const top = Math.max(most, near ? limit : 0);
    this.scale = top + 0.06 * (top - this.base);
    this.axis(c);
    c.save();
    c.beginPath();
    c.rect(this.left, 0, width, this.top + this.height);
    c.clip();
    this.stack(c, columns);
    for (const heights of lines) this.outline(c, heights, heights === held);
    c.restore();
    if (limit && limit < this.scale) { c.fillStyle = this.colour.alert; c.fillRect(this.left, this.y(limit), width, 1.5); this.text(`limit ${bytes(limit)}`, this.left + 6, this.y(limit) - 9, this.colour.alert, this.colour.page); }
    this.phases(c, width);
    this.marks(c);
  }
  axis(c) {
    const size = step(this.scale - this.base, 7, 2), digits = this.base > 0;
    c.textAlign = "right";
    for (let v = Math.ceil(this.base / size) * size; v <= this.scale; v += size) {
      c.fillStyle = this.colour.faint;
      c.fillRect(this.left, Math.round(this.y(v)), this.width, 1);
      this.text(digits ? exact(v, size) : short(bytes(v)), this.left - 8, this.y(v), this.colour.muted);
    }
    c.textAlign = "left";
  }
  stack(c, columns) {
    const base = this.y(this.base), tops = new Float64Array(columns.length), layers = [];
    for (const [category, values] of this.now.visible) {
      for (let i = 0; i < columns.length; i++) tops[i] += values[columns[i]];
      layers.push([category, tops.slice()]);
    }
    for (const [category, heights] of layers.reverse()) {
      c.fillStyle = this.data.categories[category].colour;
      c.beginPath();
      c.moveTo(this.left, base);
      for (let i = 0; i < heights.length; i++) {
        const y = Math.min(this.y(heights[i]), base);
        c.lineTo(this.left + i, y);
        c.lineTo(this.left + i + 1, y);
      }
      c.lineTo(this.left + heights.length, base);
      c.fill();
    }
  }
  /** The other timeline's most bytes in each column. */
  line({ timeline, at }, width) {
    const heights = new Float64Array(width), bound = (x) => { let a = 0, b = timeline.n; while (a < b) { const m = (a + b) >> 1; if (at[m] <= x) a = m + 1; else b = m; } return a - 1; };
    let e = Math.max(bound(this.from), timeline.first);
    for (let i = 0; i < width; i++) {
      const end = this.at(this.left + i + 1);
      let most = timeline.total[e];
      while (e + 1 < timeline.n && at[e + 1] < end) most = Math.max(most, timeline.total[++e]);
      heights[i] = most;
    }
    return heights;
  }
  /** A line with an edge that tells it from any colour: dashed for another timeline, thin for reserved bytes. */
  outline(c, heights, thin) {
    for (const [width, colour, dash] of [[thin ? 2.5 : 3.5, this.colour.page, []], [thin ? 1 : 1.5, thin ? this.colour.muted : this.colour.ink, thin ? [] : [5, 2]]]) {
      Object.assign(c, { lineWidth: width, strokeStyle: colour, lineJoin: "round" });
      c.setLineDash(dash);
      c.beginPath();
      heights.forEach((n, i) => { c.lineTo(this.left + i, this.y(n)); c.lineTo(this.left + i + 1, this.y(n)); });
      c.stroke();
    }
    c.setLineDash([]);
  }
  phases(c, width) {
    const y = this.canvas.clientHeight - this.bottom + 8, t = this.now, names = dark.matches ? this.data.compute : this.data.phases, s = this.data.strings;
    const of = (i) => { const op = t.event_op[Math.min(Math.max(Math.floor(this.at(this.left + i + 0.5)), t.first + 1), this.end - 1)]; return op < 0 ? "" : s[t.op_phase[op]]; };
    const seen = new Set(), paint = (phase, x, y, w, h) => { c.fillStyle = names[phase] || names[""]; c.fillRect(x, y, w, h); };
    for (let i = 0, from = 0; i <= width; i++) {
      if (i < width && of(i) === of(from)) continue;
      seen.add(of(from));
      paint(of(from), this.left + from, y, i - from, 14);
      from = i;
    }
    const order = [...new Set([...Object.keys(names), ...seen])].filter((phase) => phase && seen.has(phase));
    let x = this.left;
    for (const phase of order) {
      const size = c.measureText(phase).width;
      if (x + size > this.canvas.clientWidth - 20) break;
      paint(phase, x, y + 21, 11, 11);
      this.text(phase, x + 16, y + 27, this.colour.muted);
      x += 34 + size;
    }
  }
  marks(c) {
    const { event, bytes: most } = this.now.peak;
    if (this.cursor !== null) { c.fillStyle = this.colour.ink; c.fillRect(this.pixel(this.cursor + 0.5), this.top - 4, 1, this.height + 26); }
    if (event < this.from || event >= this.to) return;
    const x = this.pixel(event + 0.5), y = this.y(this.now.total[event]), label = `peak ${bytes(most)}`, left = x + 12 + c.measureText(label).width > this.canvas.clientWidth;
    c.beginPath();
    c.arc(x, y, 4.5, 0, 7);
    Object.assign(c, { fillStyle: this.colour.ink, strokeStyle: this.colour.page, lineWidth: 2 });
    c.fill();
    c.stroke();
    c.textAlign = left ? "right" : "left";
    c.font = "bold " + c.font;
    this.text(label, x + (left ? -9 : 9), Math.max(y - 11, 9), this.colour.ink, this.colour.page);
    c.font = c.font.replace("bold ", "");
    c.textAlign = "left";
  }
}

// -- schedule ---------------------------------------------------------------------------------------

class Schedule extends Plot {
  constructor(data) {
    const raw = data.schedule;
    super($("streams"), 0, raw.end, raw.end / 1e6);
    Object.assign(this, { data, raw, left: 150, row: 34, tooltip: $("schedule-tooltip"), waits: raw.waits.map(data.column), chosen: 0 });
    this.rows = raw.rows.map((row) => ({ ...row, ...Object.fromEntries(["name", "phase", "module", "start", "end", "bytes"].map((key) => [key, data.column(row[key])])) }));
    this.canvas.style.height = `${this.rows.length * this.row + 30}px`;
    let waited = 0;
    for (let i = 0; i < this.waits[0].length; i++) waited += this.waits[1][i] - this.waits[0][i];
    $("schedule-summary").textContent = `${seconds(raw.end)} by a model of the machine; compute waits ${seconds(waited)} for communication (${Math.round(100 * waited / raw.end)}%).`;
    const phases = new Set(this.rows.filter((row) => row.stream === "compute").flatMap((row) => [...new Set(row.phase)].map((p) => data.strings[p])));
    $("schedule-key").append(...[...phases].filter(Boolean).map((phase) => make("span", {}, swatch(data.compute[phase] || data.compute[""]), phase)), ...(waited ? [make("span", {}, swatch("repeating-linear-gradient(135deg, #c00032 0 2px, #f8d3db 2px 5px)"), "compute waits for communication")] : []));
    $("schedule").hidden = false;
    this.range(0, raw.end);
  }
  changed() { Object.assign(this.canvas.dataset, { from: this.from, to: this.to }); this.canvas.setAttribute("aria-valuemin", 0); this.canvas.setAttribute("aria-valuemax", this.raw.end); this.canvas.setAttribute("aria-valuenow", this.from); }
  /** The first span of a row that ends after a time. */
  first(row, time) { let a = 0, b = row.end.length; while (a < b) { const m = (a + b) >> 1; if (row.end[m] <= time) a = m + 1; else b = m; } return a; }
  colourOf(row, i) {
    const { compute, streams } = this.data;
    if (row.stream === "compute") return compute[this.data.strings[row.phase[i]]] || compute[""];
    return streams[Object.keys(streams).find((kind) => kind && row.stream.includes(kind)) || ""];
  }
  paint() {
    if (!this.rows || !this.canvas.clientWidth) return;
    const c = this.begin(), bottom = this.rows.length * this.row, size = step(this.to - this.from, Math.max(this.width / 110, 2), 10);
    c.textAlign = "center";
    for (let t = Math.ceil(this.from / size) * size; t <= this.to; t += size) {
      c.fillStyle = this.colour.faint;
      c.fillRect(Math.round(this.pixel(t)), 0, 1, bottom + 5);
      this.text(this.label(t, size), this.pixel(t), bottom + 16, this.colour.muted);
    }
    c.textAlign = "left";
    this.rows.forEach((row, k) => this.bars(c, row, k * this.row + 4));
    this.hatch(c);
    if (this.cursor !== null) { c.fillStyle = this.colour.ink; c.fillRect(this.pixel(this.cursor), 0, 1, bottom + 4); }
    c.clearRect(0, 0, this.left - 1, bottom);
    this.rows.forEach((row, k) => { c.textAlign = "right"; this.text(row.stream, this.left - 10, (k + 0.5) * this.row, this.colour.ink); });
    c.textAlign = "left";
  }
  label(t, size) {
    const [name, unit] = this.raw.end >= 1 && size >= 0.1 ? ["s", 1] : size >= 1e-4 && this.raw.end >= 1e-3 ? ["ms", 1e-3] : size >= 1e-7 ? ["µs", 1e-6] : ["ns", 1e-9];
    return `${Number((t / unit).toFixed(Math.max(0, -Math.floor(Math.log10(size / unit) + 1e-9)))).toLocaleString("en", { maximumFractionDigits: 6 })} ${name}`;
  }
  /** What follows one another in the same pixels, in one colour, is one rectangle. */
  bars(c, row, y) {
    let x0 = -1, x1 = -1, colour = "", last = -1;
    const flush = () => {
      if (x0 < 0) return;
      c.fillStyle = colour;
      c.fillRect(x0, y, Math.max(x1 - x0, 1), this.row - 8);
      const name = last < 0 ? "" : this.data.strings[row.name[last]];
      if (name && x1 - x0 > 40 && c.measureText(name).width < x1 - x0 - 8) this.text(name, x0 + 4, y + this.row / 2 - 4, /^#(1|6)/.test(colour) ? "#fff" : "#1c1c1c");
    };
    for (let i = this.first(row, this.from); i < row.start.length && row.start[i] < this.to; i++) {
      const a = Math.max(this.pixel(row.start[i]), this.left), b = Math.min(this.pixel(row.end[i]), this.left + this.width), now = this.colourOf(row, i);
      if (x0 >= 0 && a - x1 < 1 && (now === colour && b - a < 3 || b - x0 < 1)) { x1 = Math.max(x1, b); last = -1; continue; }
      flush();
      [x0, x1, colour, last] = [a, now === colour && a - x1 < 1 && b - a > 6 ? b - 0.75 : b, now, i];
    }
    flush();
  }
  hatch(c) {
    const [starts, ends] = this.waits, y = 4, h = this.row - 8, k = this.rows.findIndex((row) => row.stream === "compute");
    if (k < 0) return;
    const stripes = document.createElement("canvas");
    stripes.width = stripes.height = 6;
    const s = stripes.getContext("2d");
    Object.assign(s, { fillStyle: "#f8d3db", strokeStyle: "#c00032", lineWidth: 1.3 });
    s.fillRect(0, 0, 6, 6);
    s.beginPath();
    for (const d of [-6, 0, 6]) { s.moveTo(d - 1, 7); s.lineTo(d + 7, -1); }
    s.stroke();
    c.fillStyle = c.createPattern(stripes, "repeat");
    let drawn = -1;
    for (let i = 0; i < starts.length; i++) {
      if (ends[i] <= this.from || starts[i] >= this.to) continue;
      const a = Math.max(this.pixel(starts[i]), this.left, drawn), b = Math.min(this.pixel(ends[i]), this.left + this.width);
      if (b <= a) continue;
      c.fillRect(a, k * this.row + y, b - a, h);
      drawn = b;
    }
  }
  hover(x, y) {
    const row = this.rows[Math.floor(y / this.row)];
    if (!row || x < this.left) return this.leave();
    const time = this.at(x), slack = (this.to - this.from) / this.width, i = this.first(row, time - slack);
    this.cursor = time;
    this.draw();
    if (i < row.start.length && row.start[i] <= time + slack) return this.tell(row, i, x, y);
    const wait = row.stream === "compute" && this.waits[0].findIndex((start, j) => start <= time && time < this.waits[1][j]);
    if (wait !== false && wait >= 0) return this.tip(this.tooltip, x, y, make("b", { textContent: `waits ${seconds(this.waits[1][wait] - this.waits[0][wait])} for communication` }));
    this.tooltip.hidden = true;
  }
  tell(row, i, x, y) {
    const s = this.data.strings, lines = [make("b", { textContent: s[row.name[i]] })];
    const add = (label, text) => { if (text) lines.push(make("div", {}, make("span", { textContent: label + " " }), text)); };
    add("module", s[row.module[i]]);
    add("phase", s[row.phase[i]]);
    add("from", `${seconds(row.start[i])}, for ${seconds(row.end[i] - row.start[i])}`);
    if (row.bytes[i]) add("sends", bytes(row.bytes[i]) + " per rank");
    this.canvas.setAttribute("aria-valuetext", lines.map((line) => line.textContent).join(", "));
    this.tip(this.tooltip, x, y, ...lines);
  }
  leave() { this.cursor = null; this.tooltip.hidden = true; this.draw(); }
  key(e) {
    const rows = { ArrowUp: -1, ArrowDown: 1 }[e.key], spans = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (!rows && !spans) return super.key(e);
    if (rows) this.chosen = Math.min(Math.max(this.chosen + rows, 0), this.rows.length - 1);
    const row = this.rows[this.chosen], now = this.cursor === null ? this.from : this.cursor;
    const i = Math.min(Math.max(this.first(row, now) + (spans && this.cursor !== null ? spans : 0), 0), row.start.length - 1), middle = (row.start[i] + row.end[i]) / 2;
    this.reveal(middle);
    this.cursor = middle;
    this.draw();
    this.tell(row, i, this.pixel(middle), (this.chosen + 0.5) * this.row);
    return true;
  }
}

// -- tables and facts -------------------------------------------------------------------------------

function shown(value, column) {
  if (typeof value !== "number") return value;
  const words = column.toLowerCase().split(/[\s_]+/);
  if (words.includes("bytes")) return bytes(value);
  return words.includes("seconds") ? seconds(value) : Number.isInteger(value) ? count(value) : value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

function tables(data) {
  $("tables").hidden = !data.tables.length;
  for (const table of data.tables) {
    const numbers = table.columns.map((_, i) => table.rows.length > 0 && table.rows.every((row) => typeof row[i] === "number" || row[i] === ""));
    const cell = (tag, i, textContent, title = "") => make(tag, { textContent, title, className: numbers[i] ? "number" : "" });
    const head = make("tr", {}, ...table.columns.map((name, i) => Object.assign(cell("th", i, name), { scope: "col" })));
    const rows = table.rows.map((row) => make("tr", {}, ...row.map((value, i) => cell("td", i, shown(value, table.columns[i]), typeof value === "number" ? count(value) : ""))));
    $("tables").append(make("h2", { textContent: table.title }), ...(table.note ? [make("p", { textContent: table.note })] : []), make("div", { className: "scroll" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows))));
  }
}

function facts(data) {
  $("facts").hidden = !data.facts.length;
  $("facts").querySelector("dl").append(...data.facts.flatMap(([key, value]) => [make("dt", { textContent: key }), make("dd", { textContent: shown(value, key) })]));
}

load().then((data) => {
  tables(data);
  facts(data);
  if (data.timelines.length) new Memory(data);
  if (data.schedule) new Schedule(data);
  $("loading").remove();
  document.documentElement.dataset.ready = "yes";
}).catch((error) => {
  $("loading").textContent = `This page cannot be shown: ${error.message}. It needs a browser of 2023 or newer.`;
  throw error;
});
})();
