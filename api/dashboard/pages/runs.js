/* The list of runs, newest first, asked for again every few seconds while the page is seen. */

import { announce, element, say } from "../element.js";
import { ago, count, fixed, since } from "../format.js";
import { ENDED, STATES } from "../progress.js";

const SECONDS = 3;
const PAGE = 50;

export class Runs {
  /** `onPage(runs)` is called whenever the list was read. */
  constructor(service, onPage) {
    Object.assign(this, { service, onPage, limit: PAGE, asked: 0, timer: 0, states: new Map(), items: new Map(), chosen: "" });
    this.list = document.getElementById("runs-list");
    this.note = document.getElementById("runs-note");
    this.count = document.getElementById("runs-count");
    this.more = document.getElementById("runs-more");
    this.filter = document.getElementById("runs-filter");
    this.filter.addEventListener("submit", (event) => event.preventDefault());
    this.filter.addEventListener("input", () => this.load());
    this.more.addEventListener("click", () => {
      this.limit += PAGE;
      this.load();
    });
    document.addEventListener("visibilitychange", () => !document.hidden && this.timer && this.load());
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.asked += 1;
  }

  async load() {
    clearTimeout(this.timer);
    const asked = (this.asked += 1);
    const { name, state } = Object.fromEntries(new FormData(this.filter));
    try {
      const runs = [];
      let after = "";
      do {
        const page = await this.service.json("v1/runs", { query: { name: name.trim(), state, after, limit: PAGE } });
        runs.push(...page.runs);
        after = page.next;
      } while (after && runs.length < this.limit);
      if (asked !== this.asked) return;
      this.show(runs, after, Boolean(name.trim() || state));
    } catch (problem) {
      if (asked !== this.asked) return;
      this.note.hidden = false;
      say(this.note, problem.message);
    } finally {
      if (asked === this.asked) this.timer = setTimeout(() => !document.hidden && this.load(), SECONDS * 1000);
    }
  }

  show(runs, next, filtered) {
    this.more.hidden = !next;
    this.note.hidden = runs.length > 0;
    say(this.note, runs.length ? "" : filtered ? "No run fits." : "No run yet.");
    say(this.count, runs.length ? `${runs.length}${next ? "+" : ""}` : "");
    if (runs.length) this.count.setAttribute("aria-label", `${runs.length} runs shown`);
    else this.count.removeAttribute("aria-label");
    const items = new Map(runs.map((run) => [run.id, this.item(run)]));
    for (const [id, item] of this.items) if (!items.has(id)) item.element.remove();
    this.items = items;
    let at = 0;
    for (const { element: wanted } of items.values()) {
      if (this.list.children[at] !== wanted) this.list.insertBefore(wanted, this.list.children[at] ?? null);
      at += 1;
    }
    for (const run of runs) {
      const before = this.states.get(run.id);
      if (before && before !== run.state) announce(`Run ${run.name} is ${STATES[run.state] ?? run.state}.`);
      this.states.set(run.id, run.state);
    }
    this.mark();
    this.onPage(runs, filtered);
  }

  /** The run that the page shows. */
  choose(id) {
    this.chosen = id;
    this.mark();
  }

  mark() {
    for (const [id, { link }] of this.items) {
      if (id === this.chosen) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }

  item(run) {
    const item = this.items.get(run.id) ?? this.make(run);
    setState(item.state, run.state);
    say(item.name, run.id.startsWith(run.name) ? run.name : run.id); // of a folder: its name tells more than its recipe's
    const where = run.state === "created" ? (run.position ? `place ${run.position} in the queue` : "waits") : `step ${count(run.steps_done)}/${count(run.steps)}`;
    say(item.steps, where);
    say(item.reward, run.reward === null || run.reward === undefined ? "" : `reward ${fixed(run.reward, 2)}`);
    const moved = run.ended ?? run.started ?? run.created;
    say(item.when, since(moved, this.service.now));
    item.when.title = ago(moved, this.service.now);
    item.done.style.width = `${run.steps ? (100 * run.steps_done) / run.steps : 0}%`;
    item.track.hidden = run.state === "created";
    item.link.classList.toggle("over", ENDED.includes(run.state));
    return item;
  }

  make(run) {
    const item = {
      state: stateBadge(),
      name: element("span", { class: "run-name" }),
      steps: element("span"),
      reward: element("span"),
      when: element("span", { class: "when" }),
      done: element("i"),
    };
    item.track = element("div", { class: "track", "aria-hidden": "true" }, item.done);
    item.link = element(
      "a",
      { href: `#/runs/${encodeURIComponent(run.id)}`, title: run.id },
      element("div", { class: "line" }, item.name, item.state),
      item.track,
      element("div", { class: "line small" }, item.steps, item.reward, item.when),
    );
    item.element = element("li", {}, item.link);
    return item;
  }
}

export function stateBadge() {
  return element("span", { class: "state" }, element("i", { "aria-hidden": "true" }), element("span"));
}

export function setState(badge, state) {
  badge.className = `state state-${state}`;
  say(badge.lastChild, STATES[state] ?? state);
}
