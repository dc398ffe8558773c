/* Numbers and times for a person. What is missing is a dash. */

const NONE = "–";
const missing = (value) => value === null || value === undefined || !Number.isFinite(value);

let table = {};

/** Read the words for the names of numbers, which the service has. */
export async function loadWords() {
  table = await fetch("dashboard/words.json").then((answer) => answer.json());
}

/** The words for the name of a number of steps, alarms or costs. */
export function words(name) {
  return table[name] ?? name.replaceAll("_", " ");
}

export const MINUS = "\u2212";

/** Three significant digits, without an exponent where a person would write none: 0.0312, 12.4, 1,234. */
export function number(value, digits = 3) {
  if (missing(value)) return NONE;
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(digits));
  const size = Math.abs(rounded);
  const text =
    size < 1e-4 || size >= 1e7
      ? rounded.toExponential().replace("e+", "e")
      : size >= 1000
        ? Math.round(value).toLocaleString("en")
        : String(size >= 10 ** digits ? Math.round(value) : rounded);
  return text.replaceAll("-", MINUS);
}

export function fixed(value, places) {
  return missing(value) ? NONE : value.toFixed(places).replace("-", MINUS);
}

/** A number of things in at most six characters: 9,999, 96.1k, 1.23M. */
export function count(value) {
  if (missing(value)) return NONE;
  if (value < 10_000) return Math.round(value).toLocaleString("en");
  const [unit, name] = [[1e3, "k"], [1e6, "M"], [1e9, "G"], [1e12, "T"]].find(([unit]) => value < 999.5 * unit) ?? [1e15, "P"];
  const digits = (value / unit).toPrecision(3);
  return `${name === "k" ? Number(digits) : digits}${name}`;
}

/** Figures with their words, those that there are. */
export function facts(...parts) {
  return parts.filter(Boolean).join(", ");
}

export function percent(share) {
  return missing(share) ? NONE : `${Math.round(100 * share)} %`;
}

/** Seconds as 0:07, 1:15, 1:02:05. */
export function duration(seconds) {
  if (missing(seconds)) return NONE;
  const whole = Math.max(0, Math.round(seconds));
  const two = (value) => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function seconds(value) {
  if (missing(value)) return NONE;
  if (value < 5e-5) return "0 ms";
  return value < 0.1 ? `${number(value * 1000, 2)} ms` : `${number(value)} s`;
}

export function size(bytes) {
  if (missing(bytes)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const at = bytes > 0 ? Math.min(units.length - 1, Math.floor(Math.log2(bytes) / 10)) : 0;
  return `${number(bytes / 2 ** (10 * at))} ${units[at]}`;
}

/** How long it is since `time` (Unix seconds), where there is little room. */
export function since(time, now = Date.now() / 1000) {
  if (missing(time)) return NONE;
  const past = Math.max(0, now - time);
  const [unit, name] = [[1, "s"], [60, "min"], [3600, "h"], [86_400, "d"]].findLast(([unit]) => past >= unit) ?? [1, "s"];
  return `${Math.floor(past / unit)} ${name}`;
}

/** How long ago `time` (Unix seconds) was. */
export function ago(time, now = Date.now() / 1000) {
  if (missing(time)) return NONE;
  return now - time < 5 ? "just now" : `${since(time, now)} ago`;
}

export function clock(time) {
  return missing(time) ? NONE : new Date(time * 1000).toLocaleTimeString("en-GB");
}

export function moment(time) {
  return missing(time) ? NONE : new Date(time * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}
