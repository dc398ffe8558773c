/* A table that sorts by any of its columns, and shows its rows in pieces. */

import { element, say } from "../element.js";

const PIECE = 100; // rows that are shown at first, and more each time

/** Compares two values of a column: numbers by size, other values as text; what is missing comes last, whatever the direction. */
export function compared(one, other, falling) {
  const [lacksOne, lacksOther] = [one, other].map((value) => value === null || value === undefined || value === "");
  if (lacksOne || lacksOther) return Number(lacksOne) - Number(lacksOther);
  const order = typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
  return falling ? -order : order;
}

export class Table {
  /** `columns`: [{key, head, value(row), cell(row), left, title}]; `sort`: a key, with - in front of it falling. `onSort(sort)`. */
  constructor({ label, columns, sort = "", onSort = () => {}, empty = "Nothing here." }) {
    Object.assign(this, { columns, sort, onSort, rows: [], shown: PIECE });
    this.head = element("tr");
    this.body = element("tbody");
    this.note = element("p", { class: "quiet", hidden: true }, empty);
    this.more = element("button", { type: "button", hidden: true, on: { click: () => this.show((this.shown += PIECE)) } });
    this.element = element(
      "div",
      { class: "sorted" },
      element("div", { class: "table-scroll", tabindex: "0", role: "region", "aria-label": label }, element("table", {}, element("thead", {}, this.head), this.body)),
      this.note,
      this.more,
    );
    this.arrange(columns);
  }

  /** Show other columns. */
  arrange(columns) {
    this.columns = columns;
    this.heads = columns.map((column) => {
      const button = column.value ? element("button", { type: "button", class: "plain", title: column.title ?? column.head, on: { click: () => this.turn(column.key) } }, column.head) : column.head;
      return element("th", { scope: "col", class: column.left ? "left" : null }, button);
    });
    this.head.replaceChildren(...this.heads);
    this.show();
  }

  turn(key) {
    this.sort = this.sort === `-${key}` ? key : `-${key}`;
    this.onSort(this.sort);
    this.show();
  }

  fill(rows) {
    this.rows = rows;
    this.show();
  }

  show() {
    const falling = this.sort.startsWith("-");
    const by = this.columns.find((column) => column.value && column.key === this.sort.replace(/^-/, ""));
    const rows = by ? [...this.rows].sort((one, other) => compared(by.value(one), by.value(other), falling)) : this.rows;
    this.columns.forEach((column, at) => {
      if (column === by) this.heads[at].setAttribute("aria-sort", falling ? "descending" : "ascending");
      else this.heads[at].removeAttribute("aria-sort");
    });
    const focused = document.activeElement?.closest?.("tr")?.dataset.key;
    const place = [...(document.activeElement?.closest?.("tr")?.querySelectorAll("a, button, input") ?? [])].indexOf(document.activeElement);
    this.body.replaceChildren(
      ...rows.slice(0, this.shown).map((row) =>
        element(
          "tr",
          { "data-key": row.id ?? null, class: row.chosen ? "chosen" : null },
          this.columns.map((column, at) => element(at === this.columns.findIndex((one) => one.names) ? "th" : "td", { scope: column.names ? "row" : null, class: column.left ? "left" : null }, column.cell(row))),
        ),
      ),
    );
    if (focused && place >= 0) this.body.querySelector(`tr[data-key="${CSS.escape(focused)}"]`)?.querySelectorAll("a, button, input")[place]?.focus({ preventScroll: true });
    this.note.hidden = rows.length > 0;
    this.more.hidden = rows.length <= this.shown;
    say(this.more, `${Math.min(PIECE, rows.length - this.shown)} more of ${rows.length}`);
  }
}
