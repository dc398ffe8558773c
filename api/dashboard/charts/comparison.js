/* Curves of runs over each other, and the tables of what came of them: on the dashboard's page, and in a file that stands alone.
 *
 *    tables (keys, runs, settings) ──▶ results, runs        curvesOf(metric, by, fold) ──▶ one line for each, with its interval
 */

import uPlot from "../vendor/uPlot.js";
import { announce, element, say } from "../element.js";
import { count, number } from "../format.js";
import { Table } from "../charts/table.js";
import { INCREMENTS, colour, smooth } from "../charts/charts.js";

const COLOURS = ["series-1", "series-2", "stage-reward", "stage-sync", "stage-evaluation", "stage-advantage", "series-bound"];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const DASH_WORDS = ["", "dashed", "dotted", "dash-dotted"];
const MOST_PLACES = 1000; // of curves that do not share their x
const GRID = 400; // places that stand for them
const AXES = { step: "step", tokens: "tokens trained", hours: "hours of steps" };
const SPOKEN = 5; // curves that are read out

/** A value of a recipe in a few letters. */
export function brief(value) {
  if (value === null || value === undefined) return "–";
  const text = typeof value === "number" ? number(value, 4) : typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 40 ? `…${text.slice(-39)}` : text;
}

/** The values by which a setting differs from the others. */
export function settingName(setting, runs) {
  const parts = Object.entries(setting.recipe).map(([key, value]) => `${key.split(".").at(-1)} ${brief(value)}`);
  const name = runs.find((run) => run.id === setting.runs[0])?.name ?? setting.runs[0];
  return parts.length && parts.length <= 4 ? parts.join(", ") : parts.length ? `${name}: ${parts.slice(0, 3).join(", ")}, …` : name;
}

/** The curves at common places: [x, [y, half], …]; as they are where they share them, or else between their points. */
export function aligned(curves) {
  const places = [...new Set(curves.flatMap((curve) => curve.x))].sort((one, other) => one - other);
  if (places.length <= MOST_PLACES) {
    const at = new Map(places.map((place, index) => [place, index]));
    const spread = (curve, values) => {
      const column = new Array(places.length).fill(null);
      values?.forEach((value, index) => (column[at.get(curve.x[index])] = value));
      return column;
    };
    return [places, curves.map((curve) => [spread(curve, curve.y), spread(curve, curve.half)])];
  }
  const [low, high] = [places[0], places.at(-1)];
  const grid = Array.from({ length: GRID }, (_, index) => low + ((high - low) * index) / (GRID - 1));
  return [grid, curves.map((curve) => [between(curve.x, curve.y, grid), curve.half ? between(curve.x, curve.half, grid) : grid.map(() => null)])];
}

function between(x, y, grid) {
  let at = 0;
  return grid.map((place) => {
    if (!x.length || place < x[0] || place > x.at(-1)) return null;
    while (at < x.length - 2 && x[at + 1] < place) at += 1;
    if (x.length === 1 || x[at + 1] === x[at]) return y[at];
    if (y[at] === null || y[at + 1] === null) return null;
    return y[at] + ((y[at + 1] - y[at]) * (place - x[at])) / (x[at + 1] - x[at]);
  });
}

/** Curves with a legend that switches each on and off. */
class Curves {
  constructor() {
    this.hidden = new Set();
    this.span = 1;
    this.plot = element("div", {
      class: "plot",
      role: "img",
      tabindex: "0",
      "aria-label": "Curves",
      on: { keydown: (event) => this.key(event), blur: () => this.drawn?.setCursor({ left: -10, top: -10 }) },
    });
    this.empty = element("p", { class: "plot-empty", hidden: true }, "no value yet");
    this.at = element("span", { class: "at small" });
    this.legend = element("ul", { class: "legend", tabindex: "0", "aria-label": "Curves" });
    this.element = element("div", { class: "curves" }, element("div", { class: "curves-plot" }, this.plot, this.empty, this.at), this.legend);
    this.sizes = new ResizeObserver(() => this.fit());
    this.sizes.observe(this.plot);
  }

  get height() {
    return this.plot.clientWidth < 500 ? 240 : 340;
  }

  /** `lines`: [{id, name}] of the `curves`. */
  show({ lines, curves, metric, by }) {
    Object.assign(this, { lines, curves, metric, by });
    this.readings = lines.map(() => element("span", { class: "value" }));
    this.legend.replaceChildren(
      ...lines.map((line, at) => {
        const style = Math.floor(at / COLOURS.length) % DASHES.length;
        const mark = element("i", { class: DASH_WORDS[style] || null, "aria-hidden": "true", set: { style: `color: var(--${COLOURS[at % COLOURS.length]})` } });
        const button = element(
          "button",
          {
            type: "button",
            class: "plain",
            title: line.title ?? line.name,
            "aria-pressed": String(!this.hidden.has(line.id)),
            on: { click: () => this.toggle(line.id, button), mouseenter: () => this.focus(at), mouseleave: () => this.focus(null), focus: () => this.focus(at), blur: () => this.focus(null) },
          },
          mark,
          element("span", { class: "name" }, line.name),
          this.readings[at],
        );
        return element("li", {}, button);
      }),
    );
    this.draw();
  }

  toggle(id, button) {
    if (!this.hidden.delete(id)) this.hidden.add(id);
    button.setAttribute("aria-pressed", String(!this.hidden.has(id)));
    this.draw();
  }

  focus(at) {
    if (!this.drawn || this.shown.length < 2) return;
    const place = at === null ? -1 : this.shown.indexOf(at);
    this.drawn.setSeries(place < 0 ? null : 1 + 3 * place, { focus: place >= 0 });
  }

  fit() {
    const width = this.plot.clientWidth;
    if (this.drawn && width && width !== this.drawn.width) this.drawn.setSize({ width, height: this.height });
    else if (!this.drawn && width && this.curves) this.draw();
  }

  draw() {
    this.drawn?.destroy();
    this.drawn = null;
    if (!this.curves) return;
    this.shown = this.lines.map((_, at) => at).filter((at) => !this.hidden.has(this.lines[at].id) && this.curves[at].x.length);
    this.empty.hidden = this.shown.length > 0;
    this.plot.setAttribute("aria-label", this.words());
    const width = this.plot.clientWidth;
    if (!width || !this.shown.length) return;
    const [places, columns] = aligned(this.shown.map((at) => this.curves[at]));
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: colour("muted"), font, ticks: { show: false }, grid: { stroke: colour("grid"), width: 1 } };
    const data = [places];
    const series = [{}];
    const bands = [];
    this.shown.forEach((at, place) => {
      const [values, halves] = columns[place];
      const stroke = colour(COLOURS[at % COLOURS.length]);
      const mean = this.span > 1 ? smooth(values, this.span).map((value, index) => (values[index] === null ? null : value)) : values;
      const edge = (sign) => mean.map((value, index) => (value === null || halves[index] === null ? null : value + sign * halves[index]));
      data.push(mean, edge(1), edge(-1));
      const shape = { spanGaps: true, stroke, dash: DASHES[Math.floor(at / COLOURS.length) % DASHES.length] };
      const points = { show: values.filter((value) => value !== null).length === 1, size: 6, fill: stroke };
      series.push({ ...shape, width: this.shown.length > 30 ? 1 : 1.75, points }, ...[1, 2].map(() => ({ ...shape, width: 0, points: { show: false } })));
      bands.push({ series: [series.length - 2, series.length - 1], fill: `${stroke}2b` });
    });
    const [low, high] = data.slice(1).flat().reduce(([least, most], value) => (value === null ? [least, most] : [Math.min(least, value), Math.max(most, value)]), [Infinity, -Infinity]);
    const room = high > low ? 0.05 * (high - low) : Math.abs(low) / 2 || 0.5;
    const short = (value) => (this.by === "hours" ? number(value, 3) : count(value));
    this.drawn = new uPlot(
      {
        width,
        height: this.height,
        padding: [10, 14, 0, 0],
        legend: { show: false },
        scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: [low - room, high + room] } },
        axes: [
          { ...axis, ...(this.by === "hours" ? {} : { incrs: INCREMENTS }), size: 26, gap: 4, space: 64, values: (u, values) => values.map(short) },
          { ...axis, size: 56, gap: 4, space: 32, values: (u, values) => values.map((value) => number(value, 3)) },
        ],
        focus: { alpha: 0.2 },
        cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
        hooks: { setCursor: [(u) => this.read(u.cursor.idx)] },
        series,
        bands,
      },
      data,
      this.plot,
    );
    this.read(null);
  }

  read(index) {
    const at = index ?? null;
    say(this.at, at === null ? `${AXES[this.by]} →` : `${AXES[this.by]} ${this.by === "hours" ? number(this.drawn.data[0][at]) : count(this.drawn.data[0][at])}`);
    this.readings.forEach((reading, line) => {
      const place = this.shown.indexOf(line);
      const values = place < 0 ? [] : this.drawn.data[1 + 3 * place];
      say(reading, place < 0 ? "" : number(at === null ? values.findLast((value) => value !== null) : values[at], 3));
    });
  }

  key(event) {
    const last = (this.drawn?.data[0].length ?? 0) - 1;
    const now = this.drawn?.cursor.idx ?? last;
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    const index = Math.min(last, Math.max(0, to));
    this.drawn.setCursor({ left: this.drawn.valToPos(this.drawn.data[0][index], "x"), top: 10 });
    announce(this.words(index));
  }

  /** The curves in a sentence, the highest first: at one place, or at their ends. */
  words(index = null) {
    const ends = this.shown
      .map((at, place) => {
        const values = index === null ? this.curves[at].y : [this.drawn.data[1 + 3 * place][index]];
        return [this.lines[at].name, values.findLast((value) => value !== null)];
      })
      .filter(([, value]) => value !== undefined && value !== null)
      .sort((one, other) => other[1] - one[1]);
    const where = index === null ? "at their ends" : `at ${AXES[this.by]} ${number(this.drawn.data[0][index])}`;
    const more = ends.length > SPOKEN ? `, and ${ends.length - SPOKEN} more` : "";
    return `${this.metric}, ${this.shown.length} curves, ${where}: ${ends.slice(0, SPOKEN).map(([name, value]) => `${name} ${number(value)}`).join("; ")}${more}.`;
  }

  destroy() {
    this.sizes.disconnect();
    this.drawn?.destroy();
  }
}

const estimated = (known) => (known ? `${number(known.mean, 4)}${known.half === null || known.half === undefined ? "" : ` ± ${number(known.half, 2)}`}` : "–");

export class Comparison {
  /** `load({metric, by, fold})` gives the tables with the curves; `chosen` is what is shown first, `metrics` what can be; `onChange`
   * is called with what is shown then; `link(run)` is where a run is, "" without one. */
  constructor({ load, metrics, chosen, onChange = () => {}, link = () => "" }) {
    Object.assign(this, { load, chosen, onChange, link, turn: 0 });
    this.curves = new Curves();
    this.metric = element("select", { id: "compare-metric", on: { change: () => this.change({ metric: this.metric.value }) } });
    this.offer(metrics);
    this.smoothing = element(
      "select",
      { id: "compare-smooth", on: { change: () => ((this.curves.span = Number(this.smoothing.value)), this.curves.draw()) } },
      [1, 5, 15, 41].map((span) => element("option", { value: String(span) }, span === 1 ? "as measured" : `mean of ${span} points`)),
    );
    this.fold = element("input", { type: "checkbox", set: { checked: chosen.fold }, on: { change: () => this.change({ fold: this.fold.checked }) } });
    this.folding = element("label", { class: "check" }, this.fold, " Seeds as one curve");
    const axes = Object.keys(AXES).map((axis) =>
      element("label", {}, element("input", { type: "radio", name: "compare-by", value: axis, set: { checked: axis === chosen.by }, on: { change: () => this.change({ by: axis }) } }), element("span", {}, axis)),
    );
    this.note = element("p", { class: "wrong", role: "alert", hidden: true });
    this.settings = element("div");
    this.runs = element("div");
    this.count = element("span", { class: "count" });
    this.element = element(
      "div",
      { class: "stack comparison" },
      element(
        "section",
        { class: "card", "aria-label": "Curves" },
        element(
          "div",
          { class: "controls" },
          element("label", { class: "field", for: "compare-metric" }, element("span", {}, "Metric"), this.metric),
          element("fieldset", { class: "segments" }, element("legend", { class: "hidden" }, "Over"), axes),
          element("label", { class: "field", for: "compare-smooth" }, element("span", {}, "Line"), this.smoothing),
          this.folding,
        ),
        this.note,
        this.curves.element,
      ),
      element("section", { class: "card", "aria-labelledby": "compare-settings" }, element("h2", { id: "compare-settings" }, "Settings, seeds folded"), this.settings),
      element("section", { class: "card", "aria-labelledby": "compare-runs" }, element("h2", { id: "compare-runs" }, "Runs ", this.count), this.runs),
    );
  }

  offer(metrics) {
    const names = [...new Set([this.chosen.metric, ...metrics])];
    this.metric.replaceChildren(...names.map((name) => element("option", { value: name, set: { selected: name === this.chosen.metric } }, name)));
  }

  change(change) {
    this.chosen = { ...this.chosen, ...change };
    this.onChange(this.chosen);
    return this.show();
  }

  async show() {
    const turn = (this.turn += 1);
    let data;
    try {
      data = await this.load(this.chosen);
    } catch (problem) {
      if (turn !== this.turn) return;
      this.note.hidden = false;
      say(this.note, problem.message);
      return;
    }
    if (turn !== this.turn) return;
    this.note.hidden = true;
    const { metric, by, fold } = this.chosen;
    const { runs, settings, keys, curves } = data;
    this.folding.hidden = settings.length === runs.length;
    const names = settings.map((setting) => settingName(setting, runs));
    const several = new Set(runs.map((run) => run.setting)).size < runs.length;
    const lines = fold
      ? settings.map((setting, at) => ({ id: `setting ${at}`, name: names[at] }))
      : runs.map((run) => ({ id: run.id, name: settings.length > 1 && keys.length ? `${names[run.setting]}${several ? `, seed ${run.seed}` : ""}` : run.id, title: run.id }));
    this.curves.show({ lines, curves, metric, by });
    say(this.count, String(runs.length));
    this.settings.replaceChildren(this.settingTable(data, names));
    this.runs.replaceChildren(this.runTable(data));
  }

  settingTable({ settings, keys, metrics }, names) {
    const rows = settings.map((setting, at) => ({ id: String(at), name: names[at], ...setting }));
    const table = new Table({
      label: "Settings",
      columns: [
        { key: "name", head: "setting", left: true, names: true, value: (row) => row.name, cell: (row) => (keys.length ? `${Number(row.id) + 1}` : row.name) },
        ...keys.map((key) => ({ key, head: key, left: true, value: (row) => row.recipe[key], cell: (row) => brief(row.recipe[key]) })),
        { key: "runs", head: "runs", value: (row) => row.runs.length, cell: (row) => String(row.runs.length) },
        ...metrics.flatMap((metric) =>
          ["end", "best"].map((which) => ({ key: `${metric} ${which}`, head: `${metric} ${which}`, value: (row) => row.results[metric]?.[which]?.mean, cell: (row) => estimated(row.results[metric]?.[which]) })),
        ),
        ...["steps", "tokens", "hours"].map((key) => ({ key, head: key, value: (row) => row[key]?.mean, cell: (row) => (row[key] ? (key === "hours" ? number(row[key].mean) : count(row[key].mean)) : "–") })),
      ],
    });
    table.fill(rows);
    return table.element;
  }

  runTable({ runs, metrics }) {
    const table = new Table({
      label: "Runs",
      columns: [
        { key: "id", head: "run", left: true, names: true, value: (row) => row.id, cell: (row) => (this.link(row) ? element("a", { href: this.link(row) }, row.id) : row.id) },
        { key: "state", head: "state", left: true, value: (row) => row.state, cell: (row) => row.state },
        { key: "setting", head: "setting", value: (row) => row.setting, cell: (row) => String(row.setting + 1) },
        { key: "seed", head: "seed", value: (row) => row.seed, cell: (row) => brief(row.seed) },
        ...metrics.flatMap((metric) => ["end", "best"].map((which) => ({ key: `${metric} ${which}`, head: `${metric} ${which}`, value: (row) => row.results[metric]?.[which], cell: (row) => number(row.results[metric]?.[which], 4) }))),
        { key: "steps", head: "steps", value: (row) => row.steps, cell: (row) => count(row.steps) },
        { key: "tokens", head: "tokens", value: (row) => row.tokens, cell: (row) => count(row.tokens) },
        { key: "hours", head: "hours", value: (row) => row.hours, cell: (row) => number(row.hours) },
        { key: "tags", head: "tags", left: true, value: (row) => row.tags.join(" "), cell: (row) => row.tags.join(" ") },
        { key: "notes", head: "notes", left: true, value: (row) => row.notes, cell: (row) => element("span", { class: "note", title: row.notes }, row.notes) },
      ],
    });
    table.fill(runs);
    return table.element;
  }

  restyle() {
    this.curves.draw();
  }

  destroy() {
    this.curves.destroy();
  }
}

/** Show a comparison in a file of its own, where all curves are in `data`. */
export function showAlone(data) {
  const load = async ({ metric, by, fold }) => ({ ...data, curves: data.curves[`${metric} ${by} ${fold ? "settings" : "runs"}`] });
  const folded = data.settings.length < data.runs.length;
  const comparison = new Comparison({ load, metrics: data.metrics, chosen: { metric: data.metrics[0], by: data.by, fold: folded } });
  document.getElementById("main").replaceChildren(element("div", { class: "page" }, element("h1", {}, `${data.runs.length} runs, ${data.settings.length} settings`), comparison.element));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => comparison.restyle());
  return comparison.show();
}
