/* Progress of a run: added up from its record and its events so far. Views read it; nothing here draws or calls.
 *
 *    history, events ──▶ Progress ──▶ series of the charts, spans, what to notice
 *    GET …/stages ─────────┘          stages with shares and rates, which the server has added up
 *
 * Applying a step again (history and stream overlap; a trainer replays after a death) changes nothing.
 */

import { fixed, number, percent } from "./format.js";

export const SHARES = ["busy", "waiting_input", "waiting_room", "other"];
export const WORDS = { busy: "busy", waiting_input: "waiting for input", waiting_room: "waiting for room", other: "other" };
export const ENDED = ["finished", "stopped", "failed"];
export const STATES = { created: "waiting" }; // words of states that are not shown by their names

// Of a reward function what is noticed: its share of the differences of rewards, its correlation with the rest of the reward.
const DOMINANT = 0.9;
const OPPOSED = -0.3;
const OFTEN = 0.05; // of the responses: each costs its group
const RATE_STEPS = 8; // steps that tokens per second and the time left look back
const SPAN_SECONDS = 660; // how long spans are kept
const GONE = 6; // seconds that a worker reports later than the others, after which it is not shown as at work

/** Seconds in which `run` ran, over all its resumes; null before it began. */
export function ranSeconds(run, now) {
  if (!run.started) return run.former_seconds || null;
  return run.former_seconds + (run.ended ?? now) - run.started;
}

/** One worker of a stage: its newest report, and the shares and rates of the last seconds. */
class Worker {
  constructor(stage, latest) {
    Object.assign(this, { name: latest.worker, stage, latest, recent: latest.recent, process: latest.process, time: latest.time });
  }

  get shares() {
    return shares([this]);
  }

  rate(name) {
    return this.recent.wall > 0 ? this.recent[name] / this.recent.wall : 0;
  }
}

/** Parts of the wall time of `workers` together; they add up to 1, or are all 0 before any time has passed. */
function shares(workers) {
  const total = (name) => workers.reduce((sum, worker) => sum + worker.recent[name], 0);
  const wall = total("wall");
  const part = (name) => total(name) / wall;
  return Object.fromEntries(SHARES.map((name) => [name, wall > 0 ? part(name) : 0]));
}

export class Progress {
  /** `clock` returns the server's time in Unix seconds. */
  constructor(record, clock) {
    this.clock = clock;
    this.steps = new Map(); // by step
    this.evaluations = new Map(); // by policy version
    this.workers = new Map();
    this.spans = new Map(); // by worker: {stage, spans}, in order of their ends
    this.processes = new Map(); // by name: {change, pid, reason}; the light stages share one
    this.ledger = null;
    this.gate = null; // {admitted, allowed, open} in groups
    this.trajectories = {}; // their numbers, of a run with environments
    this.epochs = {}; // that each source of prompts is in, from 1, by its key in the recipe
    this.published = null;
    this.swapped = null;
    this.restarts = 0;
    this.notes = [];
    this.forecast = null; // of the next steps, the newest
    this.alarms = []; // of the guard, the oldest first
    this.reported = 0; // Unix seconds of the last report of any worker
    this.received = 0; // of the arrival of the last event or report
    this.changed = 0;
    this.sorted = [];
    this.update(record);
  }

  /** The run's record as the server has it now. */
  update(record) {
    this.record = record;
    this.state = record.state;
    this.reason = record.reason ?? "";
  }

  get recipe() {
    return this.record.recipe ?? {};
  }

  get bound() {
    return this.recipe.pipeline?.staleness ?? null;
  }

  get total() {
    return this.record.steps ?? this.recipe.train?.steps ?? null;
  }

  get ended() {
    return ENDED.includes(this.state);
  }

  get now() {
    return this.clock();
  }

  /** History: {kind: {time: [...], name: [...]}}. */
  past(series) {
    for (const [kind, columns] of Object.entries(series)) {
      const length = columns.time?.length ?? 0;
      for (let at = 0; at < length; at += 1) {
        const data = Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[at]]));
        if (kind === "step") this.step(data);
        else if (kind === "evaluation") this.evaluations.set(data.version, data);
        else if (kind.startsWith("sync")) this.sync(data);
      }
    }
  }

  apply(kind, data) {
    this.received = this.now;
    if (kind === "step") this.step(data);
    else if (kind === "evaluation") this.evaluations.set(data.version, data);
    else if (kind === "sync") this.sync(data);
    else if (kind === "ledger") this.ledger = data;
    else if (kind === "span") this.span(data);
    else if (kind === "worker") this.change(data);
    else if (kind === "alarm") this.alarm(data);
    else if (kind === "forecast") this.forecast = data;
    else if (kind === "prompt" && data.change === "epoch") this.epochs = data.epochs;
    else if (kind === "state") {
      this.state = data.state;
      this.reason = data.reason ?? "";
    }
  }

  step(data) {
    for (const [name, figures] of Object.entries(data.rewards ?? {})) {
      for (const [what, value] of Object.entries(figures)) data[`rewards/${name}/${what}`] = value; // as the history has it
    }
    if (!this.steps.has(data.step)) this.sorted = null;
    this.steps.set(data.step, data);
    this.changed += 1;
  }

  sync(data) {
    if (data.publish_seconds) {
      if (!(data.version < this.published?.version)) this.published = data;
    } else if (!(data.version < this.swapped?.version)) this.swapped = data;
  }

  /** An alarm, from the stream or from the server's list of them. */
  alarm(data) {
    if (this.alarms.some((one) => one.step === data.step && one.metric === data.metric && (one.worker || "") === (data.worker || ""))) return;
    this.alarms.push(data);
    this.alarms.sort((a, b) => a.time - b.time);
    this.changed += 1;
  }

  change(data) {
    if (data.change === "restarted") this.restarts += 1;
    if (["died", "restarted", "absent", "left", "kept its weights"].includes(data.change)) {
      this.notes.push({ time: data.time, text: `${data.worker} ${data.change}${data.reason ? `: ${data.reason}` : ""}` });
      this.notes.splice(0, this.notes.length - 5);
    }
    const pid = data.pid || this.processes.get(data.worker)?.pid || 0;
    const node = data.host ? data.node : this.processes.get(data.worker)?.node || ""; // of another machine
    this.processes.set(data.worker, { change: data.change, reason: data.reason ?? "", pid, node });
  }

  /** The pipeline as the server sees it now (GET …/stages). */
  pipeline(view) {
    if (!this.ledger || !this.ended) this.ledger = { ...this.ledger, ...view.ledger };
    this.gate = view.gate;
    this.epochs = view.epochs;
    this.trajectories = view.trajectories ?? {};
    this.flow = view.flow;
    for (const alarm of view.alarms ?? []) this.alarm(alarm);
    for (const stage of view.stages) {
      for (const report of stage.workers) {
        const { process, state, pid, node, host, time } = report;
        this.workers.set(report.worker, new Worker(stage.name, report));
        if (time > this.reported) [this.reported, this.received] = [time, this.now];
        if (state) this.processes.set(process, { change: state, reason: "", pid, node: host ? node : "" });
      }
    }
  }

  /** What a worker has done lately: {worker, stage, spans: [{name, start, seconds, rows, version}]}. */
  span(data) {
    const { spans } = this.spans.get(data.worker) ?? { spans: [] };
    this.spans.set(data.worker, { stage: data.stage, spans });
    for (const span of data.spans) spans.push({ ...span, end: span.start + span.seconds });
    spans.sort((a, b) => a.end - b.end);
    const oldest = spans.at(-1)?.end - SPAN_SECONDS;
    const first = spans.findIndex((span) => span.end >= oldest);
    if (first > 0) spans.splice(0, first);
  }

  get history() {
    this.sorted ??= [...this.steps.keys()].sort((a, b) => a - b);
    return this.sorted.map((step) => this.steps.get(step));
  }

  get last() {
    return this.history.at(-1) ?? null;
  }

  get done() {
    return this.last ? this.last.step : (this.record.steps_done ?? 0);
  }

  get elapsed() {
    return ranSeconds(this.record, this.now);
  }

  /** Seconds by the median of the last steps; null before there are two, since the first waits for the start. */
  get left() {
    const recent = this.history.slice(1).slice(-RATE_STEPS).map((step) => step.seconds).filter(Number.isFinite);
    if (!recent.length || this.total === null || this.ended) return null;
    recent.sort((a, b) => a - b);
    return recent[Math.floor(recent.length / 2)] * (this.total - this.done);
  }

  /** Tokens per second over the last steps; of a run that has ended, over all but the first one, which waits for the start. */
  rate(name = "tokens_generated") {
    const recent = this.history.slice(this.ended ? 0 : -RATE_STEPS - 1);
    const spent = recent.slice(1).reduce((sum, step, at) => sum + step.seconds * (step.step - recent[at].step), 0);
    return spent > 0 ? Math.max(0, recent.at(-1)[name] - recent[0][name]) / spent : null;
  }

  /** Every step's columns, with tokens per second of each. */
  columns() {
    const history = this.history;
    const get = (name) => history.map((step) => step[name] ?? null);
    const speed = (name) =>
      history.map((step, at) => {
        const before = history[at - 1];
        // by its own seconds: between the times of two steps a run may have ended and been resumed
        const spent = before && (Number.isFinite(step.seconds) ? step.seconds * (step.step - before.step) : step.time - before.time);
        return spent > 0 ? Math.max(0, step[name] - before[name]) / spent : null;
      });
    const grown = (name) =>
      history.map((step, at) => {
        const before = history[at - 1] ?? { step: step.step - 1, [name]: 0 };
        return Math.max(0, step[name] - before[name]) / (step.step - before.step);
      });
    return { step: history.map((step) => step.step), get, speed, grown };
  }

  /** Names of the run's reward functions. */
  get functions() {
    return (this.recipe.reward?.functions ?? []).map(({ name }) => name);
  }

  /** Why the reward may not rise: what stands out in the scores of its functions in the last steps. */
  get rewardFindings() {
    const names = this.functions;
    const recent = this.history.slice(-RATE_STEPS);
    if (recent.length < RATE_STEPS) return [];
    const mean = (name, what) => {
      const values = recent.map((step) => step[`rewards/${name}/${what}`]).filter(Number.isFinite);
      return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
    };
    return names.flatMap((name) => {
      const [score, std, share, correlation, responses, lost] = ["mean", "std", "share", "correlation", "responses", "lost"].map((what) => mean(name, what));
      return [
        responses && lost > OFTEN * responses && `${name} could not score ${percent(lost / responses)} of the responses.`,
        names.length > 1 && std === 0 && `${name} scores all responses with ${number(score)}: it teaches nothing.`,
        share > DOMINANT && `${name} makes ${percent(share)} of the differences between the rewards of a group: the other functions hardly count.`,
        share !== null && share * names.length <= 1 && correlation < OPPOSED && `${name} pulls against the rest of the reward: its scores correlate with that by ${fixed(correlation, 2)}.`,
      ].filter(Boolean);
    });
  }

  /** Whether others have reported since a worker should have. */
  silent(worker) {
    return this.reported - worker.time > GONE;
  }

  /** Workers by stage: {workers, shares, rows, tokens, queue, held}. */
  get stages() {
    const byStage = new Map();
    for (const worker of this.workers.values()) byStage.set(worker.stage, [...(byStage.get(worker.stage) ?? []), worker]);
    return new Map(
      [...byStage].map(([stage, workers]) => [
        stage,
        {
          workers,
          shares: shares(workers),
          rows: workers.reduce((sum, worker) => sum + worker.rate("rows"), 0),
          tokens: workers.reduce((sum, worker) => sum + worker.rate("tokens"), 0),
          queue: Math.max(...workers.map((worker) => worker.latest.queue_depth ?? 0)), // one queue, all see it
          held: workers.reduce((sum, worker) => sum + (worker.latest.in_flight ?? 0), 0),
          quiet: workers.every((worker) => this.silent(worker)),
        },
      ]),
    );
  }

  /** The stage that sets the pace: the one that is busy for the largest part of its time. Null when none is at work. */
  get slowest() {
    const busy = [...this.stages].filter(([, stage]) => !stage.quiet).map(([name, stage]) => [stage.shares.busy, name]);
    const [share, name] = busy.sort((a, b) => b[0] - a[0])[0] ?? [0, null];
    return share > 0.05 ? { name, share } : null;
  }

  /** What a person should notice: [{level: bad | watch | fine, text}], the worst first. */
  get findings() {
    const findings = [];
    const bad = (text) => findings.push({ level: "bad", text });
    const watch = (text) => findings.push({ level: "watch", text });
    const last = this.last;
    if (this.state === "failed") bad(this.reason || "The run failed.");
    if (last) {
      const worst = Math.max(...this.history.map((step) => step.staleness_max ?? 0));
      if (this.bound !== null && worst > this.bound) bad(`A sample was ${worst} versions old; the bound is ${this.bound}.`);
      if (last.loss === null || last.grad_norm === null) bad("The loss is no longer a finite number.");
      if (last.ess !== undefined && last.ess < 0.5) {
        watch(`Only ${Math.round(100 * last.ess)} % of the tokens count after the correction for staleness.`);
      }
    }
    if (this.state === "running") {
      const silent = this.now - this.received;
      if (this.received && silent > 15) watch(`No event for ${Math.round(silent)} s.`);
      for (const [name, stage] of this.stages) {
        if (!stage.quiet && stage.shares.waiting_room > 0.3) {
          watch(`${name} waits for room ${Math.round(100 * stage.shares.waiting_room)} % of its time: pipeline.arena is small for this run.`);
        }
      }
    }
    if (this.forecast?.reason) watch(`From step ${this.forecast.step}: ${this.forecast.reason}.`);
    for (const text of this.rewardFindings) watch(text);
    const others = this.alarms.filter(({ reason }) => !this.reason.includes(reason)); // one that ended the run is said
    for (const alarm of others.slice(-3).reverse()) watch(`Alarm at step ${alarm.step}: ${alarm.reason}.`);
    if (this.restarts) watch(`${this.restarts} worker restart${this.restarts > 1 ? "s" : ""}.`);
    return findings.sort((a, b) => (a.level === "bad" ? 0 : 1) - (b.level === "bad" ? 0 : 1));
  }
}
