/* The samples browser: prompts and responses with what was computed of them, by any filter of the server, and two side by side.
 *
 *    fields ◀──▶ #/runs/ID/samples?step=3&grep=…        ──▶ GET /v1/runs/ID/samples ──▶ a list, or two steps beside each other
 *    two chosen samples ──▶ pair=3.1.0,9.4.2            ──▶ beside.js
 */

import { announce, element, say } from "../element.js";
import { fixed, number, seconds } from "../format.js";
import { begins, behind, beside, columnsOf, drawn, made, paired, parted, place, shown, text } from "./beside.js";
import { table } from "./details.js";

const PAGE = 25;
const PAIRED = 100; // of each of two steps
const MOST_PAGES = 8; // that are read until one has a sample
const WHOLE = { type: "number", min: 0, step: 1, inputmode: "numeric", placeholder: "any" };
const ANY = { type: "number", step: "any", inputmode: "decimal", placeholder: "any" };
const COUNT = { ...WHOLE, max: 100, placeholder: "–" };
const TEXT = { type: "text", autocomplete: "off", spellcheck: "false", maxlength: 500 };
// Names of the server's query, but for `beside`, which is another step.
const FIELDS = [
  ["grep", "text", { ...TEXT, placeholder: "in prompt or response" }],
  ["step", "step", WHOLE],
  ["beside", "beside step", WHOLE],
  ["best", "best", COUNT],
  ["worst", "worst", COUNT],
];
const FURTHER = [
  ["group", "group", WHOLE],
  ["reward_min", "reward from", ANY],
  ["reward_max", "reward to", ANY],
  ["staleness_min", "staleness from", WHOLE],
  ["failed", "failed reward", ["any", "yes", "no"]],
  ["truncated", "cut", ["any", "yes", "no"]],
  ["where", "conditions", { ...TEXT, placeholder: "length>400, exact<0.5" }],
  ["prompt_id", "prompt id", { ...TEXT, maxlength: 12, placeholder: "any" }],
  ["columns", "columns to show", { ...TEXT, placeholder: "length, tokens" }],
];
const YES_OR_NO = { yes: "true", no: "false" };

/** A trajectory part by part: its tokens, who made them, what they earned, where their time went. */
function parts(sample) {
  let turns = 0;
  const rows = sample.segments.flatMap(({ generated, tokens, text, pieces, calls, reward, seconds: times, branch, shares }) => {
    const words = (calls ?? []).map(({ name, arguments: given }) => `${name}(${JSON.stringify(given)})`).join(" ");
    const [by, earned, spent] = generated
      ? [pieces.map(([version]) => `v${version}`).join(" "), number(reward), ["engine", "waiting", "environment"].map((name) => seconds(times[name] ?? null))]
      : ["", "", ["", "", ""]];
    const cells = [number(tokens), by, earned, ...spent, excerpt(text), words];
    const row = element("tr", {}, element("th", { scope: "row" }, generated ? `turn ${(turns += 1)}` : "observed"), cells.map((cell) => element("td", {}, cell)));
    if (!begins(branch, shares)) return [row];
    const head = element("th", { scope: "row" }, `branch ${branch}`);
    return [element("tr", {}, head, element("td", { colspan: 8 }, behind(shares))), row];
  });
  return table(`Parts of the trajectory, ${place(sample)}`, ["part", "tokens", "by", "reward", "engine", "waiting", "environment", "text", "calls"], element("tbody", {}, rows));
}

function field([name, label, kind]) {
  const control = Array.isArray(kind)
    ? element("select", { name }, kind.map((word) => element("option", { value: YES_OR_NO[word] ?? "" }, word)))
    : element("input", { name, ...kind });
  return element("label", {}, element("span", {}, label), control);
}

export class Samples {
  constructor(service, run) {
    Object.assign(this, { service, run, next: "", shown: 0, asked: 0, looked: 0, chosen: [] });
    this.further = element("details", { class: "further" }, element("summary", {}, "More filters and columns"), element("div", { class: "fields" }, FURTHER.map(field)));
    this.form = element(
      "form",
      { class: "filters", "aria-label": "Filter the samples", on: { submit: (event) => (event.preventDefault(), this.load()) } },
      element("div", { class: "fields" }, FIELDS.map(field), element("button", { type: "submit" }, "Show"), element("button", { type: "button", class: "plain", on: { click: () => this.clear() } }, "Clear")),
      this.further,
    );
    this.note = element("p", { class: "quiet", role: "status" });
    this.pair = element("div", { class: "pair" });
    this.list = element("ol", { class: "samples" });
    this.more = element("button", { type: "button", hidden: true, on: { click: () => this.load(true) } }, "More samples");
    this.element = element("div", {}, this.form, this.pair, this.note, this.list, this.more);
  }

  show() {
    if (this.asked) return;
    const [, what, id, view] = location.hash.split("/");
    const kept = what === "runs" && decodeURIComponent(id ?? "") === this.run && view?.startsWith("samples?");
    const asked = new URLSearchParams(kept ? view.slice("samples?".length) : "");
    for (const control of this.controls) control.value = asked.get(control.name) ?? "";
    this.further.open = FURTHER.some(([name]) => asked.get(name));
    this.restore(asked.get("pair"));
    this.load();
  }

  get controls() {
    return [...this.form.elements].filter(({ name }) => name);
  }

  /** What the fields say: for the address, and without `beside` for the server. */
  get fields() {
    return Object.fromEntries(this.controls.map(({ name, value }) => [name, value.trim()]).filter(([, value]) => value));
  }

  /** Keep what is shown in the address, so that a reload or a link shows it again. */
  keep() {
    const kept = new URLSearchParams(this.fields);
    if (this.chosen.length === 2) kept.set("pair", this.chosen.map(({ step, group, place }) => [step, group, place].join(".")).join(","));
    const hash = `#/runs/${encodeURIComponent(this.run)}${kept.size ? `/samples?${kept}` : ""}`;
    if (location.hash.startsWith("#/runs/") && location.hash !== hash) history.replaceState(null, "", hash);
  }

  clear() {
    this.form.reset();
    this.chosen = [];
    this.drawPair();
    this.load();
  }

  async load(more = false) {
    const asked = (this.asked += 1);
    const { beside: other, ...query } = this.fields;
    this.columns = (query.columns ?? "").split(",").map((name) => name.trim()).filter(Boolean);
    this.keep();
    say(this.note, "Reading…");
    try {
      if (other !== undefined && !more) return await this.steps(asked, query, other);
      if (!more) this.looked = 0;
      const page = await this.page({ ...query, limit: PAGE, after: more ? this.next : "" }, () => asked === this.asked);
      if (asked !== this.asked) return;
      if (!more) {
        this.list.className = "samples";
        this.list.replaceChildren();
        this.shown = 0;
      }
      const entries = page.samples.map((sample) => this.entry(sample));
      this.list.append(...entries);
      this.shown += entries.length;
      this.next = page.next;
      this.more.hidden = !page.next;
      this.says(page);
      if (more) {
        announce(`${entries.length} more samples`);
        entries[0]?.querySelector("summary").focus();
      }
    } catch (problem) {
      const { message, fix, errors } = problem;
      const texts = new Set([message, ...(errors ?? []).flatMap((one) => [one.wrong, one.fix]), fix]);
      if (asked === this.asked) say(this.note, [...texts].filter(Boolean).join(" – "));
    }
  }

  /** The first page that has a sample, or the last one that was looked at. */
  async page(query, wanted = () => true) {
    let page = { samples: [], next: query.after };
    let first = Infinity;
    let last = -Infinity;
    for (let pages = 0; pages < MOST_PAGES && !page.samples.length && (page.next || !pages) && wanted(); pages += 1) {
      page = await this.service.run(this.run, "/samples", { query: { ...query, after: page.next } });
      this.looked += page.looked ?? 0;
      [first, last] = [Math.min(first, page.steps?.[0] ?? first), Math.max(last, page.steps?.[1] ?? last)];
    }
    return { ...page, steps: Number.isFinite(first) ? [first, last] : null };
  }

  says({ next, steps, dropped }) {
    const { best, worst } = this.fields;
    if (!this.looked) return say(this.note, "No sample is kept, or none of this step any more.");
    const samples = this.shown ? `${this.shown} samples` : "No sample fits";
    const rest = next ? (best || worst ? "; older ones were not looked at" : ", and more") : "";
    const lost = Object.entries(dropped ?? {}).map(([name, responses]) => `. ${responses} responses that ${name} could not score were dropped with their groups: the log of flow-0 has why`);
    say(this.note, `${samples}, of ${this.looked} looked at, down to step ${steps?.[0] ?? "–"}${rest}${lost.join("")}`);
  }

  /** The samples of two steps, pair by pair. */
  async steps(asked, { step = "", ...query }, other) {
    this.looked = 0;
    const sides = await Promise.all([step, other].map((number) => this.page({ ...query, step: number, limit: PAIRED })));
    if (asked !== this.asked) return;
    const pairs = paired(...sides.map(({ samples }) => samples));
    this.list.className = "pairs";
    this.list.replaceChildren(...pairs.map(([left, right]) => element("li", {}, beside(left, right))));
    this.shown = pairs.length;
    this.more.hidden = true;
    say(this.note, pairs.length ? `${pairs.length} pairs of samples; those of one prompt are beside each other` : "No sample of these steps fits.");
  }

  /** Choose a sample to stand beside another one, or do not any more. */
  choose(sample) {
    const others = this.chosen.filter((one) => place(one) !== place(sample));
    this.chosen = others.length < this.chosen.length ? others : [...this.chosen, sample].slice(-2);
    this.drawPair();
    this.keep();
    if (this.chosen.length < 2) return;
    this.pair.scrollIntoView({ block: "nearest" });
    announce(`${this.chosen.map(place).join(" beside ")}`);
  }

  drawPair() {
    const [left, right] = this.chosen;
    const close = element("button", { type: "button", on: { click: () => ((this.chosen = []), this.drawPair(), this.keep()) } }, right ? "Close" : "Cancel");
    this.pair.replaceChildren(
      ...(right ? [beside(left, right), close] : left ? [element("p", {}, `Compare ${place(left)} with another sample: choose it in the list. `), close] : []),
    );
    for (const button of this.list.querySelectorAll("[data-place]")) button.setAttribute("aria-pressed", String(this.chosen.some((one) => place(one) === button.dataset.place)));
  }

  /** Show the pair that the address names. */
  async restore(pair) {
    const places = (pair ?? "").split(",").map((text) => text.split(".").map(Number));
    if (places.length !== 2 || places.flat().length !== 6 || places.flat().some((each) => !Number.isInteger(each))) return;
    try {
      const pages = await Promise.all(places.map(([step, group]) => this.service.run(this.run, "/samples", { query: { step, group, limit: 200 } })));
      const samples = pages.map(({ samples }, at) => samples.find((one) => one.place === places[at][2]));
      if (samples.every(Boolean)) this.chosen = samples;
      this.drawPair();
      this.keep();
    } catch {
      // the list says what is wrong
    }
  }

  /** Show the samples of one prompt in all steps. */
  samePrompt({ prompt_id: id }) {
    this.form.reset();
    this.form.elements.namedItem("prompt_id").value = id;
    this.further.open = true;
    this.load();
    this.form.scrollIntoView({ block: "nearest" });
  }

  entry(sample) {
    const better = Math.sign(sample.advantage ?? 0); // than the others of its group
    const [kind, glyph, words] = better > 0 ? ["high", "▲", "better than its group"] : better < 0 ? ["low", "▼", "worse than its group"] : ["", "", ""];
    const figure = (label, value) => element("div", {}, element("dt", {}, label), element("dd", {}, value));
    const rewards = Object.entries(sample.rewards ?? {});
    const failed = sample.failed ?? [];
    const further = Object.entries({ ...sample.fields, ...sample.columns });
    const row = columnsOf(sample);
    const columns = (this.columns ?? []).map((name) => `${name} ${shown(row[name])}`).join(", ");
    return element(
      "li",
      {},
      element(
        "details",
        {},
        element(
          "summary",
          {},
          element("span", { class: `reward ${kind}`, title: words }, fixed(sample.reward, 2), element("i", { "aria-hidden": "true" }, glyph), element("span", { class: "hidden" }, words)),
          element("span", { class: "where" }, sample.step === null || sample.step === undefined ? "in flight" : `step ${sample.step}`),
          element("span", { class: "excerpt", dir: "auto" }, columns ? element("span", { class: "columns" }, columns, " ") : null, element("b", {}, excerpt(sample.prompt)), " ", excerpt(sample.response)),
        ),
        element("div", { class: "texts" }, text("Prompt", sample.prompt, [sample]), text("Response", drawn(parted(sample)), [sample])),
        sample.segments?.length ? parts(sample) : null,
        element(
          "dl",
          { class: "figures" },
          figure("reward", number(sample.reward)),
          rewards.length > 1 ? rewards.map(([name, value]) => figure(name, number(value))) : null,
          figure("advantage", number(sample.advantage)),
          figure("staleness", number(sample.staleness)),
          figure("tokens", `${number(sample.tokens)}${sample.truncated ? " (cut at the limit)" : ""}`),
          figure("made by", made(sample.versions) || "–"),
          sample.ending ? figure("ended", sample.ending) : null,
          failed.length ? figure("failed", failed.join(", ")) : null,
          figure("group", `${sample.group}, place ${sample.place}`),
          further.map(([name, value]) => figure(name, excerpt(shown(value)))),
        ),
        element(
          "div",
          { class: "buttons" },
          element("button", { type: "button", "data-place": place(sample), "aria-pressed": String(this.chosen.some((one) => place(one) === place(sample))), on: { click: () => this.choose(sample) } }, "Compare"),
          sample.prompt_id ? element("button", { type: "button", on: { click: () => this.samePrompt(sample) } }, "Same prompt in other steps") : null,
        ),
      ),
    );
  }
}

function excerpt(text) {
  const line = String(text ?? "").replaceAll(/\s+/g, " ").trim();
  return line.length > 160 ? `${line.slice(0, 159)}…` : line;
}
