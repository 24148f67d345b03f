// Tables that sort, show a page at a time, and change only the cells whose content changed.

import { fill, h, place } from "../core/dom.js";
import { count } from "../core/format.js";
import { icon } from "./icons.js";

/**
 * @typedef {object} Column
 * @property {string} key
 * @property {string} title
 * @property {(row: any) => any} cell What is shown: text or an element.
 * @property {(row: any) => any} [order] What it is sorted by; without it the column does not sort.
 * @property {(row: any) => any} [shown] What `cell` depends on, when that is more than its text.
 * @property {boolean} [end] A number: at the end of its column.
 * @property {string} [kind] A class of the cells.
 * @property {boolean} [head] The cell that names its row.
 */

export class Table {
  #columns;
  #keyOf;
  #perPage;
  #rows = [];
  #page = 0;
  #body;
  #pager;
  #sorted;
  #cells = new Map();
  #changed;

  /**
   * @param {object} options
   * @param {string} options.label Of the table, for screen readers.
   * @param {Column[]} options.columns
   * @param {(row: any) => string} options.keyOf
   * @param {{key: string, down: boolean}} [options.sorted] By which column.
   * @param {number} [options.perPage]
   * @param {(sorted: {key: string, down: boolean}) => void} [options.changed] Called when another order is chosen.
   */
  constructor({ label, columns, keyOf, sorted = null, perPage = 50, changed = () => {} }) {
    this.#columns = columns;
    this.#keyOf = keyOf;
    this.#sorted = sorted;
    this.#perPage = perPage;
    this.#changed = changed;
    this.#body = h("tbody");
    this.heads = columns.map((column) => this.#head(column));
    const table = h(
      "table",
      { class: "table" },
      h("caption", { class: "visually-hidden" }, label),
      h("thead", {}, h("tr", {}, this.heads)),
      this.#body,
    );
    this.#pager = h("div", { class: "pager", hidden: true });
    this.element = h(
      "div",
      {},
      h("div", { class: "table-box", tabindex: 0, role: "region", "aria-label": label }, table),
      this.#pager,
    );
    this.#markSorted();
  }

  /** Show other rows; the order and the page stay. */
  set(rows) {
    this.#rows = rows;
    this.#sort();
    this.#show();
  }

  /** As `set`, from the first page. */
  setFromStart(rows) {
    this.#page = 0;
    this.set(rows);
  }

  #head(column) {
    const kind = [column.end ? "end" : "", column.kind ?? ""].join(" ").trim();
    if (!column.order) return h("th", { scope: "col", class: kind }, column.title);
    const choose = () => {
      const isSame = this.#sorted?.key === column.key;
      this.#sorted = { key: column.key, down: isSame ? !this.#sorted.down : Boolean(column.end) };
      this.#page = 0;
      this.#markSorted();
      this.#sort();
      this.#show();
      this.#changed(this.#sorted);
    };
    return h(
      "th",
      { scope: "col", class: kind },
      h("button", { type: "button", class: "sort", on: { click: choose } }, column.title, icon("down")),
    );
  }

  #markSorted() {
    this.#columns.forEach((column, at) => {
      if (!column.order) return;
      const how = this.#sorted?.key === column.key ? (this.#sorted.down ? "descending" : "ascending") : "none";
      this.heads[at].setAttribute("aria-sort", how);
    });
  }

  #sort() {
    const column = this.#columns.find((each) => each.key === this.#sorted?.key);
    if (!column?.order) return;
    const sign = this.#sorted.down ? -1 : 1;
    const ordered = this.#rows.map((row) => [column.order(row), row]);
    ordered.sort(([a], [b]) => sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b));
    this.#rows = ordered.map(([, row]) => row);
  }

  #show() {
    const pages = Math.max(1, Math.ceil(this.#rows.length / this.#perPage));
    this.#page = Math.min(this.#page, pages - 1);
    const begin = this.#page * this.#perPage;
    const shown = this.#rows.slice(begin, begin + this.#perPage);
    const kept = new Map();
    const elements = shown.map((row) => {
      const key = this.#keyOf(row);
      const known = this.#cells.get(key) ?? this.#make();
      this.#update(known, row);
      kept.set(key, known);
      return known.element;
    });
    this.#cells = kept;
    place(this.#body, elements);
    this.#showPager(begin, shown.length, pages);
  }

  #make() {
    const cells = this.#columns.map((column) =>
      h(column.head ? "th" : "td", {
        scope: column.head ? "row" : null,
        class: [column.end ? "end" : "", column.kind ?? ""].join(" ").trim() || null,
      }),
    );
    return { element: h("tr", {}, cells), cells, shown: [] };
  }

  #update(known, row) {
    this.#columns.forEach((column, at) => {
      const content = column.shown ? null : column.cell(row);
      const shown = column.shown
        ? JSON.stringify(column.shown(row))
        : content instanceof Node
          ? Symbol("new")
          : content;
      if (known.shown[at] === shown) return;
      known.shown[at] = shown;
      fill(known.cells[at], content ?? column.cell(row));
    });
  }

  #showPager(begin, num, pages) {
    this.#pager.hidden = pages < 2;
    if (pages < 2) return;
    const turn = (by, text) => {
      const target = this.#page + by;
      const click = () => {
        this.#page = target;
        this.#show();
        this.element.querySelector(`[data-turn="${by}"]:not(:disabled)`)?.focus();
      };
      return h(
        "button",
        { type: "button", class: "button", "data-turn": by, disabled: target < 0 || target >= pages, on: { click } },
        text,
      );
    };
    const where = `${count(begin + 1)}–${count(begin + num)} of ${count(this.#rows.length)}`;
    if (this.#pager.dataset.where === where) return;
    this.#pager.dataset.where = where;
    fill(
      this.#pager,
      h("span", { class: "number", role: "status" }, where),
      h("div", { class: "row" }, turn(-1, "Previous"), turn(1, "Next")),
    );
  }
}

/** A table without order and pages. @param {string[]} heads @param {any[][]} rows The first cell names the row. */
export function plainTable(label, heads, rows) {
  return h(
    "div",
    { class: "table-box", tabindex: 0, role: "region", "aria-label": label },
    h(
      "table",
      { class: "table" },
      h("caption", { class: "visually-hidden" }, label),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((head, at) => h("th", { scope: "col", class: at ? "end" : null }, head)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            row.map((cell, at) => (at ? h("td", { class: "end" }, cell) : h("th", { scope: "row" }, cell))),
          ),
        ),
      ),
    ),
  );
}
