/* The other views of a run: its workers, checkpoints, logs and recipe. Each has `element`, `show()` when it is looked at, and
 * `update(progress)` while it is. */

import { element, say } from "../element.js";
import { ago, count, moment, number, percent, seconds, size, words } from "../format.js";
import { flat } from "./keys.js";
import { SHARES, WORDS } from "../progress.js";

const LOG_SECONDS = 3;

export function table(label, heads, body) {
  const head = element("thead", {}, element("tr", {}, heads.map((text) => element("th", { scope: "col" }, text))));
  return element("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": label }, element("table", {}, head, body));
}

export class Workers {
  constructor() {
    this.body = element("tbody");
    this.rows = new Map();
    this.ledger = element("dl", { class: "figures" });
    this.element = element(
      "div",
      {},
      table("Workers", ["worker", "where its time goes", ...SHARES.map((name) => WORDS[name]), "queue", "held", "rows/s", "tokens/s", "process"], this.body),
      element("h3", {}, "Ledger"),
      this.ledger,
    );
  }

  show(progress) {
    this.update(progress);
  }

  update(progress) {
    for (const worker of progress.workers.values()) this.row(worker, progress);
    const ledger = progress.ledger ?? {};
    const words = { generated: "generated", trained: "trained", filtered: "filtered", remade: "made again", in_flight: "in flight" };
    const entries = Object.entries(words).flatMap(([name, word]) => {
      const [rows, tokens] = [ledger[`${name}_samples`] ?? ledger[name], ledger[`${name}_tokens`]];
      if (rows === undefined) return [];
      const turns = ledger.generated_turns ? `, ${count(ledger[`${name}_turns`] ?? 0)} turns` : "";
      return element("div", {}, element("dt", {}, word), element("dd", {}, `${count(rows)} samples${tokens === undefined ? "" : `, ${count(tokens)} tokens`}${turns}`));
    });
    for (const worker of progress.workers.values()) {
      for (const [name, of] of Object.entries(worker.latest.calls ?? {})) {
        const lost = of.lost ? `could not score ${count(of.lost)} ${of.responses ? `of ${count(of.responses)} ` : ""}responses` : "scored all responses";
        const times = `${seconds(of.seconds / of.calls)} a call, ${seconds((of.waited ?? 0) / of.calls)} waited`;
        const text = `${count(of.calls)} calls, ${count(of.again)} again, ${times}; ${lost}`;
        entries.push(element("div", {}, element("dt", {}, `${worker.name} ${name}`), element("dd", {}, text)));
      }
    }
    for (const [reason, groups] of Object.entries(ledger.dropped ?? {})) {
      const tokens = ledger.dropped_tokens?.[reason];
      const text = `${count(groups)} groups${tokens === undefined ? "" : `, ${count(tokens)} tokens`}`;
      entries.push(element("div", {}, element("dt", {}, `dropped: ${reason}`), element("dd", {}, text)));
    }
    this.ledger.replaceChildren(...(entries.length ? entries : [element("div", {}, element("dt", {}, "no events yet"))]));
  }

  row(worker, progress) {
    let row = this.rows.get(worker.name);
    if (!row) {
      row = {
        bar: Object.fromEntries(SHARES.map((name) => [name, element("i", { class: `share-${name} fill-${name}` })])),
        cells: Array.from({ length: SHARES.length + 5 }, () => element("td")),
      };
      row.element = element(
        "tr",
        {},
        element("th", { scope: "row" }, worker.name),
        element("td", {}, element("div", { class: "share-bar", "aria-hidden": "true" }, Object.values(row.bar))),
        row.cells,
      );
      this.rows.set(worker.name, row);
      this.body.append(row.element);
    }
    const { shares, latest } = worker;
    for (const name of SHARES) row.bar[name].style.width = `${100 * shares[name]}%`;
    const quiet = progress.silent(worker);
    const process = progress.processes.get(worker.process || worker.name);
    const state = process && process.change !== "ready" ? process.change : quiet && !progress.ended ? "silent" : "";
    const where = [worker.process || (process ? worker.name : ""), process?.pid, process?.node && `on ${process.node}`, state].filter(Boolean).join(" ");
    const values = [...SHARES.map((name) => percent(shares[name])), count(latest.queue_depth), count(latest.in_flight), number(worker.rate("rows")), number(worker.rate("tokens")), where];
    values.forEach((value, at) => say(row.cells[at], String(value)));
  }
}

export class Alarms {
  constructor() {
    this.note = element("p", { class: "quiet", role: "status" });
    this.list = element("ul", { class: "alarms", "aria-label": "Alarms, the newest first" });
    this.element = element("div", {}, this.note, this.list);
    this.shown = -1;
  }

  show(progress) {
    this.update(progress);
  }

  update({ alarms }) {
    if (alarms.length === this.shown) return;
    this.shown = alarms.length;
    say(this.note, alarms.length ? "" : "No alarm. The guard compares each step with the ones before.");
    const head = ({ step, metric }) => element("h3", {}, `Step ${step}: ${words(metric)} `, element("code", { title: "its name for guard.off" }, metric));
    // The reason begins with the words of the metric, which stand above it.
    const reason = ({ metric, reason }) => reason.replace(`${words(metric)}: `, "");
    const entry = (one) => element("li", {}, head(one), element("p", {}, reason(one)), element("p", { class: "quiet" }, one.look));
    this.list.replaceChildren(...[...alarms].reverse().map(entry));
  }
}

export class Checkpoints {
  constructor(service, run) {
    Object.assign(this, { service, run, seen: "" });
    this.note = element("p", { class: "quiet", role: "status" });
    this.body = element("tbody");
    this.table = table("Checkpoints", ["version", "begin with it", "written", "size", "path"], this.body);
    this.element = element("div", {}, this.note, this.table);
  }

  async show(progress) {
    if (progress) this.ended = progress.ended;
    try {
      const { checkpoints } = await this.service.run(this.run, "/checkpoints");
      say(this.note, checkpoints.length ? "" : "No checkpoint yet. One is written every checkpoint.every steps, at the end, and when you ask for it.");
      this.table.hidden = !checkpoints.length;
      const newest = [...checkpoints].sort((a, b) => b.version - a.version);
      this.body.replaceChildren(
        ...newest.map((one) =>
          element("tr", {}, element("th", { scope: "row" }, `v${one.version}`), element("td", { class: "changes" }, this.links(one.version)), element("td", {}, `${moment(one.time)} (${ago(one.time)})`), element("td", {}, size(one.bytes)), element("td", {}, element("code", {}, one.path))),
        ),
      );
    } catch (problem) {
      this.table.hidden = true;
      say(this.note, problem.message);
    }
  }

  /** Where a run goes on from a checkpoint, once it has ended, and where another one begins with it. */
  links(version) {
    const link = (how, label) => element("a", { href: `#/runs/${encodeURIComponent(this.run)}/${how}/${version}`, "aria-label": `${label} from version ${version}` }, label);
    return [this.ended ? link("continue", "Continue") : null, link("fork", "Fork")];
  }

  update({ ended }) {
    if (ended === this.ended) return;
    this.ended = ended;
    this.show();
  }
}

export class Logs {
  constructor(service, run) {
    Object.assign(this, { service, run, timer: 0 });
    this.worker = element("select", { on: { change: () => this.load() } }, element("option", { value: "" }, "every worker"));
    this.follow = element("input", { type: "checkbox", checked: true });
    this.text = element("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Newest lines of the log" });
    this.note = element("p", { class: "quiet", role: "status" });
    this.element = element(
      "div",
      {},
      element("form", { class: "fields", "aria-label": "Which log", on: { submit: (event) => event.preventDefault() } }, element("label", {}, element("span", {}, "worker"), this.worker), element("label", { class: "check" }, this.follow, element("span", {}, "follow"))),
      this.note,
      this.text,
    );
  }

  show(progress) {
    this.update(progress);
    this.load();
  }

  hide() {
    clearTimeout(this.timer);
    this.timer = 0;
  }

  update(progress) {
    const known = new Set([...this.worker.options].map((option) => option.value));
    for (const name of [...progress.processes.keys()].sort()) if (!known.has(name)) this.worker.append(element("option", { value: name }, name));
    this.over = progress.ended;
  }

  async load() {
    this.hide();
    const at = (this.timer = setTimeout(() => this.load(), LOG_SECONDS * 1000));
    if (document.hidden || (!this.follow.checked && this.text.textContent)) return;
    try {
      const response = await this.service.fetch(`v1/runs/${encodeURIComponent(this.run)}/logs`, { query: { worker: this.worker.value, lines: 300 }, headers: { Accept: "text/plain" } });
      const lines = (await response.text()).split("\n").filter(Boolean);
      const bottom = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 30;
      say(this.text, lines.map(readable).join("\n"));
      say(this.note, lines.length ? "" : "Nothing has been logged.");
      if (bottom) this.text.scrollTop = this.text.scrollHeight;
    } catch (problem) {
      say(this.note, problem.message);
    }
    if (this.over && this.timer === at) this.hide();
  }
}

/** A line of JSON as a person reads it; any other line as it is. */
function readable(line) {
  let entry;
  try {
    entry = JSON.parse(line);
  } catch {
    return line;
  }
  if (entry === null || typeof entry !== "object" || !entry.event) return line;
  const { event, level = "", timestamp = "", time = "", worker = "", run, stage, exception, ...more } = entry;
  const when = String(timestamp || time).replace(/^.*T([\d:.]{8,12}).*$/, "$1");
  const rest = Object.entries(more).map(([name, value]) => `${name}=${typeof value === "object" ? JSON.stringify(value) : value}`);
  return [when, String(level).padEnd(7), worker || stage || "", event, ...rest].filter(Boolean).join("  ") + (exception ? `\n${exception}` : "");
}

/** A dotted key that may go on in the next line behind a dot. */
function broken(key) {
  return key.split(/(?<=\.)/).flatMap((part, at) => (at ? [element("wbr"), part] : [part]));
}

export class RecipeView {
  constructor(recipe) {
    const rows = [...flat(recipe)].map(([key, value]) => element("tr", {}, element("th", { scope: "row" }, element("code", {}, broken(key))), element("td", {}, element("code", {}, JSON.stringify(value)))));
    this.element = table("Recipe", ["key", "value"], element("tbody", {}, rows));
    this.element.classList.add("recipe");
  }

  show() {}
}

/** What the run would do with other keys, simulated with its own measured costs. */
export class WhatIf {
  constructor(service, run, recipe) {
    Object.assign(this, { service, run });
    const keys = { "pipeline.staleness": "staleness bound", "rollout.workers": "rollout workers", "train.dp": "data-parallel ranks", "train.groups_per_step": "groups a step" };
    const now = new Map(flat(recipe));
    this.fields = Object.entries(keys).map(([key, words]) => {
      const value = String(now.get(key) ?? "");
      return { key, value, words, input: element("input", { type: "number", min: key === "pipeline.staleness" ? "0" : "1", step: "1", value }) };
    });
    this.note = element("p", { class: "quiet", role: "status" });
    this.body = element("tbody");
    this.table = table("What if", ["", "as it is", "with these keys"], this.body);
    this.table.hidden = true;
    this.button = element("button", { type: "submit", class: "primary" }, "Simulate");
    const ask = (event) => {
      event.preventDefault();
      this.load();
    };
    this.element = element(
      "div",
      {},
      element("form", { class: "fields", "aria-label": "Keys to change", on: { submit: ask } }, this.fields.map(({ words, input }) => element("label", {}, element("span", {}, words), input)), this.button),
      this.note,
      this.table,
    );
  }

  show() {}

  async load() {
    const changed = this.fields.filter(({ input, value }) => input.value !== "" && input.value !== value);
    const overrides = Object.fromEntries(changed.map(({ key, input }) => [key, Number(input.value)]));
    this.button.disabled = true;
    say(this.note, "Simulating …");
    try {
      const { now, changed: then } = await this.service.run(this.run, "/what-if", { method: "POST", body: { overrides } });
      const share = (value) => percent(value);
      const rows = [
        ["tokens/s trained", "tokens_per_second", count],
        ["seconds a step", "step_seconds", (value) => number(value, 3)],
        ["generation in use", "generation", share],
        ["training", "training", share],
        ["trainer waits", "waiting", share],
        ["mean staleness", "staleness_mean", (value) => number(value, 3)],
        ["largest staleness", "staleness_max", (value) => number(value)],
        ["limits it", "busiest", String],
      ];
      this.body.replaceChildren(...rows.map(([words, name, form]) => element("tr", {}, element("th", { scope: "row" }, words), element("td", {}, form(now[name])), element("td", {}, form(then[name])))));
      const faster = then.tokens_per_second / now.tokens_per_second - 1;
      say(this.note, changed.length ? `${faster >= 0 ? "+" : "−"}${percent(Math.abs(faster))} tokens/s with ${changed.map(({ key, input }) => `${key} = ${input.value}`).join(", ")}, by the costs of this run.` : "By the costs of this run. Change a number to compare.");
      this.table.hidden = false;
    } catch (problem) {
      this.table.hidden = true;
      say(this.note, problem.message);
    } finally {
      this.button.disabled = false;
    }
  }
}
