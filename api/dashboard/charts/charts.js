/* Line charts over the steps of a run, drawn by uPlot. Each is a figure with its newest figures in words, and the same data as a
 * table for users who cannot see it. The pointer (or the arrow keys, when a chart has the focus) reads all charts at one step. */

import uPlot from "../vendor/uPlot.js";
import { announce, element, say } from "../element.js";
import { number } from "../format.js";

const HEIGHT = 148;
export const INCREMENTS = [1, 10, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000].flatMap((unit) => [unit, 2 * unit, 5 * unit]); // between labels, in steps
const TABLE_ROWS = 50; // newest steps in the table

const steps = (value) => value.toLocaleString("en");

/** A colour of dashboard.css, `light-dark(#…, #…)` there; "" for a name that is not in it. Canvases take no functions of CSS. */
export function colour(name) {
  const [light = "", dark = light] = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).match(/#\w+/g) ?? [];
  return matchMedia("(prefers-color-scheme: dark)").matches ? dark : light;
}

/** Pixels of the widest of `texts` in `font` on the canvas `pen`, whose place in the page determines the width of digits. */
function widest(pen, font, texts) {
  if (!pen) return 0;
  pen.save();
  pen.font = font;
  const wide = Math.max(0, ...texts.map((text) => Math.ceil(pen.measureText(text).width)));
  pen.restore();
  return wide;
}

/** A centred moving average over `span` values; missing ones are left out. */
export function smooth(values, span) {
  const half = Math.floor(span / 2);
  return values.map((_, at) => {
    const near = values.slice(Math.max(0, at - half), at + half + 1).filter((value) => value !== null && Number.isFinite(value));
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
}

export class Chart {
  /** `series`: [{label, colour, format, dash, width, points, stepped, hushed, optional, overall}]; a hushed one is drawn but not read out, an
   * optional one is not spoken of while it has no value. `overall`: what is read where no step is pointed at; null: the newest value.
   * `floor`: whether the scale begins at zero. */
  constructor({ title, note = "", series, floor = false, format = (value) => number(value, 2) }) {
    Object.assign(this, { title, series, floor, format });
    this.data = [[], ...series.map(() => [])];
    this.id = `chart-${title.toLowerCase().replaceAll(/\W+/g, "-")}`;
    this.readings = series.map((one) => (one.hushed ? null : element("span", { class: "value" }, "–")));
    this.keys = series.map((one, at) =>
      one.hushed
        ? null
        : element("span", { class: `key${one.dash ? " dashed" : ""}` }, element("i", { set: { style: `color: var(--${one.colour})` } }), `${one.label} `, this.readings[at]),
    );
    this.at = element("span", { class: "at" });
    this.plot = element("div", {
      class: "plot",
      role: "img",
      tabindex: "0",
      "aria-labelledby": `${this.id}-title`,
      "aria-describedby": `${this.id}-says`,
      on: { keydown: (event) => this.key(event), blur: () => this.readAt(null) },
    });
    this.empty = element("p", { class: "plot-empty" }, "no step yet");
    this.plot.append(this.empty);
    this.marks = []; // [{step, text}]: alarms
    this.alarm = element("p", { class: "alarm-says", hidden: true });
    this.says = element("p", { class: "hidden", id: `${this.id}-says` });
    this.table = element("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": `${title}, as a table` });
    this.asTable = element(
      "details",
      { class: "as-table", on: { toggle: () => this.tabulate() } },
      element("summary", {}, "Table", element("span", { class: "hidden" }, ` of ${title}`)),
      this.table,
    );
    this.element = element(
      "figure",
      { class: "card chart", "aria-labelledby": `${this.id}-title` },
      element(
        "figcaption",
        {},
        element("div", { class: "chart-head" }, element("h3", { id: `${this.id}-title` }, title), note ? element("span", { class: "note" }, note) : null, this.at),
        element("div", { class: "keys" }, this.keys),
      ),
      this.plot,
      this.alarm,
      this.says,
      this.asTable,
    );
    this.sizes = new ResizeObserver(() => this.fit());
    this.sizes.observe(this.plot);
  }

  destroy() {
    this.sizes.disconnect();
    this.drawn?.destroy();
  }

  /** `columns`: one list for each series; `marks`: alarms at steps, [{step, text}]. */
  update(steps, columns, marks = []) {
    this.data = [steps, ...columns];
    this.marks = marks;
    if (!steps.length) return;
    const measured = columns.some((values) => values.some((value) => Number.isFinite(value)));
    this.empty.hidden = measured;
    say(this.empty, "not measured in this run");
    if (!measured && !this.drawn) return;
    this.series.forEach((one, at) => {
      if (one.optional) this.keys[at].hidden = columns[at].every((value) => value === null);
    });
    if (this.drawn) this.drawn.setData(this.data);
    else this.draw();
    if (this.drawn && this.drawn.cursor.idx == null) this.read(steps.length - 1, false);
    say(this.says, this.words());
    this.tabulate();
  }

  /** Draw again, after the colours have changed. */
  restyle() {
    this.drawn?.destroy();
    this.drawn = null;
    if (this.data[0].length && this.empty.hidden) this.draw();
  }

  fit() {
    const width = this.plot.clientWidth;
    if (this.drawn && width && width !== this.drawn.width) this.drawn.setSize({ width, height: HEIGHT });
    else if (!this.drawn && width && this.data[0].length && this.empty.hidden) this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (!width) return;
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: colour("muted"), font, ticks: { show: false }, grid: { stroke: colour("grid"), width: 1 } };
    const series = this.series.map((one) => {
      const stroke = colour(one.colour);
      return {
        stroke,
        width: one.points ? 0 : (one.width ?? 2),
        dash: one.dash,
        alpha: one.hushed ? 0.35 : 1,
        spanGaps: true,
        paths: one.stepped ? uPlot.paths.stepped({ align: 1 }) : one.points ? () => null : undefined,
        points: one.points ? { show: true, size: 7, fill: colour("surface"), stroke, width: 2 } : { show: (u) => u.data[0].length === 1, size: 5, fill: stroke },
      };
    });
    this.drawn = new uPlot(
      {
        width,
        height: HEIGHT,
        // Half of a label of the last step may stand to the right of it.
        padding: [8, (u) => Math.max(6, Math.ceil(widest(u.ctx, font, [steps(this.data[0].at(-1))]) / 2) + 1), 0, 0],
        legend: { show: false },
        scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: (u, low, high) => this.range(low, high) } },
        axes: [
          { ...axis, size: 24, gap: 4, space: 64, incrs: INCREMENTS, values: (u, values) => values.map(steps) },
          { ...axis, size: (u, labels) => Math.max(46, widest(u.ctx, font, labels ?? []) + 6), gap: 4, space: 28, values: (u, values) => this.labels(values) },
        ],
        cursor: { sync: { key: "run" }, y: false, drag: { x: false, y: false }, points: { size: 7 } },
        hooks: { draw: [(u) => this.mark(u)], setCursor: [(u) => this.read(u.cursor.idx ?? this.data[0].length - 1, u.cursor.idx != null)] },
        series: [{}, ...series],
      },
      this.data,
      this.plot,
    );
  }

  /** Put the marks over the drawing, each where its step is. */
  mark(u) {
    for (const old of [...u.over.querySelectorAll(".mark")]) old.remove();
    for (const { step, text } of this.marks) {
      const left = u.valToPos(Math.max(step, this.data[0][0]), "x");
      u.over.append(element("i", { class: "mark", title: text, set: { style: `left: ${left}px` } }));
    }
  }

  /** The labels of an axis, with as many digits as they differ by. */
  labels(values) {
    let texts = values.map((value) => this.format(value));
    for (let digits = 3; digits < 9 && new Set(texts).size < texts.length; digits += 1) texts = values.map((value) => number(value, digits));
    return texts;
  }

  range(low, high) {
    if (low === null || !Number.isFinite(low)) return [0, 1];
    if (this.floor) low = Math.min(0, low);
    if (high === low) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
    const room = 0.08 * (high - low);
    return [this.floor && low === 0 ? 0 : low - room, high + room];
  }

  read(at, pointed) {
    const step = this.data[0][at];
    say(this.at, pointed && step !== undefined ? `step ${step}` : "");
    // Several steps may share a place in a long run.
    const texts = this.marks.filter((one) => pointed && one.step <= step && one.step > (this.data[0][at - 1] ?? -1)).map((one) => one.text);
    this.alarm.hidden = !texts.length;
    say(this.alarm, texts.join(" "));
    this.readings.forEach((reading, which) => {
      if (!reading) return;
      const values = this.data[which + 1];
      // A number that not every step has: its newest value up to there.
      let from = at;
      while (from > 0 && (values[from] === null || values[from] === undefined)) from -= 1;
      const { format = this.format, overall } = this.series[which];
      say(reading, format((pointed ? null : overall?.()) ?? values[from]));
    });
  }

  key(event) {
    const last = this.data[0].length - 1;
    const now = this.drawn?.cursor.idx ?? last;
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last, Escape: null }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.readAt(to === null ? null : Math.min(last, Math.max(0, to)));
  }

  readAt(index) {
    if (!this.drawn) return;
    const left = index === null ? -10 : this.drawn.valToPos(this.data[0][index], "x");
    this.drawn.setCursor({ left, top: index === null ? -10 : 10 });
    if (index !== null) announce(this.words(index));
  }

  /** The chart in a sentence: at one step, or the newest with its range. */
  words(index) {
    const at = index ?? this.data[0].length - 1;
    const parts = this.series.flatMap((one, which) => {
      if (one.hushed) return [];
      const format = one.format ?? this.format;
      const values = this.data[which + 1].filter((value) => value !== null && Number.isFinite(value));
      if (!values.length) return [];
      const range = index === undefined && !one.dash ? ` (from ${format(Math.min(...values))} to ${format(Math.max(...values))} so far)` : "";
      const mean = index === undefined ? (one.overall?.() ?? null) : null;
      return [`${one.label} ${mean === null ? format(this.data[which + 1][at]) : `${format(mean)} on average`}${range}`];
    });
    const marks = this.marks.filter((one) => index === undefined || one.step === this.data[0][at]).map((one) => ` ${one.text}`);
    return `${this.title} at step ${this.data[0][at]}: ${parts.join(", ")}.${marks.join("")}`;
  }

  tabulate() {
    if (!this.asTable.open) return;
    const shown = this.series.map((one, which) => [one, this.data[which + 1]]).filter(([one], which) => !one.hushed && !this.keys[which].hidden);
    const rows = this.data[0].slice(-TABLE_ROWS).map((step, at, all) => {
      const index = this.data[0].length - all.length + at;
      const cells = shown.map(([one, values]) => element("td", {}, (one.format ?? this.format)(values[index])));
      return element("tr", {}, element("th", { scope: "row" }, String(step)), cells);
    });
    this.table.replaceChildren(
      element(
        "table",
        {},
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "step"), shown.map(([one]) => element("th", { scope: "col" }, one.label)))),
        element("tbody", {}, rows.reverse()),
      ),
    );
  }
}
