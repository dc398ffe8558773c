/* Models that clients of the training calls train: all of a token, and one with its steps. Each is asked for again every two seconds
 * while the page is seen; of a model's steps only the new ones. */

import { Chart } from "../charts/charts.js";
import { element, say } from "../element.js";
import { ago, count, number, percent } from "../format.js";
import { setState, stateBadge } from "./runs.js";
import { table } from "./details.js";

const SECONDS = 2;
const PAGE = 100;

const address = (id) => `#/models/${encodeURIComponent(id)}`;
const size = ({ rank }) => (rank ? `adapter of rank ${rank}` : "all weights");
const per = (part, whole) => (whole ? part / whole : null);
const note = () => element("p", { class: "quiet", role: "status" });

/** Asks again and again; `onConnection` is told whether answers come. */
class Polled {
  constructor(service, onConnection) {
    Object.assign(this, { service, onConnection, timer: 0, gone: false });
    this.seen = () => !document.hidden && this.timer && this.load();
    document.addEventListener("visibilitychange", this.seen);
  }

  destroy() {
    this.gone = true;
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.seen);
    this.onConnection("", "");
  }

  async load() {
    clearTimeout(this.timer);
    this.timer = 0;
    try {
      await this.ask();
      if (!this.gone) this.onConnection("live", "");
    } catch (problem) {
      if (this.gone || problem.status === 401) return;
      this.onConnection("waiting", problem.message);
      this.refused(problem);
    }
    if (!this.gone) this.timer = setTimeout(() => !document.hidden && this.load(), SECONDS * 1000);
  }

  refused() {}
}

export class ModelsPage extends Polled {
  constructor(service, onConnection) {
    super(service, onConnection);
    this.title = element("h1", { tabindex: "-1" }, "Models in training");
    this.note = note();
    this.body = element("tbody");
    this.rows = new Map();
    this.table = table("Models in training", ["model", "state", "base", "trained", "steps", "waiting", "last call"], this.body);
    this.table.hidden = true;
    this.more = element("button", { type: "button", hidden: true, on: { click: () => this.grow() } }, "Older models");
    this.limit = PAGE;
    this.element = element("div", { class: "page" }, element("section", { class: "card models" }, element("div", { class: "card-head" }, this.title), this.note, this.table, this.more));
    document.title = "Models – AsyncDock";
  }

  grow() {
    this.limit += PAGE;
    return this.load();
  }

  async ask() {
    const { models, total } = await this.service.json("tinker/models", { query: { limit: Math.min(1000, this.limit) } });
    if (this.gone) return;
    say(this.note, models.length ? "" : "No model yet. A program with Tinker's client makes one; its key is the token that you have signed in with.");
    this.note.hidden = models.length > 0;
    this.table.hidden = !models.length;
    this.more.hidden = total <= models.length || this.limit >= 1000;
    const rows = models.map((model) => this.row(model));
    const held = document.activeElement;
    if (rows.some((row, at) => this.body.children[at] !== row) || rows.length !== this.body.children.length) this.body.replaceChildren(...rows);
    if (held !== document.activeElement && rows.some((row) => row.contains(held))) held.focus();
  }

  refused(problem) {
    this.note.hidden = false;
    say(this.note, problem.message);
  }

  row(model) {
    let row = this.rows.get(model.model_id);
    if (!row) {
      row = { state: stateBadge(), cells: Array.from({ length: 5 }, () => element("td")) };
      const link = element("a", { href: address(model.model_id) }, element("code", {}, model.model_id));
      row.element = element("tr", {}, element("th", { scope: "row" }, link), element("td", {}, row.state), row.cells);
      this.rows.set(model.model_id, row);
    }
    setState(row.state, model.failed ? "failed" : model.waiting ? "running" : "idle");
    const values = [model.base, size(model.options), count(model.steps), count(model.waiting), ago(model.last_request, this.service.now)];
    values.forEach((value, at) => say(row.cells[at], value));
    return row.element;
  }
}

export class ModelPage extends Polled {
  constructor(service, id, onConnection) {
    super(service, onConnection);
    this.id = id;
    this.steps = [];
    this.title = element("h1", { tabindex: "-1" }, "Model");
    this.state = stateBadge();
    this.what = element("p", { class: "quiet id" }, id);
    this.note = note();
    const tile = (label) => {
      const [value, more] = [element("span", { class: "value" }, "–"), element("span", { class: "more" })];
      return { element: element("div", { class: "tile" }, element("dt", {}, label), element("dd", {}, value, more)), value, more };
    };
    this.tiles = { steps: tile("Steps"), loss: tile("Loss per token"), tokens: tile("Tokens of the loss"), staleness: tile("Staleness"), newest: tile("By the newest weights"), waiting: tile("Waiting") };
    const head = element(
      "header",
      { class: "card run-head" },
      element("div", { class: "run-title" }, element("div", {}, element("div", { class: "line" }, this.title, this.state), this.what), element("a", { class: "button", href: "#/models" }, "All models")),
      this.note,
      element("dl", { class: "tiles" }, Object.values(this.tiles).map((each) => each.element)),
    );
    this.charts();
    const grid = element("section", { class: "charts", "aria-label": "Charts" }, element("h2", { class: "hidden" }, "Charts"), this.plots.map(({ chart }) => chart.element));
    this.element = element("div", { class: "page" }, head, grid);
  }

  destroy() {
    super.destroy();
    for (const { chart } of this.plots) chart.destroy();
  }

  restyle() {
    for (const { chart } of this.plots) chart.restyle();
  }

  charts() {
    // `of`: the name of a step's number, or a function of a step and the one before.
    const line = (label, of, colour, more = {}) => ({ label, of: typeof of === "string" ? (step) => step[of] : of, colour: `series-${colour}`, ...more });
    const plot = (title, series, options = {}) => ({ chart: new Chart({ title, series, ...options }), series });
    const thin = { width: 1.5 };
    const seconds = (step, before) => before && per(step.time - before.time, step.number - before.number);
    this.plots = [
      plot("Loss", [line("per token", (step) => per(step.loss, step.trained_tokens), 1, { format: (value) => number(value, 3) })]),
      plot("Tokens", [line("in passes", "tokens", 1), line("of the loss", "trained_tokens", 2, thin), line("sampled", "sampled_tokens", 2, { ...thin, dash: [4, 3] })], { note: "each step", floor: true, format: count }),
      plot("Gradient norm", [line("before clipping", "grad_norm", 1)], { floor: true }),
      plot("Learning rate", [line("learning rate", "learning_rate", 1)], { floor: true }),
      plot("Staleness", [line("max", "staleness_max", 2, { ...thin, stepped: true }), line("mean", "staleness_mean", 1)], { note: "steps, where known", floor: true }),
      plot("Sampled by the newest weights", [line("share of tokens", (step) => per(step.sampled_newest, step.sampled_tokens), 1)], { floor: true }),
      plot("Queue", [line("calls", "waiting", 1), line("samples of the session", "waiting_samples", 2, thin)], { note: "waiting at the step", floor: true }),
      plot("Seconds per step", [line("step", seconds, 1)], { floor: true }),
    ];
  }

  async ask() {
    const { model, steps } = await this.service.json(`tinker/models/${encodeURIComponent(this.id)}/steps`, { query: { after: this.steps.at(-1)?.number ?? 0 } });
    if (this.gone) return;
    this.note.hidden = true;
    this.steps.push(...steps);
    this.summary(model);
    if (steps.length) this.draw();
  }

  refused(problem) {
    this.note.hidden = false;
    say(this.note, problem.message);
  }

  draw() {
    const { steps } = this;
    // A model whose weights were set back has some steps twice.
    const name = steps.every((step, at) => !at || step.step > steps[at - 1].step) ? "step" : "number";
    const at = steps.map((step) => step[name]);
    for (const { chart, series } of this.plots) {
      const columns = series.map(({ of }) => steps.map((step, place) => of(step, steps[place - 1]) ?? null));
      chart.element.hidden = columns.flat().every((value) => value === null); // nothing is sampled by some programs
      chart.update(at, columns);
    }
  }

  summary(model) {
    const last = this.steps.at(-1);
    const { steps, loss, tokens, staleness, newest, waiting } = this.tiles;
    say(this.title, model.base);
    document.title = `${model.base} – AsyncDock`;
    setState(this.state, model.failed ? "failed" : model.waiting ? "running" : "idle");
    const facts = Object.entries(model.metadata).map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`);
    say(this.what, [this.id, size(model.options), ...facts].join(", "));
    say(steps.value, count(model.steps));
    say(steps.more, `last call ${ago(model.last_request, this.service.now)}`);
    say(waiting.value, count(model.waiting));
    say(waiting.more, last ? `${count(last.waiting_samples)} samples at the last step` : "");
    if (!last) return;
    say(loss.value, number(per(last.loss, last.trained_tokens)));
    say(loss.more, `norm ${number(last.grad_norm, 2)}`);
    say(tokens.value, count(last.trained_tokens));
    say(tokens.more, `of ${count(last.tokens)} in passes, ${count(last.data)} data`);
    say(staleness.value, number(last.staleness_mean));
    say(staleness.more, last.staleness_max === null ? "" : `max ${count(last.staleness_max)}`);
    say(newest.value, percent(per(last.sampled_newest, last.sampled_tokens)));
    say(newest.more, `of ${count(last.sampled_tokens)} sampled tokens`);
  }
}
