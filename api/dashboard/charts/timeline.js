/* What every worker did in the last minutes, on one clock: the overlap of the stages is what one sees.
 *
 *    at work   ▁▃▃▅▃▃▁▃▅▅   how many stages at the same time
 *    rollout   ████████ ████
 *    reward      █  ██  █ █
 *    update         ████  ██
 *
 * A claim's span is light, and darker where several of one worker overlap; inside it, what took the time (a training step, a swap of
 * weights) is solid. What is under way has not ended and so is no span yet: after the last one the worker's busy share of its last seconds
 * is drawn as a narrow band.
 */

import { colour } from "./charts.js";
import { announce, element, say } from "../element.js";
import { clock, number, percent, seconds } from "../format.js";

const ORDER = ["rollout", "reward", "reference", "advantage", "sync", "update"];
const LABELS = { sync: "weight sync" };
const WEIGHTS = ["publish", "swap"];
const WINDOWS = [30, 60, 120, 300, 600];
const [LANE, GAP, LEFT, TOP, AXIS, PLENTY] = [20, 6, 96, 34, 20, 560];

/** Intervals [begin, end] as disjoint ones in order. */
export function union(intervals) {
  const ordered = intervals.filter(([a, b]) => b > a).sort((a, b) => a[0] - b[0]);
  const joined = [];
  for (const [begin, end] of ordered) {
    const last = joined.at(-1);
    if (last && begin <= last[1]) last[1] = Math.max(last[1], end);
    else joined.push([begin, end]);
  }
  return joined;
}

/** The parts in which two lists of disjoint intervals in order both are. */
export function both(one, other) {
  const parts = [];
  for (let i = 0, j = 0; i < one.length && j < other.length; ) {
    const [begin, end] = [Math.max(one[i][0], other[j][0]), Math.min(one[i][1], other[j][1])];
    if (end > begin) parts.push([begin, end]);
    if (one[i][1] < other[j][1]) i += 1;
    else j += 1;
  }
  return parts;
}

export const total = (intervals) => intervals.reduce((sum, [begin, end]) => sum + end - begin, 0);

/** [time, how many of the lists are at work from then on], by time. */
export function depth(lists) {
  const edges = lists.flatMap((list) => list.flatMap(([begin, end]) => [[begin, 1], [end, -1]])).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let now = 0;
  return edges.map(([time, change]) => [time, (now += change)]);
}

export class Timeline {
  /** `onMore(seconds)` is asked for a longer past than was read so far. */
  constructor(onMore) {
    this.onMore = onMore;
    this.window = 60;
    this.known = 120; // seconds of the past that were read when the page was opened
    this.held = null; // the end of what is shown, while it is held still
    this.canvas = element("canvas", { class: "gantt", role: "img", "aria-labelledby": "timeline-title", "aria-describedby": "timeline-says" });
    this.tip = element("div", { class: "tip", hidden: true });
    this.says = element("p", { class: "overlap", id: "timeline-says" }, "No events yet.");
    this.hold = element("button", { type: "button", "aria-pressed": "false", on: { click: () => this.toggle() } }, "Hold still");
    const choices = WINDOWS.map((window) =>
      element(
        "label",
        {},
        element("input", { type: "radio", name: "window", value: window, checked: window === this.window, on: { change: () => this.choose(window) } }),
        element("span", {}, window < 60 ? `${window} s` : `${window / 60} min`),
      ),
    );
    this.body = element("tbody");
    this.element = element(
      "section",
      { class: "card timeline", "aria-labelledby": "timeline-title" },
      element(
        "div",
        { class: "card-head" },
        element("h2", { id: "timeline-title" }, "Timeline"),
        element("fieldset", { class: "segments" }, element("legend", { class: "hidden" }, "How much of the past"), choices),
        this.hold,
      ),
      element("div", { class: "gantt-frame" }, this.canvas, this.tip),
      this.says,
      element(
        "details",
        { class: "as-table" },
        element("summary", {}, "Table", element("span", { class: "hidden" }, " of the timeline")),
        element(
          "div",
          { class: "table-scroll", tabindex: "0", role: "region", "aria-label": "Timeline, as a table" },
          element("table", {}, element("thead", {}, element("tr", {}, ["stage", "at work", "of the time", "beside update"].map((head) => element("th", { scope: "col" }, head)))), this.body),
        ),
      ),
    );
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.boxes = [];
    this.sizes = new ResizeObserver(() => this.progress && this.update(this.progress));
    this.sizes.observe(this.canvas.parentElement);
  }

  destroy() {
    this.sizes.disconnect();
  }

  choose(window) {
    this.window = window;
    if (window > this.known) {
      this.known = window;
      this.onMore(window + 10);
    }
    if (this.progress) this.update(this.progress);
  }

  toggle() {
    this.held = this.held === null ? this.end(this.progress) : null;
    this.hold.setAttribute("aria-pressed", String(this.held !== null));
    announce(this.held === null ? "The timeline moves on." : "The timeline is held still.");
    if (this.progress) this.update(this.progress);
  }

  end(progress) {
    let last = 0;
    for (const { spans } of progress.spans.values()) last = Math.max(last, spans.at(-1)?.end ?? 0);
    const live = progress.state === "running" || progress.state === "stopping";
    return live ? Math.max(last, progress.now - 0.5) : last || (progress.record.ended ?? progress.now);
  }

  /** Lanes from top to bottom: {key, label, stage, spans}. Publishing and swapping of weights have one of their own. */
  lanes(progress) {
    const lanes = new Map();
    const put = (key, label, stage, span, worker) => {
      if (!lanes.has(key)) lanes.set(key, { key, label, stage, worker, spans: [] });
      if (span) lanes.get(key).spans.push(span);
    };
    for (const [worker, { stage, spans }] of progress.spans) {
      put(worker, worker, stage, null, worker);
      for (const span of spans) {
        if (WEIGHTS.includes(span.name)) put("sync", LABELS.sync, "sync", { ...span, by: worker });
        else put(worker, worker, stage, span, worker);
      }
    }
    const many = new Map();
    for (const lane of lanes.values()) many.set(lane.stage, (many.get(lane.stage) ?? 0) + 1);
    for (const lane of lanes.values()) if (many.get(lane.stage) === 1) lane.label = LABELS[lane.stage] ?? lane.stage;
    const place = (stage) => (ORDER.includes(stage) ? ORDER.indexOf(stage) : ORDER.length - 1.5);
    return [...lanes.values()].sort((a, b) => place(a.stage) - place(b.stage) || a.key.localeCompare(b.key, "en", { numeric: true }));
  }

  update(progress) {
    this.progress = progress;
    const until = this.held ?? this.end(progress);
    const from = until - this.window;
    const lanes = this.lanes(progress);
    const work = new Map();
    for (const lane of lanes) {
      if (lane.stage === "sync") continue;
      const seen = lane.spans.map((span) => [Math.max(from, span.start), Math.min(until, span.end)]);
      work.set(lane.stage, [...(work.get(lane.stage) ?? []), ...seen]);
    }
    for (const [stage, intervals] of work) work.set(stage, union(intervals));
    this.draw(progress, lanes, work, from, until);
    this.describe(work, until - from);
  }

  draw(progress, lanes, work, from, until) {
    const width = this.canvas.parentElement.clientWidth;
    const left = width < PLENTY ? 78 : LEFT;
    const height = TOP + Math.max(1, lanes.length) * (LANE + GAP) + AXIS;
    const ratio = window.devicePixelRatio || 1;
    if (!width) return;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    const font = getComputedStyle(document.body).fontFamily;
    pen.font = `11.5px ${font}`;
    pen.textBaseline = "middle";
    const x = (time) => left + ((time - from) / (until - from)) * (width - left - 2);
    this.axis(pen, x, from, until, left, width, height);
    this.depth(pen, x, [...work.values()], from, left, width);
    this.boxes = [];
    lanes.forEach((lane, at) => this.lane(pen, lane, TOP + at * (LANE + GAP), x, from, until, left, width, progress));
  }

  axis(pen, x, from, until, left, width, height) {
    const step = [5, 10, 15, 30, 60, 120].find((size) => ((width - left) * size) / (until - from) >= 62) ?? 300;
    pen.fillStyle = colour("muted");
    pen.strokeStyle = colour("grid");
    pen.lineWidth = 1;
    pen.textAlign = "center";
    let free = width; // to the left of the label before
    for (let past = 0; past <= until - from; past += step) {
      const here = Math.round(x(until - past)) - 0.5;
      if (here < left) break;
      pen.beginPath();
      pen.moveTo(here, TOP - 4);
      pen.lineTo(here, height - AXIS);
      pen.stroke();
      const words = past === 0 ? (this.progress.ended || this.held !== null ? clock(until) : "now") : `−${past < 60 ? `${past} s` : `${number(past / 60)} min`}`;
      const wide = pen.measureText(words).width;
      const begin = past === 0 ? width - 1 - wide : here - wide / 2;
      if (begin < left || begin + wide > free) continue;
      pen.textAlign = "left";
      pen.fillText(words, begin, height - AXIS / 2 + 1);
      free = begin - 8;
    }
  }

  depth(pen, x, lists, from, left, width) {
    const most = Math.max(2, lists.length);
    const [bottom, tall] = [TOP - 8, TOP - 12];
    pen.fillStyle = colour("muted");
    pen.textAlign = "left";
    pen.fillText("at once", 0, bottom - tall / 2);
    pen.fillStyle = colour("depth");
    let [time, now] = [from, 0];
    for (const [next, value] of [...depth(lists), [Infinity, 0]]) {
      const end = Math.min(x(next), width - 2);
      if (now > 0) pen.fillRect(x(time), bottom - (now / most) * tall, end - x(time), (now / most) * tall);
      [time, now] = [next, value];
    }
    pen.fillStyle = colour("grid");
    pen.fillRect(left, bottom, width - left, 1);
  }

  lane(pen, lane, top, x, from, until, left, width, progress) {
    const fill = colour(`stage-${lane.stage}`) || colour("muted");
    pen.fillStyle = colour("lane");
    pen.fillRect(left, top, width - left - 2, LANE);
    pen.fillStyle = colour("text");
    pen.textAlign = "left";
    pen.fillText(lane.label, 0, top + LANE / 2 + 1, left - 8);
    const seen = lane.spans.filter((span) => span.end > from && span.start < until);
    // The long ones below, the short ones above them.
    seen.sort((a, b) => b.seconds - a.seconds);
    for (const span of seen) {
      const begin = Math.max(left, x(span.start));
      const wide = Math.max(1, x(Math.min(until, span.end)) - begin);
      const inner = span.name !== lane.stage;
      pen.globalAlpha = inner ? 1 : lane.stage === "update" ? 0.38 : 0.55;
      pen.fillStyle = span.name === "checkpoint" ? colour("muted") : span.name === "evaluation" ? colour("stage-evaluation") : fill;
      const inset = inner && lane.stage !== "sync" ? 4 : 0;
      pen.fillRect(begin, top + inset, wide, LANE - 2 * inset);
      pen.globalAlpha = 1;
      if (!inner && wide > 3) {
        pen.fillStyle = colour("surface");
        pen.fillRect(begin + wide - 0.75, top, 0.75, LANE);
      }
      this.boxes.push({ begin, end: begin + wide, top, bottom: top + LANE, span, lane });
    }
    this.live(pen, lane, top, x, from, until, left, progress, fill);
  }

  /** What has not ended: busy according to the worker's accounts. */
  live(pen, lane, top, x, from, until, left, progress, fill) {
    const worker = lane.worker ? progress.workers.get(lane.worker) : null;
    const busy = worker?.shares.busy ?? 0;
    if (busy <= 0.02) return;
    const covered = lane.spans.reduce((last, span) => Math.max(last, span.end), from);
    const begin = Math.max(left, x(Math.max(covered, worker.time - worker.recent.wall)));
    const wide = x(Math.min(until, worker.time)) - begin;
    if (wide <= 0) return;
    pen.fillStyle = fill;
    pen.globalAlpha = 0.2 + 0.4 * busy;
    pen.fillRect(begin, top + LANE / 2 - 3, wide, 6);
    pen.globalAlpha = 1;
  }

  point(event) {
    const frame = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - frame.left, event.clientY - frame.top];
    const box = this.boxes.filter((each) => x >= each.begin - 2 && x <= each.end + 2 && y >= each.top && y <= each.bottom).at(-1);
    this.tip.hidden = !box;
    if (!box) return;
    const { span, lane } = box;
    const more = [span.rows ? `${span.rows} rows` : "", span.version === undefined ? "" : `version ${span.version}`].filter(Boolean).join(", ");
    say(this.tip, `${span.by ?? lane.key}: ${span.name}, ${seconds(span.seconds)}${more ? `, ${more}` : ""}, at ${clock(span.start)}`);
    const left = Math.max(0, Math.min(x + 12, frame.width - this.tip.offsetWidth));
    this.tip.style.transform = `translate(${left}px, ${box.bottom + 4}px)`;
  }

  describe(work, window) {
    const update = work.get("update") ?? [];
    const others = union([...work].filter(([stage]) => stage !== "update").flatMap(([, intervals]) => intervals.map((one) => [...one])));
    const trained = total(update);
    const shared = total(both(update, others));
    const rollout = total(both(update, work.get("rollout") ?? []));
    let text = this.progress.ended && !this.progress.spans.size ? "What its stages did is not kept any longer." : "Nothing was done in this time.";
    if (trained > 0) {
      const beside = work.has("rollout") ? `, rollout for ${percent(rollout / trained)}` : "";
      text = `The update worked for ${seconds(trained)} of the ${seconds(window)} shown. Other stages worked beside it for ${percent(shared / trained)} of that${beside}.`;
    } else if (total(others) > 0) text = "No update in this time yet.";
    say(this.says, text);
    const rows = ORDER.filter((stage) => work.has(stage)).map((stage) => {
      const spent = total(work.get(stage));
      const beside = stage === "update" ? "" : `${seconds(total(both(update, work.get(stage))))}`;
      return element("tr", {}, element("th", { scope: "row" }, stage), [seconds(spent), percent(spent / window), beside].map((cell) => element("td", {}, cell)));
    });
    this.body.replaceChildren(...rows);
  }
}
