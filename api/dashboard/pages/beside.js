/* Two samples side by side: what is equal is said once, what differs is marked.
 *
 *    prompts, responses ──▶ words ──▶ difference ──▶ marks        figures ──▶ a table, with ≠ where two differ
 */

import { element } from "../element.js";
import { number } from "../format.js";
import { table } from "./details.js";

const WORDS = /\s+|[\p{L}\p{N}_]+|[^\s]/gu;
const MOST_CELLS = 4_000_000; // of the table of common subsequences; beyond that all between the common ends is marked

/** A sample's columns as one row, as the server's conditions read them. */
export function columnsOf({ fields, columns, rewards, ...sample }) {
  const plain = Object.entries(sample).filter(([, value]) => typeof value !== "object");
  const length = (sample.versions ?? []).reduce((sum, [, tokens]) => sum + tokens, 0);
  return { ...fields, ...columns, ...rewards, length, age: sample.staleness, ...Object.fromEntries(plain) };
}

/** [[version, tokens], …] in words. */
export function made(versions) {
  return (versions ?? []).map(([version, tokens]) => (version < 0 ? `${tokens} observed` : `${tokens} by v${version}`)).join(", ");
}

/** The value of a column on one line. */
export function shown(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "number") return number(value);
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.replaceAll(/\s+/g, " ").trim();
}

export function place({ step, group, place }) {
  return `step ${step}, group ${group}, place ${place}`;
}

/** [[text, whether only this side has it], …] of each of two texts, by whole words: the fewest that differ. */
export function difference(left, right) {
  const [a, b] = [left, right].map((text) => String(text ?? "").match(WORDS) ?? []);
  let begin = 0;
  while (begin < a.length && begin < b.length && a[begin] === b[begin]) begin += 1;
  let end = 0;
  while (end < a.length - begin && end < b.length - begin && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const common = inBoth(a.slice(begin, a.length - end), b.slice(begin, b.length - end));
  return [a, b].map((words, side) =>
    pieces(words, (at) => at >= begin && at < words.length - end && !common[side].has(at - begin)),
  );
}

/** The places of a longest common subsequence in each of two lists of words. */
function inBoth(a, b) {
  const places = [new Set(), new Set()];
  const width = b.length + 1;
  if ((a.length + 1) * width > MOST_CELLS) return places;
  const lengths = new Uint16Array((a.length + 1) * width); // of the rests that begin at i and j
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      const at = i * width + j;
      lengths[at] = a[i] === b[j] ? lengths[at + width + 1] + 1 : Math.max(lengths[at + width], lengths[at + 1]);
    }
  }
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) {
      places[0].add(i++);
      places[1].add(j++);
    } else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return places;
}

function pieces(words, isMarked) {
  const merged = [];
  words.forEach((word, at) => {
    const marked = isMarked(at);
    if (merged.at(-1)?.[1] === marked) merged.at(-1)[0] += word;
    else merged.push([word, marked]);
  });
  return merged;
}

/** A text of a sample, or of two that have the same, which can be scrolled by keys. */
export function text(label, content, samples, more = []) {
  const of = [label, ...samples.map(place).filter((where) => !label.includes(where)), ...more].join(", ");
  return element("div", { class: "text" }, element("h3", {}, label), element("pre", { tabindex: "0", role: "region", "aria-label": of, dir: "auto" }, content ?? ""));
}

/** The response as [[text, attributes of its span, null: none], …]: observations between its turns are pale, turns have a colour for
 * each policy version. */
export function parted({ response, segments, masked }) {
  if (!segments?.length) {
    if (!masked?.length) return [[response ?? "", null]];
    return masked.map(([isTrained, tokens, text]) => [text, isTrained ? null : { class: "quiet", title: `${tokens} tokens, not trained` }]);
  }
  const piece = ([version, tokens, text]) => [text, { class: `by by-${version % 2}`, title: `v${version}, ${tokens} tokens` }];
  return segments.flatMap(({ generated, pieces, text, branch, shares }) => [
    ...(begins(branch, shares) ? [[`\nbranch ${branch} `, { class: "branch", title: behind(shares) }]] : []),
    ...(generated ? pieces.map(piece) : [[text, { class: "quiet", title: "observed, not trained" }]]),
  ]);
}

/** Whether a part is the first one of a branch. */
export const begins = (branch, shares) => branch > 0 && shares !== undefined && shares !== null;
export const behind = (tokens) => `goes on behind ${tokens} tokens of the response`;

const joined = (parts) => parts.map(([text]) => text).join("");

/** The elements of `parts`; `pieces` of their text, as of `difference`, say what is marked. */
export function drawn(parts, pieces = [[joined(parts), false]]) {
  let piece = 0;
  let begin = 0; // in it
  return parts.flatMap(([text, attributes]) => {
    const content = [];
    for (let at = 0; at < text.length; ) {
      const [words, isMarked] = pieces[piece];
      const part = text.slice(at, at + words.length - begin);
      content.push(isMarked ? element("mark", {}, part) : part);
      at += part.length;
      begin += part.length;
      if (begin === words.length) [piece, begin] = [piece + 1, 0];
    }
    return attributes ? element("span", attributes, content) : content;
  });
}

/** `sides`: the parts of a text of each of two `samples`. */
function marked(label, samples, sides) {
  if (JSON.stringify(sides[0]) === JSON.stringify(sides[1])) return [text(`${label}, the same in both`, drawn(sides[0]), samples, ["compared"])];
  return difference(...sides.map(joined)).map((pieces, at) => text(`${label}, ${place(samples[at])}`, drawn(sides[at], pieces), [samples[at]], ["compared"]));
}

/** Two samples; null for one that is not there. */
export function beside(left, right) {
  if (!left || !right) {
    const only = left ?? right;
    const empty = element("p", { class: "quiet" }, "No sample fits here.");
    const whole = element("div", {}, text(`Prompt, ${place(only)}`, only.prompt, [only]), text(`Response, ${place(only)}`, drawn(parted(only)), [only]));
    return element("section", { class: "beside texts", "aria-label": place(only) }, left ? [whole, empty] : [empty, whole]);
  }
  const rows = [left, right].map((sample) => ({ ...columnsOf(sample), ended: sample.ending || (sample.truncated ? "cut at the limit" : ""), "made by": made(sample.versions) }));
  const hidden = ["prompt", "response", "prompt_id", "step", "group", "place", "staleness", "ending", "truncated"];
  const names = [...new Set(["reward", ...Object.keys(left.rewards ?? {}), "advantage", "age", "tokens", "length", "made by", "ended", ...rows.flatMap(Object.keys)])];
  const figures = names
    .filter((name) => !hidden.includes(name) && rows.some((row) => ![undefined, null, ""].includes(row[name])))
    .map((name) => {
      const values = rows.map((row) => shown(row[name] === "" ? null : row[name]));
      const differs = values[0] !== values[1];
      return element("tr", { class: differs ? "differs" : null }, element("th", { scope: "row" }, name), element("td", {}, values[0]), element("td", {}, differs ? "≠" : ""), element("td", {}, values[1]));
    });
  const label = `${place(left)} beside ${place(right)}`;
  return element(
    "section",
    { class: "beside", "aria-label": label },
    element("div", { class: "texts" }, marked("Prompt", [left, right], [left, right].map(({ prompt }) => [[prompt ?? "", null]]))),
    element("div", { class: "texts" }, marked("Response", [left, right], [left, right].map(parted))),
    table(`Figures: ${label}`, ["figure", place(left), "≠", place(right)], element("tbody", {}, figures)),
  );
}

/** Pairs of two lists of samples: those with the same prompt first, then by their order; null where a list has no more. */
export function paired(left, right) {
  const rest = [...right];
  const pairs = left.map((sample) => {
    const at = rest.findIndex((other) => other.prompt_id === sample.prompt_id);
    return [sample, at < 0 ? null : rest.splice(at, 1)[0]];
  });
  const [same, alone] = [pairs.filter(([, other]) => other), pairs.filter(([, other]) => !other)];
  const others = alone.map(([sample]) => [sample, rest.shift() ?? null]);
  return [...same, ...others, ...rest.map((other) => [null, other])];
}
