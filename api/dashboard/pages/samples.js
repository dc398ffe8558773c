/* The samples browser: prompts and responses with what was computed of them, by reward, step and staleness. */

import { announce, element, say } from "../element.js";
import { fixed, number, seconds } from "../format.js";
import { table } from "./details.js";

const PAGE = 25;
const FIELDS = [
  ["step", "step", 0, 1],
  ["reward_min", "reward from", null, "any"],
  ["reward_max", "to", null, "any"],
  ["staleness_min", "staleness from", 0, 1],
];

/** [[version, tokens], …] in words. */
function made(versions) {
  return (versions ?? []).map(([version, tokens]) => (version < 0 ? `${tokens} observed` : `${tokens} by v${version}`)).join(", ");
}

/** The response as text; observations between its turns are pale, turns have a colour for each policy version. */
function response({ response, segments }) {
  if (!segments?.length) return response;
  const piece = ([version, tokens, text]) => element("span", { class: `by by-${version % 2}`, title: `v${version}, ${tokens} tokens` }, text);
  return segments.flatMap(({ generated, pieces, text, branch, shares }) => [
    begins(branch, shares) ? element("span", { class: "branch", title: behind(shares) }, `\nbranch ${branch} `) : null,
    ...(generated ? pieces.map(piece) : [element("span", { class: "quiet", title: "observed, not trained" }, text)]),
  ]);
}

/** Whether a part is the first one of a branch. */
const begins = (branch, shares) => branch > 0 && shares !== undefined && shares !== null;
const behind = (tokens) => `goes on behind ${tokens} tokens of the response`;

/** A trajectory part by part: its tokens, who made them, what they earned, where their time went. */
function parts({ segments }) {
  let turns = 0;
  const rows = segments.flatMap(({ generated, tokens, text, pieces, calls, reward, seconds: times, branch, shares }) => {
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
  return table("Parts of the trajectory", ["", "tokens", "by", "reward", "engine", "waiting", "environment", "text", "calls"], element("tbody", {}, rows));
}

export class Samples {
  constructor(service, run) {
    Object.assign(this, { service, run, next: "", shown: 0, asked: 0 });
    this.form = element(
      "form",
      { class: "fields", "aria-label": "Filter the samples", on: { submit: (event) => (event.preventDefault(), this.load()) } },
      FIELDS.map(([name, label, min, step]) =>
        element("label", {}, element("span", {}, label), element("input", { name, type: "number", min, step, inputmode: "decimal", placeholder: "any" })),
      ),
      element("button", { type: "submit" }, "Show"),
    );
    this.note = element("p", { class: "quiet", role: "status" });
    this.list = element("ol", { class: "samples" });
    this.more = element("button", { type: "button", hidden: true, on: { click: () => this.load(true) } }, "More samples");
    this.element = element("div", {}, this.form, this.note, this.list, this.more);
  }

  show() {
    if (!this.asked) this.load();
  }

  async load(more = false) {
    const asked = (this.asked += 1);
    const query = { ...Object.fromEntries(new FormData(this.form)), limit: PAGE, after: more ? this.next : "" };
    say(this.note, "Reading…");
    try {
      const page = await this.service.run(this.run, "/samples", { query });
      if (asked !== this.asked) return;
      if (!more) {
        this.list.replaceChildren();
        this.shown = 0;
      }
      const entries = page.samples.map((sample) => this.entry(sample));
      this.list.append(...entries);
      this.shown += entries.length;
      this.next = page.next;
      this.more.hidden = !page.next;
      say(this.note, this.shown ? `${this.shown} samples${page.next ? ", and more" : ""}` : "No sample fits.");
      if (more) {
        announce(`${entries.length} more samples`);
        entries[0]?.querySelector("summary").focus();
      }
    } catch (problem) {
      if (asked === this.asked) say(this.note, problem.message);
    }
  }

  entry(sample) {
    const better = Math.sign(sample.advantage ?? 0); // than the others of its group
    const [kind, glyph, words] = better > 0 ? ["high", "▲", "better than its group"] : better < 0 ? ["low", "▼", "worse than its group"] : ["", "", ""];
    const figure = (label, value) => element("div", {}, element("dt", {}, label), element("dd", {}, value));
    const text = (label, value) => element("div", { class: "text" }, element("h4", {}, label), element("pre", { tabindex: "0", role: "region", "aria-label": label, dir: "auto" }, value ?? ""));
    const rewards = Object.entries(sample.rewards ?? {});
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
          element("span", { class: "excerpt", dir: "auto" }, element("b", {}, excerpt(sample.prompt)), " ", excerpt(sample.response)),
        ),
        element("div", { class: "texts" }, text("Prompt", sample.prompt), text("Response", response(sample))),
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
          figure("group", `${sample.group}, place ${sample.place}`),
        ),
      ),
    );
  }
}

function excerpt(text) {
  const line = String(text ?? "").replaceAll(/\s+/g, " ").trim();
  return line.length > 160 ? `${line.slice(0, 159)}…` : line;
}
