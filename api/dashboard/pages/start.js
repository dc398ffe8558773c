/* Forms that start a run: a stored recipe with some keys changed, a recipe as text; or a run again, from one of its checkpoints. All are
 * checked by the service as one types; what is wrong stands beside its field, or at its line.
 *
 *    Start  a stored recipe, or text ─┐                                   ┌─▶ POST /v1/runs
 *    Again  fork a run ───────────────┼─▶ POST /v1/recipes/check ─▶ start ┤
 *           continue it ──────────────┘                                   └─▶ POST /v1/runs/ID/resume
 */

import { element, say } from "../element.js";
import { count, moment, size } from "../format.js";
import { Keys, meanings, messages } from "./keys.js";
import { RecipeText, extending } from "./text.js";

const CHECK_MILLISECONDS = 600; // without another letter, until what was typed is checked

function idempotencyKey() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** What follows from a recipe, in a sentence. */
function follows(plan) {
  const held = plan.train_bytes + plan.rollout_bytes + plan.reference_bytes + plan.slot_bytes + plan.copy_bytes;
  const memory = `${size(plan.arena_bytes)} for samples${held ? ` and ${size(held)} for weights` : ""}`;
  return `A step trains ${count(plan.rows_per_step)} samples, at most ${count(plan.rows_in_flight)} are in flight, and it takes ${memory}.`;
}

/** A form that is checked as one types. A subclass has `body()`, `submit(body)`, and `places`: where errors are put. */
class Form {
  constructor(service, heading, button, ...parts) {
    Object.assign(this, { service, key: idempotencyKey(), timer: 0, places: [] });
    this.title = element("h1", { tabindex: "-1" }, heading);
    this.box = element("div", { class: "problems", tabindex: "-1", role: "status" });
    this.startButton = element("button", { type: "submit", class: "primary", disabled: true }, button); // until load has ended
    this.buttons = element("div", { class: "buttons" }, this.startButton);
    const begin = (event) => {
      event.preventDefault();
      this.send();
    };
    this.form = element("form", { class: "card start", novalidate: true, on: { submit: begin, input: () => this.typed() } }, ...parts, this.box, this.buttons);
    this.element = element("div", { class: "page narrow" }, this.title, this.form);
  }

  destroy() {
    clearTimeout(this.timer);
    this.checking?.abort();
  }

  /** What was typed is checked when no more follows. */
  typed() {
    this.key = idempotencyKey();
    this.destroy();
    this.timer = setTimeout(() => this.check(), CHECK_MILLISECONDS);
  }

  async check() {
    const { signal } = (this.checking = new AbortController());
    let result;
    try {
      const body = this.body();
      if (!body) return;
      result = await this.service.json("v1/recipes/check", { method: "POST", body, signal });
    } catch (problem) {
      if (problem.name !== "AbortError" && !signal.aborted) this.problems(problem);
      return;
    }
    if (signal.aborted) return;
    this.clear();
    this.box.className = "problems sound";
    this.box.replaceChildren(element("p", {}, `The recipe is sound. ${follows(result.plan)}`));
    this.checked(result);
  }

  checked() {}

  async send() {
    this.destroy();
    this.startButton.disabled = true;
    try {
      await this.submit(this.body());
    } catch (problem) {
      const first = this.problems(problem);
      (first ?? this.box).focus();
    } finally {
      this.startButton.disabled = false;
    }
  }

  clear() {
    this.box.className = "problems";
    this.box.replaceChildren();
    for (const place of this.places) place.clear();
  }

  /** Each error is put at its place; what has none here stands above the buttons. Returns the first input that is wrong. */
  problems(problem) {
    this.clear();
    const errors = problem instanceof SyntaxError ? [{ field: "recipe", wrong: problem.message, fix: "write one JSON object, or TOML" }] : (problem.errors ?? []);
    const lines = [];
    let first = null;
    for (const error of errors) {
      const field = error.field.replace(/^(body\.)?(overrides|recipe|toml)\.(?=.)/, "");
      const at = this.places.map((place) => place.put({ ...error, field })).find(Boolean);
      first ??= at ?? null;
      if (!at) lines.push(element("div", { class: "at-field" }, element("code", {}, field), ...messages(error), this.offer(field)));
    }
    const many = errors.length;
    const head = many ? `${many === 1 ? "One thing is" : `${many} things are`} wrong.` : `${problem.message}${problem.fix ? ` ${problem.fix}` : ""}`;
    this.box.className = "problems bad";
    this.box.replaceChildren(element("p", { class: "head" }, head), ...lines);
    return first;
  }

  /** A button that offers a field for `key`; null where this is none. */
  offer(key) {
    if (!this.keys || this.keys.element.closest("[hidden]") || !/^[\w.]+\.[\w.]+$/.test(key)) return null;
    return element("button", { type: "button", class: "plain", on: { click: () => this.keys.add(key).focus() } }, `Change ${key}`);
  }
}

export class Start extends Form {
  /** `onStarted(run)` with the run's record. */
  constructor(service, onStarted) {
    const stored = element("div");
    const written = element("div", { hidden: true });
    const modes = element("fieldset", { class: "segments" }, element("legend", { class: "hidden" }, "Where the recipe comes from"));
    super(service, "New run", "Start the run", modes, stored, written);
    Object.assign(this, { onStarted, stored, written, recipes: [], now: "stored", base: "" });
    const mode = (name, label, checked) => element("label", {}, element("input", { type: "radio", name: "mode", value: name, checked, on: { change: () => this.mode(name) } }), element("span", {}, label));
    modes.append(mode("stored", "Stored recipe", true), mode("written", "TOML", false));
    this.select = element("select", { id: "recipe-name", "aria-describedby": "recipe-says", on: { change: () => this.choose().catch((problem) => this.problems(problem)) } });
    this.described = element("p", { class: "quiet", id: "recipe-says" });
  }

  async load() {
    try {
      const [{ recipes }, schema] = await Promise.all([this.service.json("v1/recipes"), this.service.json("v1/recipes/schema")]);
      this.recipes = recipes;
      this.keys = new Keys(meanings(schema), { onChange: () => this.typed() });
      this.text = new RecipeText(this.keys.meanings, () => this.typed());
      this.places = [this.keys];
      this.stored.append(element("label", { for: "recipe-name", class: "field" }, element("span", {}, "Recipe"), this.select), this.described, element("h2", {}, "Changes to it"), this.keys.element);
      this.written.append(this.text.element);
      this.select.replaceChildren(...this.recipes.map(({ name }) => element("option", { value: name }, name)));
      if (this.recipes.some(({ name }) => name === "mock")) this.select.value = "mock";
      await this.choose();
      this.startButton.disabled = false;
    } catch (problem) {
      this.problems(problem);
    }
  }

  mode(name) {
    this.now = name;
    this.stored.hidden = name !== "stored";
    this.written.hidden = name !== "written";
    this.places = [name === "stored" ? this.keys : this.text];
    const begun = this.text.value && this.text.value !== this.prefilled;
    if (name === "written" && !begun) this.text.value = this.prefilled = extending(this.select.value, this.keys.changed);
    this.clear();
    this.typed();
  }

  async choose() {
    const name = this.select.value;
    say(this.described, this.recipes.find((recipe) => recipe.name === name)?.description ?? "");
    this.clear();
    const { recipe } = await this.complete(name);
    if (name === this.select.value) this.keys.show(recipe);
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

  body() {
    if (this.now === "written") return this.text.body;
    return { recipe_name: this.select.value, overrides: this.keys.changed };
  }

  async submit(body) {
    const run = await this.service.json("v1/runs", { method: "POST", body, headers: { "Idempotency-Key": this.key } });
    this.onStarted(run);
  }
}

const AGAIN = {
  continue: { heading: "Continue", button: "Continue the run", says: "The same run goes on: it waits in the queue, and begins with the state of a checkpoint. Newer checkpoints are set aside." },
  fork: { heading: "Fork", button: "Start the fork", says: "A new run begins with the weights of a checkpoint, under this run's recipe. Its optimizer, its prompts and its count of steps begin anew; this run stays as it is." },
};

/** `how`: continue, or fork. `version`: of the checkpoint that is chosen first, "" for the newest. */
export class Again extends Form {
  constructor(service, run, how, version, onStarted) {
    const { heading, button, says } = AGAIN[how];
    const select = element("select", { id: "begins-with", on: { change: () => this.typed() } });
    const changes = element("div");
    super(service, `${heading} ${run.name}`, button, element("p", { class: "quiet" }, says), element("label", { for: "begins-with", class: "field" }, element("span", {}, "Begins with"), select), changes);
    Object.assign(this, { run, how, wanted: version, onStarted, select, changes });
    this.buttons.append(element("a", { class: "button", href: `#/runs/${encodeURIComponent(run.id)}` }, "Cancel"));
  }

  async load() {
    try {
      const [schema, { checkpoints }] = await Promise.all([this.service.json("v1/recipes/schema"), this.service.run(this.run.id, "/checkpoints")]);
      const newest = [...checkpoints].sort((a, b) => b.version - a.version);
      const option = ({ version, time, bytes }) => element("option", { value: version }, `version ${version}, ${size(bytes)}, ${moment(time)}`);
      this.select.replaceChildren(...newest.map(option), element("option", { value: "0" }, this.how === "fork" ? "the model that the run itself began with" : "the beginning: no checkpoint"));
      if (this.wanted && newest.some(({ version }) => String(version) === this.wanted)) this.select.value = this.wanted;
      this.keys = new Keys(meanings(schema), { without: this.how === "continue" ? ["name", "seed", "train.groups_per_step"] : [], onChange: () => this.typed() });
      this.places = [this.keys];
      this.changes.append(element("h2", {}, "Changes to its recipe"), this.keys.element);
      this.keys.show(this.run.recipe);
      if (this.how === "fork") this.keys.usual.get("name").input.placeholder = "this run's, with -fork";
      else if (this.run.state === "finished") this.keys.usual.get("train.steps").input.value = String(2 * this.run.steps); // it has made them all
      this.startButton.disabled = false;
      this.typed();
    } catch (problem) {
      this.problems(problem);
    }
  }

  body() {
    return { run: this.run.id, version: Number(this.select.value), overrides: this.keys.changed };
  }

  async submit(body) {
    if (this.how === "fork") return this.onStarted(await this.service.json("v1/runs", { method: "POST", body, headers: { "Idempotency-Key": this.key } }));
    const { version, overrides } = body;
    const isNewest = this.select.selectedIndex === 0;
    return this.onStarted(await this.service.run(this.run.id, "/resume", { method: "POST", body: { overrides, ...(isNewest ? {} : { start_version: version }) } }));
  }
}
