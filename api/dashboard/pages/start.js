/* The form that starts a run: a stored recipe with some keys changed, or a recipe as JSON. What is wrong stands beside its field. */

import { flat } from "./details.js";
import { element, say } from "../element.js";
import { count, size } from "../format.js";

// What one changes most; every other key can be added.
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

/** A value as it was typed: JSON where it is some, otherwise a text. */
export function value(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function key() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** What follows from a recipe, in a sentence. */
function follows(plan) {
  const held = plan.train_bytes + plan.rollout_bytes + plan.reference_bytes + plan.slot_bytes + plan.copy_bytes;
  const memory = `${size(plan.arena_bytes)} for samples${held ? ` and ${size(held)} for weights` : ""}`;
  return `A step trains ${count(plan.rows_per_step)} samples, at most ${count(plan.rows_in_flight)} are in flight, and it takes ${memory}.`;
}

/** The meaning of every key, by its dotted name, from the recipe's JSON Schema. */
export function meanings(schema) {
  const found = new Map();
  const walk = (prefix, table) => {
    for (const [name, key] of Object.entries(table.properties)) {
      if (key.description) found.set(prefix + name, key.description);
      const ref = key.$ref ?? key.anyOf?.find((one) => one.$ref)?.$ref;
      if (ref) walk(`${prefix}${name}.`, schema.$defs[ref.split("/").pop()]);
    }
  };
  walk("", schema);
  return found;
}

let fields = 0;

export class Start {
  /** `onStarted(run)` with the run's record. */
  constructor(service, onStarted) {
    Object.assign(this, { service, onStarted, recipes: [], recipe: {}, meanings: new Map(), key: key(), usual: new Map(), more: [] });
    this.title = element("h1", { tabindex: "-1" }, "New run");
    this.wrong = element("div", { class: "problems", tabindex: "-1", hidden: true });
    this.select = element("select", { id: "recipe-name", on: { change: () => this.choose().catch((problem) => this.problems(problem)) } });
    this.described = element("p", { class: "quiet", id: "recipe-says" });
    this.select.setAttribute("aria-describedby", "recipe-says");
    this.grid = element("div", { class: "grid" });
    this.extra = element("div", { class: "extra" });
    this.keys = element("datalist", { id: "recipe-keys" });
    this.text = element("textarea", { id: "recipe-text", rows: 18, spellcheck: "false", "aria-describedby": "recipe-text-wrong", placeholder: '{"name": "mine", "model": {"source": "tiny"}, …}' });
    this.textWrong = element("div", { id: "recipe-text-wrong" });
    const mode = (name, label, checked) => element("label", {}, element("input", { type: "radio", name: "mode", value: name, checked, on: { change: () => this.mode(name) } }), element("span", {}, label));
    this.stored = element(
      "div",
      {},
      element("label", { for: "recipe-name", class: "field" }, element("span", {}, "Recipe"), this.select),
      this.described,
      element("h2", {}, "Changes to it"),
      element("p", { class: "quiet" }, "What is left empty stays as the recipe says."),
      this.grid,
      this.extra,
      element("button", { type: "button", class: "plain", on: { click: () => this.add().focus() } }, "Change another key"),
      this.keys,
    );
    this.pasted = element("div", { hidden: true }, element("label", { for: "recipe-text", class: "field" }, element("span", {}, "Recipe as JSON"), this.text), this.textWrong);
    this.checkButton = element("button", { type: "button", on: { click: () => this.send(true) } }, "Check");
    this.startButton = element("button", { type: "submit", class: "primary" }, "Start the run");
    this.form = element(
      "form",
      { class: "card start", novalidate: true, on: { submit: (event) => (event.preventDefault(), this.send(false)), input: () => (this.key = key()) } },
      element("fieldset", { class: "segments" }, element("legend", { class: "hidden" }, "Where the recipe comes from"), mode("stored", "Stored recipe", true), mode("pasted", "JSON", false)),
      this.wrong,
      this.stored,
      this.pasted,
      element("div", { class: "buttons" }, this.checkButton, this.startButton),
    );
    this.element = element("div", { class: "page narrow" }, this.title, this.form);
    this.now = "stored";
  }

  async load() {
    try {
      const [{ recipes }, schema] = await Promise.all([this.service.json("v1/recipes"), this.service.json("v1/recipes/schema")]);
      this.recipes = recipes;
      this.meanings = meanings(schema);
      this.select.replaceChildren(...this.recipes.map(({ name }) => element("option", { value: name }, name)));
      if (this.recipes.some(({ name }) => name === "mock")) this.select.value = "mock";
      await this.choose();
    } catch (problem) {
      this.problems(problem);
    }
  }

  mode(name) {
    this.now = name;
    this.stored.hidden = name !== "stored";
    this.pasted.hidden = name !== "pasted";
    if (name === "pasted" && !this.text.value && this.recipe.name) this.text.value = JSON.stringify(this.recipe, null, 2);
    this.clear();
  }

  async choose() {
    const name = this.select.value;
    say(this.described, this.recipes.find((recipe) => recipe.name === name)?.description ?? "");
    this.clear();
    const found = await this.complete(name);
    if (name !== this.select.value) return;
    this.recipe = found.recipe;
    const all = new Map(flat(found.recipe));
    this.keys.replaceChildren(...[...all.keys()].map((each) => element("option", { value: each, label: this.meanings.get(each) ?? "" })));
    for (const [each, label] of Object.entries(USUAL)) {
      const field = this.usual.get(each) ?? this.field(each, label, this.grid);
      this.usual.set(each, field);
      field.input.placeholder = all.has(each) ? String(all.get(each)) : "";
    }
  }

  /** A stored recipe with every default; as it is written when something of it is wrong here. */
  async complete(name) {
    try {
      return await this.service.json("v1/recipes/check", { method: "POST", body: { recipe_name: name } });
    } catch (problem) {
      if (problem.status !== 422) throw problem;
      return this.service.json(`v1/recipes/${encodeURIComponent(name)}`);
    }
  }

  field(name, label, place) {
    const id = `field-${(fields += 1)}`;
    const input = element("input", { id, autocomplete: "off", spellcheck: "false", title: this.meanings.get(name) ?? "" });
    const wrong = element("div", { id: `${id}-wrong` });
    place.append(element("div", { class: "field" }, element("label", { for: id }, label, element("code", {}, name)), input, wrong));
    return { input, wrong, key: () => name, value: () => input.value.trim() };
  }

  /** A row for any key. Returns its first input. */
  add(name = "") {
    const id = `field-${(fields += 1)}`;
    const named = element("input", { id: `${id}-key`, list: "recipe-keys", value: name, placeholder: "train.dp", spellcheck: "false", autocomplete: "off" });
    const input = element("input", { id, spellcheck: "false", autocomplete: "off" });
    const wrong = element("div", { id: `${id}-wrong` });
    const remove = element(
      "button",
      {
        type: "button",
        class: "plain",
        "aria-label": "Remove this key",
        on: {
          click: () => {
            row.remove();
            this.more = this.more.filter((one) => one.input !== input);
            this.select.focus();
          },
        },
      },
      "Remove",
    );
    const row = element("div", { class: "row" }, element("div", { class: "field" }, element("label", { for: `${id}-key` }, "Key"), named), element("div", { class: "field" }, element("label", { for: id }, "Value"), input, wrong), remove);
    this.extra.append(row);
    this.more.push({ input, wrong, key: () => named.value.trim(), value: () => input.value.trim() });
    return named;
  }

  get inputs() {
    return [...this.usual.values(), ...this.more];
  }

  body() {
    if (this.now === "pasted") return { recipe: JSON.parse(this.text.value) };
    const changed = this.inputs.filter((field) => field.key() && field.value() !== "");
    const overrides = Object.fromEntries(changed.map((field) => [field.key(), field.key() === "name" ? field.value() : value(field.value())]));
    return { recipe_name: this.select.value, overrides };
  }

  async send(only) {
    this.clear();
    let body;
    try {
      body = this.body();
    } catch (error) {
      return this.problems({ message: "The text is no JSON.", errors: [{ field: "recipe", wrong: error.message, fix: "write one JSON object" }] });
    }
    this.busy(true);
    try {
      if (only) {
        const { plan } = await this.service.json("v1/recipes/check", { method: "POST", body });
        this.wrong.hidden = false;
        this.wrong.className = "problems sound";
        this.wrong.replaceChildren(element("p", { role: "status" }, `The recipe is sound. ${follows(plan)}`));
      } else {
        const run = await this.service.json("v1/runs", { method: "POST", body, headers: { "Idempotency-Key": this.key } });
        this.key = key();
        this.onStarted(run);
      }
    } catch (problem) {
      this.problems(problem);
    } finally {
      this.busy(false);
    }
  }

  busy(now) {
    this.checkButton.disabled = now;
    this.startButton.disabled = now;
  }

  clear() {
    this.wrong.hidden = true;
    this.wrong.className = "problems";
    this.wrong.replaceChildren();
    this.textWrong.replaceChildren();
    for (const { input, wrong } of [...this.inputs, { input: this.text, wrong: this.textWrong }]) {
      input.removeAttribute("aria-invalid");
      input.removeAttribute("aria-describedby");
      wrong.replaceChildren();
    }
    this.text.setAttribute("aria-describedby", "recipe-text-wrong");
  }

  /** Each problem stands at its field; what has no field here stands above, with a field to put it right. */
  problems(problem) {
    const lines = [];
    let first = null;
    for (const { field, wrong, fix } of problem.errors ?? []) {
      const name = field.replace(/^(body\.)?(overrides|recipe)\./, "");
      const messages = [element("p", { class: "wrong" }, wrong), fix ? element("p", { class: "fix" }, fix) : null].filter(Boolean);
      const at = this.now === "stored" ? this.inputs.find((one) => one.key() === name) : null;
      if (at) {
        at.wrong.replaceChildren(...messages);
        at.input.setAttribute("aria-invalid", "true");
        at.input.setAttribute("aria-describedby", at.wrong.id);
        first ??= at.input;
      } else if (this.now === "pasted") {
        this.textWrong.append(element("div", { class: "at-field" }, element("code", {}, name), ...messages));
        this.text.setAttribute("aria-invalid", "true");
        first ??= this.text;
      } else {
        const change = /^[\w.]+\.[\w.]+$/.test(name) ? element("button", { type: "button", class: "plain", on: { click: () => this.add(name).focus() } }, `Change ${name}`) : null;
        lines.push(element("div", { class: "at-field" }, element("code", {}, name), ...messages, change));
      }
    }
    const several = problem.errors?.length ?? 0;
    const head = several ? `${several === 1 ? "One thing is" : `${several} things are`} wrong.` : `${problem.message}${problem.fix ? ` ${problem.fix}` : ""}`;
    this.wrong.hidden = false;
    this.wrong.replaceChildren(element("p", { role: "alert" }, head), ...lines);
    (first ?? this.wrong).focus();
  }
}
