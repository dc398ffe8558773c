/* Curves of several runs over each other: #/compare/runs=ID,ID&metric=reward_mean&by=step&fold=1 */

import { element, say } from "../element.js";
import { Comparison } from "../charts/comparison.js";
import { TablePage } from "./table.js";

const POINTS = 200;
const SECONDS = 10; // between two looks at runs that go on
const LIVE = ["created", "starting", "running", "paused", "stopping"];

export class ComparePage {
  constructor(service, address) {
    this.service = service;
    this.runs = (address.get("runs") ?? "").split(",").filter(Boolean);
    const chosen = { metric: address.get("metric") || "reward_mean", by: address.get("by") || "step", fold: address.get("fold") === "1" };
    this.comparison = new Comparison({
      load: (shown) => this.ask(shown),
      metrics: [],
      chosen,
      onChange: (shown) => this.write(shown),
      link: (run) => `#/runs/${encodeURIComponent(run.id)}`,
    });
    this.title = element("h1", { tabindex: "-1" }, "Compare runs");
    this.back = element("a", { href: TablePage.address }, "All runs");
    this.element = element("div", { class: "page" }, element("div", { class: "page-head" }, this.title, this.back), this.comparison.element);
  }

  async load() {
    document.title = `Compare – AsyncDock`;
    this.service
      .json("v1/table")
      .then((table) => this.comparison.offer(table.metrics))
      .catch(() => {}); // the metric that is shown can be kept
    await this.look();
  }

  async look() {
    await this.comparison.show();
    if (this.destroyed) return;
    this.timer = setTimeout(() => (document.hidden || !this.live ? null : this.look()), SECONDS * 1000);
  }

  async ask({ metric, by, fold }) {
    const data = await this.service.json("v1/compare", { query: { runs: this.runs.join(","), metric, by, fold, points: POINTS } });
    this.live = data.runs.some((run) => LIVE.includes(run.state));
    say(this.title, `${data.runs.length} run${data.runs.length === 1 ? "" : "s"}, ${data.settings.length} setting${data.settings.length === 1 ? "" : "s"}`);
    return data;
  }

  write({ metric, by, fold }) {
    const address = new URLSearchParams({ runs: this.runs.join(","), metric, by });
    if (fold) address.set("fold", "1");
    history.replaceState(null, "", `#/compare/${address}`);
  }

  restyle() {
    this.comparison.restyle();
  }

  destroy() {
    this.destroyed = true;
    clearTimeout(this.timer);
    this.comparison.destroy();
  }
}
