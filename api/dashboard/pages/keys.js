/* Changes to single keys of a recipe: fields of those that one changes most, and rows for any other key, completed from the recipe's
 * schema. What is wrong with a value stands beside it. */

import { element } from "../element.js";

// What one changes most.
const USUAL = {
  name: "Name",
  "train.steps": "Optimizer steps",
  "train.groups_per_step": "Prompts per step",
  "algorithm.group_size": "Responses per prompt",
  "pipeline.staleness": "Staleness bound",
  "rollout.max_tokens": "Tokens of a response",
  "train.learning_rate": "Learning rate",
  seed: "Seed",
};

/** [dotted key, value] of everything in nested tables. */
export function* flat(tables, prefix = "") {
  for (const [name, value] of Object.entries(tables)) {
    if (value !== null && typeof value === "object" && !Array.isArray(value)) yield* flat(value, `${prefix}${name}.`);
    else yield [prefix + name, value];
  }
}

/** The meaning of every key, by its dotted name, from the recipe's JSON Schema. */
export function meanings(schema) {
  const known = new Map();
  const walk = (prefix, table) => {
    for (const [name, key] of Object.entries(table.properties)) {
      if (key.description) known.set(prefix + name, key.description);
      const ref = key.$ref ?? key.anyOf?.find((one) => one.$ref)?.$ref;
      if (ref) walk(`${prefix}${name}.`, schema.$defs[ref.split("/").pop()]);
    }
  };
  walk("", schema);
  return known;
}

/** A value as it was typed: JSON where it is some, otherwise a text. */
function value(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** What is wrong, and how to mend it. */
export function messages({ wrong, fix }) {
  return [element("p", { class: "wrong" }, wrong), fix ? element("p", { class: "fix" }, fix) : null].filter(Boolean);
}

let fields = 0;

export class Keys {
  /** `without`: usual keys that are not offered; `onChange()` when a row was removed. */
  constructor(meanings, { without = [], onChange = () => {} } = {}) {
    Object.assign(this, { meanings, onChange, more: [] });
    this.grid = element("div", { class: "grid" });
    this.extra = element("div", { class: "extra" });
    this.names = element("datalist", { id: "recipe-keys" });
    this.button = element("button", { type: "button", class: "plain", on: { click: () => this.add().focus() } }, "Change another key");
    this.element = element("div", { class: "keys-changed" }, element("p", { class: "quiet" }, "What is left empty stays as the recipe says."), this.grid, this.extra, this.button, this.names);
    const offered = Object.entries(USUAL).filter(([name]) => !without.includes(name));
    this.usual = new Map(offered.map(([name, label]) => [name, this.field(name, label)]));
  }

  /** Show what the keys are in `recipe`, with all defaults. */
  show(recipe) {
    const all = new Map(flat(recipe));
    this.names.replaceChildren(...[...new Set([...all.keys(), ...this.meanings.keys()])].map((each) => element("option", { value: each, label: this.meanings.get(each) ?? "" })));
    for (const [name, { input }] of this.usual) input.placeholder = all.has(name) ? String(all.get(name)) : "";
    this.recipe = all;
  }

  field(name, label) {
    const id = `field-${(fields += 1)}`;
    const input = element("input", { id, autocomplete: "off", spellcheck: "false", title: this.meanings.get(name) ?? "" });
    const wrong = element("div", { id: `${id}-wrong` });
    this.grid.append(element("div", { class: "field" }, element("label", { for: id }, label, element("code", {}, name)), input, wrong));
    return { input, wrong, key: () => name };
  }

  /** A row for any key. Returns its first input. */
  add(name = "") {
    const id = `field-${(fields += 1)}`;
    const input = element("input", { id, spellcheck: "false", autocomplete: "off" });
    const meaning = element("p", { class: "quiet meaning" });
    const mean = () => {
      const key = named.value.trim();
      const now = this.recipe?.get(key);
      input.placeholder = now === undefined || now === null ? "" : JSON.stringify(now);
      meaning.textContent = this.meanings.get(key) ?? "";
    };
    const named = element("input", { id: `${id}-key`, list: "recipe-keys", value: name, placeholder: "train.dp", spellcheck: "false", autocomplete: "off", on: { input: mean } });
    const wrong = element("div", { id: `${id}-wrong` });
    const take = () => {
      row.remove();
      this.more = this.more.filter((one) => one.input !== input);
      this.button.focus();
      this.onChange();
    };
    const remove = element("button", { type: "button", class: "plain", "aria-label": "Remove this key", on: { click: take } }, "Remove");
    const row = element("div", { class: "row" }, element("div", { class: "field" }, element("label", { for: `${id}-key` }, "Key"), named, meaning), element("div", { class: "field" }, element("label", { for: id }, "Value"), input, wrong), remove);
    this.extra.append(row);
    this.more.push({ input, wrong, key: () => named.value.trim() });
    mean();
    return named;
  }

  get inputs() {
    return [...this.usual.values(), ...this.more];
  }

  /** The values that were given, by key. */
  get changed() {
    const given = this.inputs.map(({ input, key }) => [key(), input.value.trim()]).filter(([name, text]) => name && text !== "");
    return Object.fromEntries(given.map(([name, text]) => [name, name === "name" ? text : value(text)]));
  }

  clear() {
    for (const { input, wrong } of this.inputs) {
      input.removeAttribute("aria-invalid");
      input.removeAttribute("aria-describedby");
      wrong.replaceChildren();
    }
  }

  /** Put an error beside its field. Returns its input; undefined where no field has this key. */
  put(error) {
    const at = this.inputs.find((one) => one.key() === error.field);
    if (!at) return undefined;
    at.wrong.replaceChildren(...messages(error));
    at.input.setAttribute("aria-invalid", "true");
    at.input.setAttribute("aria-describedby", at.wrong.id);
    return at.input;
  }
}
