/* One run: how it fares, what can be done with it, and everything that is known of it.
 *
 *    record, stages ─┐
 *    history ────────┼─▶ Progress ──▶ header and figures · picture · charts · timeline · samples, workers, checkpoints, logs, recipe
 *    stream ─────────┘   (steps have numbers, so that the order of arrival does not matter)
 */

import { Chart, smooth } from "../charts/charts.js";
import { Alarms, Checkpoints, Logs, RecipeView, WhatIf, Workers } from "./details.js";
import { confirmed, numbered } from "../dialog.js";
import { announce, element, paced, say } from "../element.js";
import { count, duration, facts, fixed, number, percent } from "../format.js";
import { Picture } from "../picture.js";
import { ENDED, Progress, STATES } from "../progress.js";
import { setState, stateBadge } from "./runs.js";
import { Samples } from "./samples.js";
import { Stream } from "../stream.js";
import { Timeline } from "../charts/timeline.js";

const KINDS = "step,sync,evaluation,state,worker,ledger,checkpoint,span,prompt,alarm,forecast";
const BEFORE = 130; // seconds of the past that the stream begins with, for the timeline
const STAGES_SECONDS = 2; // between two looks at the stages, the gate and the ledger
const WAITING_SECONDS = 3; // between two looks at a run that no agent has taken yet
const SMOOTH_FROM = 24; // steps from which a moving average is drawn over the rewards

export class RunPage {
  constructor(service, record, { onConnection, onGone }) {
    Object.assign(this, { service, id: record.id, onConnection, onGone, timer: 0, gone: false });
    this.progress = new Progress(record, () => service.now);
    this.header();
    this.picture = new Picture();
    this.charts();
    this.timeline = new Timeline((since) => this.follow(since));
    this.tabs();
    this.running = element("div", { class: "stack" }, this.picture.element, this.grid, this.timeline.element);
    this.element = element("div", { class: "page" }, this.head, this.running, this.browser);
    this.title = this.name;
    this.draw = paced(() => this.redraw(), 250);
    this.drawn = -1;
    this.clock = setInterval(() => !document.hidden && this.draw(), 1000);
  }

  destroy() {
    this.gone = true;
    clearTimeout(this.timer);
    clearInterval(this.clock);
    this.draw.stop();
    this.stream?.stop();
    this.picture.destroy();
    this.timeline.destroy();
    this.logs.hide();
    for (const { chart } of this.plots) chart.destroy();
    this.onConnection("", "");
  }

  restyle() {
    for (const { chart } of this.plots) chart.restyle();
    this.timeline.update(this.progress);
  }

  // ── what is shown ──

  header() {
    const { record } = this.progress;
    this.name = element("h1", { tabindex: "-1" }, record.name);
    this.state = stateBadge();
    const button = (label, what, kind = "") => element("button", { type: "button", class: kind, on: { click: () => this.ask(what) } }, label);
    this.buttons = {
      pause: button("Pause", "pause"),
      resume: button("Resume", "resume", "primary"),
      checkpoint: button("Checkpoint", "checkpoint"),
      scale: button("Scale", "scale"),
      stop: button("Stop", "stop", "danger"),
      delete: button("Delete", "delete", "danger"),
    };
    const link = (label, how, kind = "") => element("a", { class: `button ${kind}`, href: `#/runs/${encodeURIComponent(record.id)}/${how}` }, label);
    this.links = { continue: link("Continue", "continue", "primary"), fork: link("Fork", "fork") };
    this.refused = element("p", { class: "refused", role: "alert", hidden: true });
    this.done = element("i");
    this.bar = element("div", { class: "track", role: "progressbar", "aria-label": "Steps done", "aria-valuemin": "0" }, this.done);
    this.where = element("span");
    this.left = element("span", { class: "end" });
    const tile = (label) => {
      const [value, more] = [element("span", { class: "value" }, "–"), element("span", { class: "more" })];
      return { element: element("div", { class: "tile" }, element("dt", {}, label), element("dd", {}, value, more)), value, more };
    };
    this.tiles = { reward: tile("Reward"), speed: tile("Tokens per second"), staleness: tile("Staleness"), kl: tile("KL to behaviour"), pace: tile("Sets the pace"), trajectories: tile("Turns a trajectory") };
    this.findings = element("ul", { class: "findings", "aria-label": "What to notice" });
    this.head = element(
      "header",
      { class: "card run-head" },
      element(
        "div",
        { class: "run-title" },
        element("div", {}, element("div", { class: "line" }, this.name, this.state), element("p", { class: "quiet id" }, record.id, record.recipe?.description ? `: ${record.recipe.description}` : "")),
        element("div", { class: "buttons", role: "group", "aria-label": "This run" }, Object.values(this.links), Object.values(this.buttons)),
      ),
      this.refused,
      this.bar,
      element("div", { class: "line small" }, this.where, this.left),
      element("dl", { class: "tiles" }, Object.values(this.tiles).map((each) => each.element)),
      this.findings,
    );
  }

  charts() {
    const bound = this.progress.bound;
    // `of` is the name of a step's number, or a function of the columns.
    const line = (label, of, colour, more = {}) => ({ label, of, colour: `series-${colour}`, ...more });
    const [thin, optional, dashed] = [{ width: 1.5 }, { optional: true }, { optional: true, dash: [4, 3] }];
    const exact = { format: (value) => fixed(value, 3) };
    const softly = ({ get, step }) => (step.length < SMOOTH_FROM ? get("reward_mean") : smooth(get("reward_mean"), Math.max(5, Math.floor(step.length / 12))));
    const plot = (title, series, { alarms = [], ...options } = {}) => ({
      chart: new Chart({ title, series, ...options }),
      columns: (columns) => series.map(({ of }) => (typeof of === "string" ? columns.get(of) : of(columns))),
      alarms: new Set(alarms),
    });
    const shares = { floor: true, alarms: ["ess", "clip_fraction", "mask_fraction"] };
    const gaps = ["gap_mean_0", "gap_mean_1", "gap_mean_2", "gap_mean_3", "gap_mean_4", "gap_mean_resumed"];
    const functions = this.progress.functions;
    const mean = (name) => (this.progress.ended ? this.progress.rate(name) : null); // the last steps make no tokens
    const DASHES = [undefined, [4, 3], [1, 3], [8, 3]];
    const byFunction = (title, what, options) =>
      plot(title, functions.map((name, at) => line(name, `rewards/${name}/${what}`, (at % 2) + 1, { dash: DASHES[(at >> 1) % 4], optional: true })), options);
    const alarmed = functions.map((name) => `rewards/${name}/mean`);
    this.plots = [
      plot("Reward", [
        line("each step", "reward_mean", 1, { ...thin, hushed: true }),
        line("mean", softly, 1, exact),
        line("held out", (columns) => this.heldOut(columns), 2, { points: true, ...optional, ...exact }),
      ], { alarms: ["reward_mean"] }),
      ...(functions.length > 1
        ? [
            byFunction("Reward by function", "mean", { alarms: alarmed }),
            byFunction("Deviation by function", "std", { floor: true }),
            byFunction("Share by function", "share", { note: "of the variance" }),
          ]
        : []),
      ...(functions.length > 1 || functions[0]?.includes(":")
        ? [byFunction("Seconds of reward calls", "seconds", { note: "a step, inside the function", floor: true }), byFunction("Responses without a score", "lost", { note: "a step", floor: true })]
        : []),
      plot("Loss", [line("loss", "loss", 1, { format: (value) => number(value, 3) })]),
      plot("KL", [line("to the behaviour policy", "kl_behaviour", 1), line("to the reference", "kl_reference", 2, optional)], { floor: true, alarms: ["kl_reference"] }),
      plot("Entropy", [line("entropy", "entropy", 1)], { note: "nats, of the policy", floor: true, alarms: ["entropy"] }),
      plot(
        "Staleness",
        [
          line("max", "staleness_max", 2, { ...thin, stepped: true }),
          line("mean", "staleness_mean", 1),
          line("bound", ({ step }) => step.map(() => bound), "bound", { ...thin, dash: [6, 4] }),
        ],
        { note: "versions", floor: true },
      ),
      plot(
        "Tokens per second",
        [
          line("generated", ({ speed }) => speed("tokens_generated"), 1, { overall: () => mean("tokens_generated") }),
          line("trained", ({ speed }) => speed("tokens_trained"), 2, { ...thin, overall: () => mean("tokens_trained") }),
        ],
        { floor: true, format: count },
      ),
      plot("Seconds per step", [line("step", "seconds", 1), line("of it training", "train_seconds", 2, thin)], { floor: true }),
      plot(
        "Gap",
        [
          line("same weights", "gap_mean_0", 1, optional),
          line("1 step", "gap_mean_1", 2, optional),
          line("2 steps", "gap_mean_2", 1, dashed),
          line("past a swap", "gap_mean_resumed", 2, dashed),
        ],
        { note: "nats, engine to trainer", floor: true, alarms: ["probe", "probe_share", "tokenizer", ...gaps] },
      ),
      plot("Share of tokens", [line("effective", "ess", 1, optional), line("clipped", "clip_fraction", 2, optional), line("masked", "mask_fraction", 2, dashed)], shares),
      plot(
        "Variety",
        [line("distinct responses", "distinct_responses", 1, optional), line("equal groups", "equal_groups", 2, optional)],
        { note: "shares", floor: true, alarms: ["distinct_responses", "equal_groups", "dropped_groups", "failed_environments", "branches"] },
      ),
      plot(
        "Tokens a step",
        [
          line("trained", ({ grown }) => grown("tokens_trained"), 1),
          line("filtered", ({ grown }) => grown("tokens_filtered"), 2, thin),
          line("observed", "observed_tokens", 1, dashed),
        ],
        { floor: true, format: count },
      ),
      plot("Learning rate", [line("learning rate", "learning_rate", 1)], { floor: true }),
      plot("Response length", [line("mean", "response_length_mean", 1), line("rewarded above", "response_length_above", 2, optional), line("below", "response_length_below", 2, dashed)], { note: "tokens", floor: true, alarms: ["response_length_mean"] }),
      plot("Gradient norm", [line("before clipping", "grad_norm", 1)], { floor: true, alarms: ["grad_norm"] }),
    ];
    this.grid = element("section", { class: "charts", "aria-label": "Charts" }, this.plots.map(({ chart }) => chart.element));
  }

  heldOut({ step }) {
    const values = step.map(() => null);
    for (const [version, { reward_mean: mean }] of this.progress.evaluations) {
      const at = step.findIndex((each) => each >= version);
      if (at >= 0) values[at] = mean;
    }
    return values;
  }

  /** Views beneath one row of tabs: arrow keys go from one to the next. */
  tabs() {
    this.logs = new Logs(this.service, this.id);
    this.views = {
      samples: ["Samples", new Samples(this.service, this.id)],
      workers: ["Workers", new Workers()],
      alarms: ["Alarms", new Alarms()],
      checkpoints: ["Checkpoints", new Checkpoints(this.service, this.id)],
      logs: ["Logs", this.logs],
      "what-if": ["What if", new WhatIf(this.service, this.id, this.progress.recipe)],
      recipe: ["Recipe", new RecipeView(this.progress.recipe)],
    };
    const names = Object.keys(this.views);
    this.tabButtons = new Map(
      Object.entries(this.views).map(([name, [label]]) => [
        name,
        element("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `view-${name}`, on: { click: () => this.look(name) } }, label),
      ]),
    );
    const keys = (event) => {
      const at = names.indexOf(this.view);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1 + names.length, Home: 0, End: names.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.look(names[to % names.length]);
      this.tabButtons.get(this.view).focus();
    };
    this.panels = new Map(
      Object.entries(this.views).map(([name, [, view]]) => [name, element("div", { class: "view", role: "tabpanel", id: `view-${name}`, "aria-labelledby": `tab-${name}`, hidden: true }, view.element)]),
    );
    this.browser = element(
      "section",
      { class: "card browser", "aria-label": "Details" },
      element("div", { class: "tabs", role: "tablist", "aria-label": "Details", on: { keydown: keys } }, [...this.tabButtons.values()]),
      [...this.panels.values()],
    );
    this.view = "samples";
  }

  look(name) {
    this.view = name;
    for (const [each, button] of this.tabButtons) {
      button.setAttribute("aria-selected", String(each === name));
      button.tabIndex = each === name ? 0 : -1;
      this.panels.get(each).hidden = each !== name;
    }
    if (name !== "logs") this.logs.hide();
    this.views[name][1].show(this.progress);
  }

  redraw() {
    if (this.gone) return;
    const { progress } = this;
    this.summary(progress);
    const waits = progress.state === "created";
    this.running.hidden = waits;
    if (waits) return;
    this.picture.update(progress);
    this.timeline.update(progress);
    if (this.drawn !== progress.changed) {
      this.drawn = progress.changed;
      const columns = progress.columns();
      for (const { chart, columns: of, alarms } of this.plots) {
        const marks = progress.alarms.filter((one) => alarms.has(one.metric));
        chart.update(columns.step, of(columns), marks.map((one) => ({ step: one.step, text: `Alarm at step ${one.step}: ${one.reason}.` })));
      }
    }
    this.views[this.view][1].update?.(progress);
  }

  summary(progress) {
    const { state, record, last, total, done } = progress;
    setState(this.state, state);
    document.title = `${STATES[state] ?? state}: ${record.name} – AsyncDock`;
    const over = ENDED.includes(state);
    const changes = document.body.dataset.runs !== "folders"; // there all runs are only shown
    const shown = !changes ? {} : { pause: !over && state !== "paused" && state !== "created", resume: state === "paused", checkpoint: !over && state !== "created", scale: !over && state !== "created" && (!progress.processes.size || this.rollouts(progress) > 0), stop: !over, delete: over };
    const possible = { pause: state === "running", resume: true, checkpoint: state === "running", scale: ["starting", "running", "paused"].includes(state) && this.rollouts(progress) > 0, stop: state !== "stopping", delete: true };
    this.links.continue.hidden = !changes || !over;
    this.links.fork.hidden = !changes || state === "created";
    const held = Object.keys(this.buttons).find((what) => this.buttons[what] === document.activeElement);
    for (const [what, button] of Object.entries(this.buttons)) {
      button.hidden = !shown[what];
      button.disabled = !possible[what];
      button.setAttribute("aria-disabled", String(this.asking === what)); // a disabled one would lose the focus
    }
    // Only now is the one that follows there to take the focus.
    if (held && (!shown[held] || !possible[held])) ({ pause: this.buttons.resume, resume: this.buttons.pause }[held] ?? this.name).focus();
    this.done.style.width = `${total ? (100 * done) / total : 0}%`;
    this.bar.setAttribute("aria-valuemax", String(total ?? 0));
    this.bar.setAttribute("aria-valuenow", String(done));
    const queue = record.position ? `Place ${record.position} in the queue; it begins when a place is free.` : "It waits for an agent to take it.";
    const epochs = Object.entries(progress.epochs).map(([source, epoch]) => `epoch ${epoch} of ${source}`);
    say(this.where, state === "created" ? queue : state === "starting" ? "Starting the workers; the first start of a model takes a while." : [`step ${done.toLocaleString("en")} of ${total?.toLocaleString("en") ?? "?"}`, ...epochs].join(", "));
    const parts = [progress.elapsed === null ? "" : `${duration(progress.elapsed)} elapsed`, progress.left === null || state !== "running" ? "" : `${duration(progress.left)} left`];
    say(this.left, parts.filter(Boolean).join(", "));
    const { reward, speed, staleness, kl, pace, trajectories } = this.tiles;
    say(reward.value, fixed(last?.reward_mean ?? record.reward ?? null, 3));
    const unscored = (data) => (data?.reward_failed ?? data?.failed ?? 0) + (data?.reward_absent ?? data?.absent ?? 0);
    const newest = [...progress.evaluations.values()].at(-1);
    const withUnscored = [[last, "responses"], [newest, "held-out answers"]].filter(([data]) => unscored(data) > 0);
    say(reward.more, facts(last && `± ${fixed(last.reward_std, 2)}`, ...withUnscored.map(([data, what]) => `${count(unscored(data))} ${what} not scored`)));
    const rate = progress.rate();
    say(speed.value, count(rate));
    say(speed.more, last ? facts(record.devices > 1 && rate !== null && `${count(rate / record.devices)} a device`, `${count(last.tokens_generated)} in all`) : "");
    say(staleness.value, last ? fixed(last.staleness_mean, 2) : "–");
    say(staleness.more, facts(last && `max ${number(last.staleness_max)}`, `bound ${progress.bound ?? "–"}`));
    say(kl.value, number(last?.kl_behaviour, 2));
    say(kl.more, last ? `${percent(last.ess ?? null)} effective` : "");
    const slowest = progress.slowest;
    pace.element.hidden = over;
    say(pace.value, slowest && state === "running" ? slowest.name : "–");
    say(pace.more, slowest && state === "running" ? `busy ${percent(slowest.share)}` : "");
    trajectories.element.hidden = !Object.keys(progress.trajectories).length;
    if (!trajectories.element.hidden) this.played(progress.trajectories, trajectories);
    this.notice(progress);
  }

  /** The numbers of trajectories, in their tile. */
  played(counts, { value, more }) {
    const ended = Object.entries(counts).reduce((sum, [name, many]) => sum + (name.startsWith("ended_") ? many : 0), 0);
    const times = ["engine", "waiting", "environment"].map((name) => counts[`${name}_seconds`] ?? 0);
    const spent = times.reduce((sum, each) => sum + each, 0);
    const lost = [["failed_calls", "tool calls failed"], ["branches", "branches"], ["ended_failed", "failed"], ["ended_dropped", "dropped"]];
    say(value, ended ? fixed(counts.turns / ended, 1) : "–");
    say(more, facts(`${count(ended)} ended`, spent && `${percent(times[2] / spent)} of their time in environments`, ...lost.map(([name, what]) => counts[name] && `${count(counts[name])} ${what}`)));
  }

  notice(progress) {
    const findings = progress.findings.map(({ level, text }) => [level, text]);
    const fine = { running: "Nothing unusual.", finished: "Finished; nothing unusual.", stopped: progress.reason || "Stopped.", paused: "Paused: nothing new is claimed until it goes on." }[progress.state];
    if (!findings.length && fine) findings.push([progress.state === "running" || progress.state === "finished" ? "fine" : "info", fine]);
    const now = JSON.stringify(findings);
    if (now === this.noticed) return;
    this.noticed = now;
    const words = { bad: "Wrong: ", watch: "Notice: " };
    this.findings.replaceChildren(...findings.map(([level, text]) => element("li", { class: level }, element("i", { "aria-hidden": "true" }), words[level] ? element("span", { class: "hidden" }, words[level]) : null, text)));
  }

  // ── what is asked of the service ──

  async load() {
    this.look(this.view);
    this.redraw();
    if (this.progress.state === "created") return this.wait();
    this.follow();
    await Promise.all([this.history(), this.stages()]);
    if (!this.gone) this.draw();
  }

  async wait() {
    this.timer = setTimeout(async () => {
      if (this.gone) return;
      await this.refresh();
      if (this.progress.state === "created") this.wait();
      else this.load();
    }, WAITING_SECONDS * 1000);
  }

  async refresh() {
    try {
      const record = await this.service.run(this.id);
      const state = this.progress.state;
      this.progress.update(record);
      // The stream may have had the end before the record has it.
      if (ENDED.includes(state) && !ENDED.includes(record.state)) this.progress.state = state;
      this.draw();
    } catch (problem) {
      if (problem.status === 404) this.onGone();
    }
  }

  async history() {
    try {
      const names = "step,evaluation,sync";
      const each = this.service.run(this.id, "/metrics", { query: { names, every: 0 } });
      // A very long run has too many steps for one answer; it is drawn by means over some seconds.
      const { series } = await each.catch((problem) => {
        if (problem.status !== 422) throw problem;
        return this.service.run(this.id, "/metrics", { query: { names } });
      });
      this.progress.past(series);
    } catch (problem) {
      this.complain(problem);
    }
  }

  /** Read the ledger, the gate and the processes, which are not in the events often enough. */
  async stages() {
    if (this.gone) return;
    try {
      this.progress.pipeline(await this.service.run(this.id, "/stages"));
      this.draw();
    } catch (problem) {
      if (problem.status === 404) this.onGone();
    }
    if (!this.progress.ended) this.timer = setTimeout(() => this.stages(), STAGES_SECONDS * 1000);
  }

  /** Read the stream from `since` seconds back on. */
  follow(since = BEFORE) {
    this.stream?.stop();
    this.progress.spans.clear();
    const { record } = this.progress;
    const until = record.ended ?? this.service.now;
    const from = Math.max(record.created, until - since);
    const stream = new Stream(this.service, this.id, {
      kinds: KINDS,
      after: `${Math.floor(from * 1000)}-0`,
      onEvent: (kind, data) => this.event(kind, data),
      onChange: (state, detail) => stream === this.stream && this.onConnection(state, detail),
    });
    this.stream = stream;
    stream.start();
  }

  event(kind, data) {
    const before = this.progress.state;
    this.progress.apply(kind, data);
    if (kind === "state" && data.state !== before) {
      announce(`${this.progress.record.name} is ${STATES[data.state] ?? data.state}${data.reason ? `: ${data.reason}` : ""}.`);
      this.refresh();
    }
    if (kind === "checkpoint") {
      if (data.requested) announce(`Checkpoint of version ${data.version} written.`);
      if (this.view === "checkpoints") this.views.checkpoints[1].show();
    }
    this.draw();
  }

  async ask(what) {
    if (this.asking) return;
    const { record } = this.progress;
    if (what === "stop" && !(await confirmed({ title: "Stop this run?", text: `${record.name} writes a checkpoint where it can, ends its workers and does not go on by itself.`, yes: "Stop the run" }))) return;
    if (what === "delete" && !(await confirmed({ title: "Delete this run?", text: `Everything of ${record.id} is removed: its events, samples, logs and checkpoints. This cannot be undone.`, yes: "Delete everything" }))) return;
    const options = { method: "POST" };
    if (what === "scale") {
      const text = "New ones start beside the others; those that leave park what they hold.";
      const rollout = await numbered({ title: "How many rollout workers?", text, label: "Rollout workers", value: this.rollouts(this.progress), yes: "Scale the run" });
      if (!rollout) return;
      options.body = { rollout };
    }
    this.refused.hidden = true;
    this.asking = what;
    this.draw();
    try {
      if (what === "delete") {
        await this.service.run(this.id, "", { method: "DELETE" });
        announce(`Run ${record.name} is deleted.`);
        return this.onGone();
      }
      this.progress.update(await this.service.run(this.id, `/${what}`, options));
      if (what === "checkpoint") announce("A checkpoint is written after the next step.");
    } catch (problem) {
      this.complain(problem);
    } finally {
      this.asking = "";
      this.draw();
    }
  }

  /** Rollout workers of the run that can be scaled: colocated ones, and external ones, are none. */
  rollouts(progress) {
    return [...progress.processes].filter(([name, { change }]) => name.startsWith("rollout-") && change !== "left").length;
  }

  complain(problem) {
    this.refused.hidden = false;
    say(this.refused, problem.message + (problem.fix ? ` ${problem.fix}` : ""));
  }
}
