/* A recipe as text, TOML or JSON, with the numbers of its lines. What is wrong stands at its line; the line at the caret has its key
 * explained, or completed while it is typed. */

import { element, say } from "../element.js";
import { messages } from "./keys.js";

const MOST_OFFERED = 6; // keys, of those that begin as what is typed
const HEADER = /^\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$/;
const KEY = /^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"|'[^']*'))*)\s*=/;

const plain = (key) => key.replaceAll(/["'\s]/g, "");

/** The dotted key of each line of TOML that has one: [[line from 0, key]]. Lines of a text of several are none. */
export function keysOf(text) {
  const places = [];
  const tables = new Map(); // of each list of tables, how many there were
  let section = "";
  let quotes = "";
  for (const [line, written] of text.split("\n").entries()) {
    const ends = written.match(/"""|'''/g) ?? [];
    if (quotes) {
      if (ends.filter((one) => one === quotes).length % 2) quotes = "";
      continue;
    }
    const [, brackets, name] = HEADER.exec(written) ?? [];
    const [, key] = KEY.exec(written) ?? [];
    if (brackets) {
      const path = plain(name);
      const at = brackets === "[[" ? (tables.get(path) ?? -1) + 1 : -1;
      if (at >= 0) tables.set(path, at);
      section = at >= 0 ? `${path}.${at}.` : `${path}.`;
      places.push([line, section.slice(0, -1)]);
    } else if (key) places.push([line, section + plain(key)]);
    if (ends.length % 2) quotes = ends.at(-1);
  }
  return places;
}

/** The line, from 0, of `key`, or of the table around it; null where there is none. */
function lineOf(places, key) {
  for (let path = key; path; path = path.replace(/\.?[^.]*$/, "")) {
    const [line] = places.find(([, each]) => each === path) ?? places.find(([, each]) => each.startsWith(`${path}.`)) ?? [];
    if (line !== undefined) return line;
  }
  return null;
}

/** `value` as TOML writes it. */
function toml(value) {
  if (Array.isArray(value)) return `[${value.map(toml).join(", ")}]`;
  if (value !== null && typeof value === "object") return `{ ${Object.entries(value).map(([key, each]) => `${key} = ${toml(each)}`).join(", ")} }`;
  return JSON.stringify(value);
}

/** TOML that extends the stored recipe `base` with `changes`, by dotted key. */
export function extending(base, changes) {
  const lines = [`extends = ${toml(base)}`];
  const sections = new Map();
  for (const [key, value] of Object.entries(changes)) {
    const [section, ...rest] = key.split(".");
    if (!rest.length) lines.push(`${key} = ${toml(value)}`);
    else if (rest.some((part) => /^\d+$/.test(part))) lines.push(`# ${key} = ${toml(value)} is of a list: write the whole list`);
    else sections.set(section, [...(sections.get(section) ?? []), `${rest.join(".")} = ${toml(value)}`]);
  }
  if (!("name" in changes)) lines.push(`name = ${toml(base)}`);
  for (const [section, of] of sections) lines.push("", `[${section}]`, ...of);
  return `${lines.join("\n")}\n`;
}

export class RecipeText {
  /** `meanings` of keys by name; `onChange()` when a file was opened. */
  constructor(meanings, onChange) {
    Object.assign(this, { meanings, onChange, file: "" });
    this.numbers = element("div", { class: "line-numbers", "aria-hidden": "true" });
    this.text = element("textarea", {
      id: "recipe-text", rows: 18, wrap: "off", spellcheck: "false", autocapitalize: "off", "aria-describedby": "recipe-text-hint recipe-text-wrong",
      on: { input: () => this.changed(), scroll: () => this.follow(), keyup: () => this.hint(), click: () => this.hint(), dragover: (event) => event.preventDefault(), drop: (event) => this.drop(event) },
    });
    this.chosen = element("input", { type: "file", accept: ".toml,.json,text/plain", hidden: true, "aria-label": "A recipe's file", on: { change: () => this.open(this.chosen.files[0]) } });
    this.says = element("p", { class: "quiet", id: "recipe-text-hint" });
    this.offers = element("div", { class: "offers", role: "group", "aria-label": "Keys that begin so" });
    this.wrong = element("ul", { id: "recipe-text-wrong", class: "wrong-lines" });
    this.element = element(
      "div",
      { class: "recipe-text" },
      element("div", { class: "line" }, element("label", { for: "recipe-text", class: "label" }, "Recipe as TOML"), element("button", { type: "button", class: "plain end", on: { click: () => this.chosen.click() } }, "Open a file"), this.chosen),
      element("div", { class: "editor" }, this.numbers, this.text),
      element("div", { class: "hints" }, this.says, this.offers),
      this.wrong,
    );
    this.lines = new Set();
    this.number();
  }

  get value() {
    return this.text.value;
  }

  set value(text) {
    this.text.value = text;
    this.changed();
  }

  get isJson() {
    return this.value.trimStart().startsWith("{");
  }

  /** The body of a submission. Raises SyntaxError for what begins like JSON and is none. */
  get body() {
    if (this.isJson) return { recipe: JSON.parse(this.value) };
    const named = /^\s*name\s*=/m.test(this.value);
    return { toml: this.value, ...(named || !this.file ? {} : { overrides: { name: this.file } }) };
  }

  async open(file) {
    if (!file) return;
    this.file = file.name.replace(/\.\w+$/, "").replaceAll(/[^\w.-]+/g, "-").replace(/^[._-]+/, "");
    this.value = await file.text();
    this.chosen.value = "";
    this.text.focus();
    this.onChange();
  }

  drop(event) {
    const [file] = event.dataTransfer.files;
    if (!file) return;
    event.preventDefault();
    this.open(file);
  }

  changed() {
    this.places = this.isJson ? [] : keysOf(this.value);
    this.number();
    this.hint();
  }

  number() {
    const many = this.text.value.split("\n").length;
    if (this.numbers.children.length !== many) this.numbers.replaceChildren(...Array.from({ length: many }, (_, line) => element("span", {}, String(line + 1))));
    [...this.numbers.children].forEach((each, line) => each.classList.toggle("bad", this.lines.has(line)));
    this.follow();
  }

  follow() {
    this.numbers.scrollTop = this.text.scrollTop;
  }

  /** Explain the key of the line at the caret, or offer those that begin as it does. */
  hint() {
    const before = this.value.slice(0, this.text.selectionStart);
    const line = before.split("\n").length - 1;
    const [, key = ""] = (this.places ?? []).find(([at]) => at === line) ?? [];
    say(this.says, key && this.meanings.has(key) ? `${key}: ${this.meanings.get(key)}` : "");
    const typed = before.slice(before.lastIndexOf("\n") + 1).trim();
    const rest = this.value.slice(this.text.selectionStart).split("\n", 1)[0];
    const header = (this.places ?? []).filter(([at]) => at < line).map(([at]) => HEADER.exec(this.value.split("\n")[at])).filter(Boolean).at(-1);
    const section = header && header[1] === "[" ? `${plain(header[2])}.` : "";
    const fits = /^[\w.-]+$/.test(typed) && !rest.trim() ? [...this.meanings.keys()].filter((each) => each.startsWith(section + typed) && each !== section + typed) : [];
    const names = fits.slice(0, MOST_OFFERED).map((each) => each.slice(section.length));
    const offer = (name) => element("button", { type: "button", title: this.meanings.get(section + name), on: { click: () => this.complete(typed, name) } }, name);
    this.offers.replaceChildren(...names.map(offer));
  }

  complete(typed, name) {
    const at = this.text.selectionStart;
    this.text.setRangeText(`${name.slice(typed.length)} = `, at, at, "end");
    this.text.focus();
    this.changed();
    this.onChange();
  }

  clear() {
    this.text.removeAttribute("aria-invalid");
    this.wrong.replaceChildren();
    this.lines.clear();
    this.number();
  }

  /** Put an error at its line. Returns the text. */
  put({ field, wrong, fix }) {
    const [, at] = /at line (\d+)/.exec(wrong) ?? [];
    const end = /at end of document/.test(wrong) ? this.value.split("\n").length - 1 : null;
    const line = at ? Number(at) - 1 : (end ?? lineOf(this.places ?? [], field));
    const go = () => this.go(line);
    const where = line === null ? null : element("button", { type: "button", class: "plain", on: { click: go } }, `Line ${line + 1}`);
    this.wrong.append(element("li", { class: "at-field" }, where, element("code", {}, field), ...messages({ wrong, fix })));
    this.text.setAttribute("aria-invalid", "true");
    if (line !== null) this.lines.add(line);
    this.number();
    return this.text;
  }

  /** Select a line. */
  go(line) {
    const lines = this.value.split("\n");
    const from = lines.slice(0, line).reduce((sum, each) => sum + each.length + 1, 0);
    this.text.focus();
    this.text.setSelectionRange(from, from + lines[line].length);
    this.text.scrollTop = Math.max(0, (this.text.scrollHeight / lines.length) * (line - 4));
    this.hint();
  }
}
