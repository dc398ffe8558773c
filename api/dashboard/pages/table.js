/* All runs as a table: chosen columns, filters, sorting, tags and notes. What is chosen is in the address:
 *
 *    #/table/columns=train.learning_rate,loss&find=tiny&state=finished&tag=good&where=reward_mean>0.5&sort=-reward_mean
 */

import { announce, element, say } from "../element.js";
import { ago, count, duration, number } from "../format.js";
import { brief } from "../charts/comparison.js";
import { STATES, ranSeconds } from "../progress.js";
import { Table } from "../charts/table.js";
import { setState, stateBadge } from "./runs.js";

const SECONDS = 5;
const RESULTS = ["reward_mean", "evaluation.reward_mean"]; // columns at first
const MOST_CHOSEN = 300; // runs that are compared
const MOST_ADDRESS = 7000; // characters of their ids
const CONDITION = /^\s*([\w./@:-]+)\s*(!=|>=|<=|=|>|<|~)\s*(.*?)\s*$/;

/** Whether `value` fits `operator` and `text`: numbers by size, anything else as text. */
export function fits(value, operator, text) {
  const wanted = Number(text);
  const isNumber = text !== "" && Number.isFinite(wanted) && typeof value === "number";
  const shown = Array.isArray(value) ? value.join(" ") : String(value ?? "");
  switch (operator) {
    case "~":
      return shown.toLowerCase().includes(text.toLowerCase());
    case "=":
      return isNumber ? value === wanted : Array.isArray(value) ? value.map(String).includes(text) : shown === text;
    case "!=":
      return !fits(value, "=", text);
    case ">":
      return isNumber && value > wanted;
    case "<":
      return isNumber && value < wanted;
    case ">=":
      return isNumber && value >= wanted;
    default:
      return isNumber && value <= wanted;
  }
}

export class TablePage {
  static address = "#/table"; // as it was left

  constructor(service, address) {
    this.service = service;
    this.columns = address.has("columns") ? address.get("columns").split(",").filter(Boolean) : RESULTS;
    this.sort = address.get("sort") ?? "";
    this.chosen = new Set();
    this.keys = [];
    this.metrics = [];
    this.rows = [];
    const field = (name, label, control) => element("label", { class: "field", for: control.id }, element("span", {}, label), control);
    const input = (name, placeholder) => element("input", { id: `table-${name}`, name, type: "search", placeholder, autocomplete: "off", spellcheck: "false", value: address.get(name) ?? "" });
    this.state = element(
      "select",
      { id: "table-state", name: "state" },
      element("option", { value: "" }, "any"),
      Object.entries(STATES).map(([state, name]) => element("option", { value: state, set: { selected: state === address.get("state") } }, name)),
    );
    this.filter = element(
      "form",
      { class: "controls", role: "search", "aria-label": "Filter the table", on: { submit: (event) => event.preventDefault(), input: () => this.changed() } },
      field("find", "Find", input("find", "name, id, tag, note")),
      field("state", "State", this.state),
      field("tag", "Tag", input("tag", "any")),
      field("where", "Where", input("where", "train.steps>100, loss<0.5")),
    );
    this.wrong = element("p", { class: "wrong", role: "alert", hidden: true });
    this.choice = element("div", { class: "choices" });
    this.find = element("input", { type: "search", id: "table-columns", placeholder: "learning_rate", autocomplete: "off", spellcheck: "false", on: { input: () => this.offer() } });
    this.choosing = element(
      "details",
      { class: "columns-choice" },
      element("summary", {}, "Columns"),
      element("div", { class: "card" }, element("label", { class: "field", for: "table-columns" }, element("span", {}, "Settings and results"), this.find), this.choice),
    );
    this.compare = element("a", { class: "button primary", "aria-disabled": "true", role: "link" }, "Compare");
    this.all = element("input", { type: "checkbox", "aria-label": "Select all that are shown", on: { change: () => this.chooseAll() } });
    this.title = element("h1", { tabindex: "-1" }, "Runs");
    this.count = element("span", { class: "count" });
    this.table = new Table({ label: "Runs", columns: this.layout(), sort: this.sort, onSort: (sort) => ((this.sort = sort), this.write()), empty: "No run fits." });
    this.element = element(
      "div",
      { class: "page table-page" },
      element("div", { class: "page-head" }, this.title, this.count, this.choosing, this.compare),
      element("section", { class: "card", "aria-label": "All runs" }, this.filter, this.wrong, this.table.element),
    );
    this.onSeen = () => !document.hidden && this.load();
    document.addEventListener("visibilitychange", this.onSeen);
  }

  get isReadOnly() {
    return document.body.dataset.runs !== "service";
  }

  layout() {
    const plain = (key, head, more) => ({ key, head, value: (run) => run[key], cell: (run) => brief(run[key]), ...more });
    const seconds = (run) => ranSeconds(run, this.service.now);
    return [
      { key: "chosen", head: this.all, left: true, cell: (run) => this.box(run) },
      plain("id", "run", { left: true, names: true, cell: (run) => element("a", { href: `#/runs/${encodeURIComponent(run.id)}`, title: run.name }, run.id) }),
      plain("state", "state", { left: true, cell: (run) => badge(run.state) }),
      { key: "steps", head: "steps", value: (run) => run.steps_done, cell: (run) => `${count(run.steps_done)}/${count(run.steps)}` },
      ...this.columns.map((key, at) => ({ key, head: key, title: key, value: (run) => run.values[at], cell: (run) => (typeof run.values[at] === "number" ? number(run.values[at], 4) : brief(run.values[at])) })),
      { key: "took", head: "took", value: seconds, cell: (run) => duration(seconds(run)) },
      plain("created", "made", { cell: (run) => ago(run.created, this.service.now) }),
      plain("tags", "tags", { left: true, value: (run) => run.tags.join(" "), cell: (run) => element("span", { class: "tags" }, run.tags.map((tag) => element("span", { class: "tag" }, tag))) }),
      plain("notes", "notes", { left: true, cell: (run) => element("span", { class: "note", title: run.notes }, run.notes) }),
      ...(this.isReadOnly ? [] : [{ key: "edit", head: element("span", { class: "hidden" }, "Edit"), cell: (run) => element("button", { type: "button", class: "plain", "aria-label": `Edit tags and notes of ${run.id}`, on: { click: () => this.edit(run) } }, "Edit") }]),
    ];
  }

  box(run) {
    return element("input", { type: "checkbox", "aria-label": `Select ${run.id}`, set: { checked: this.chosen.has(run.id) }, on: { change: (event) => this.choose(run.id, event.target.checked) } });
  }

  choose(id, isChosen) {
    if (isChosen) this.chosen.add(id);
    else this.chosen.delete(id);
    this.link();
  }

  chooseAll() {
    for (const run of this.fitting) {
      if (this.all.checked) this.chosen.add(run.id);
      else this.chosen.delete(run.id);
    }
    this.link();
    this.table.show();
  }

  /** Where the chosen runs are compared: as many as an address and the service take. */
  link() {
    const runs = [];
    let room = MOST_ADDRESS;
    for (const id of this.chosen) if (runs.length < MOST_CHOSEN && (room -= id.length + 3) > 0) runs.push(id);
    const few = runs.length < this.chosen.size ? ` (${runs.length} of ${this.chosen.size}, which is the most)` : "";
    say(this.compare, runs.length ? `Compare ${runs.length} run${runs.length === 1 ? "" : "s"}${few}` : "Select runs to compare");
    this.compare.setAttribute("aria-disabled", String(!runs.length));
    if (runs.length) this.compare.setAttribute("href", `#/compare/${new URLSearchParams({ runs: runs.join(",") })}`);
    else this.compare.removeAttribute("href");
    this.all.checked = this.fitting?.length > 0 && this.fitting.every((run) => this.chosen.has(run.id));
  }

  async load() {
    document.title = "Runs – AsyncDock";
    clearTimeout(this.timer);
    const asked = (this.asked = (this.asked ?? 0) + 1);
    const conditions = this.conditions();
    const asks = [...new Set([...this.columns, ...conditions.map(([key]) => key)])];
    try {
      const table = await this.service.json("v1/table", { query: { columns: asks.join(",") } });
      if (asked !== this.asked || this.destroyed) return;
      Object.assign(this, { keys: table.keys, metrics: table.metrics, rows: table.rows, asks });
      this.wrong.hidden = true;
      this.offer();
      this.show();
    } catch (problem) {
      if (asked !== this.asked || this.destroyed) return;
      this.wrong.hidden = false;
      say(this.wrong, problem.message);
    } finally {
      if (asked === this.asked && !this.destroyed) this.timer = setTimeout(() => !document.hidden && this.load(), SECONDS * 1000);
    }
  }

  /** What "Where" asks: [[key, operator, text], …]. */
  conditions() {
    const texts = this.filter.elements.where.value.split(",").filter((text) => text.trim());
    return texts.map((text) => CONDITION.exec(text)?.slice(1)).filter(Boolean);
  }

  show() {
    const find = this.filter.elements.find.value.trim().toLowerCase();
    const tag = this.filter.elements.tag.value.trim();
    const state = this.state.value;
    const conditions = this.conditions();
    const valueOf = (run, key) => (key in run && key !== "values" ? run[key] : run.values[this.asks.indexOf(key)]);
    this.fitting = this.rows.filter(
      (run) =>
        (!find || [run.name, run.id, run.owner, run.notes, ...run.tags].some((text) => text.toLowerCase().includes(find))) &&
        (!state || run.state === state) &&
        (!tag || run.tags.includes(tag)) &&
        conditions.every(([key, operator, text]) => fits(valueOf(run, key), operator, text)),
    );
    say(this.count, this.fitting.length === this.rows.length ? String(this.rows.length) : `${this.fitting.length} of ${this.rows.length}`);
    this.table.fill(this.fitting);
    this.link();
  }

  /** Columns to choose from: settings that differ, then results. */
  offer() {
    const wanted = this.find.value.trim().toLowerCase();
    const names = [...new Set([...this.columns, ...this.keys, ...this.metrics])].filter((name) => name.toLowerCase().includes(wanted));
    const shown = names.join(" ");
    if (this.offered === shown) return;
    this.offered = shown;
    this.choice.replaceChildren(
      ...names.map((name) =>
        element("label", { class: "check" }, element("input", { type: "checkbox", set: { checked: this.columns.includes(name) }, on: { change: (event) => this.column(name, event.target.checked) } }), ` ${name}`),
      ),
    );
  }

  column(name, isShown) {
    this.columns = isShown ? [...this.columns, name] : this.columns.filter((one) => one !== name);
    this.write();
    this.rows = this.rows.map((run) => ({ ...run, values: this.columns.map((key) => run.values[this.asks.indexOf(key)]) }));
    this.asks = this.columns;
    this.table.arrange(this.layout());
    this.load();
  }

  changed() {
    this.write();
    const asks = this.conditions().map(([key]) => key);
    if (asks.every((key) => this.asks?.includes(key))) this.show();
    else this.load();
  }

  write() {
    const address = new URLSearchParams();
    if (this.columns.join() !== RESULTS.join()) address.set("columns", this.columns.join());
    for (const [name, value] of new FormData(this.filter)) if (value.trim()) address.set(name, value.trim());
    if (this.sort) address.set("sort", this.sort);
    TablePage.address = `#/table${address.size ? `/${address}` : ""}`;
    history.replaceState(null, "", TablePage.address);
  }

  /** Ask for the tags and notes of a run. */
  edit(run) {
    const tags = element("input", { id: "edit-tags", value: run.tags.join(" "), autocomplete: "off", spellcheck: "false" });
    const notes = element("textarea", { id: "edit-notes", rows: "5", maxlength: "4000" });
    notes.value = run.notes;
    const wrong = element("p", { class: "wrong", role: "alert", hidden: true });
    const save = async (event) => {
      event.preventDefault();
      try {
        await this.service.json(`v1/runs/${encodeURIComponent(run.id)}`, { method: "PATCH", body: { tags: tags.value.split(/[\s,]+/).filter(Boolean), notes: notes.value } });
        dialog.close();
        announce("Saved.");
        this.load();
      } catch (problem) {
        wrong.hidden = false;
        say(wrong, problem.message);
      }
    };
    const dialog = element(
      "dialog",
      { "aria-labelledby": "edit-title", on: { close: () => dialog.remove() } },
      element(
        "form",
        { class: "stack", on: { submit: save } },
        element("h2", { id: "edit-title" }, `Tags and notes of ${run.name}`),
        element("label", { class: "field", for: "edit-tags" }, element("span", {}, "Tags, with blanks between them"), tags),
        element("label", { class: "field", for: "edit-notes" }, element("span", {}, "Notes"), notes),
        wrong,
        element("div", { class: "buttons" }, element("button", { type: "button", on: { click: () => dialog.close() } }, "Cancel"), element("button", { type: "submit", class: "primary" }, "Save")),
      ),
    );
    document.body.append(dialog);
    dialog.showModal();
  }

  destroy() {
    this.destroyed = true;
    clearTimeout(this.timer);
    document.removeEventListener("visibilitychange", this.onSeen);
  }
}

function badge(state) {
  const made = stateBadge();
  setState(made, state);
  return made;
}
