// Small charts. Each has its numbers as a table too, for those who do not see it.

import { fill, h, svg } from "../core/dom.js";
import { clock, dateTime } from "../core/format.js";
import { plainTable } from "./table.js";

/** @typedef {{key: string, title: string, fill: string}} Series `fill` is a class of views.css. */

const TABLE_ROWS = 60;
const LEFT = 44;
const BOTTOM = 22;
const TOP = 8;

/** A square of a series' colour. */
export function swatch(kind) {
  return svg(
    "svg",
    { viewBox: "0 0 10 10", "aria-hidden": "true" },
    svg("rect", { width: 10, height: 10, rx: 2.5, class: kind }),
  );
}

/**
 * A bar of parts of a whole.
 * @param {{value: number, fill: string}[]} parts
 * @param {number} whole
 * @param {string} label What it says, for screen readers; empty: it stands beside the same numbers.
 */
export function bar(parts, whole, label, kind = "") {
  const element = svg("svg", {
    class: `bar ${kind}`,
    viewBox: "0 0 1000 10",
    preserveAspectRatio: "none",
    focusable: "false",
    ...(label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" }),
  });
  let x = 0;
  for (const part of parts) {
    const width = whole > 0 ? Math.min(1000 - x, (1000 * part.value) / whole) : 0;
    if (width > 0) element.append(svg("rect", { x, y: 0, width: Math.max(width, 2), height: 10, class: part.fill }));
    x += width;
  }
  return element;
}

/**
 * Areas on top of each other over time, as shares of a whole or as sums.
 * Its height is fixed, and it is drawn again when its width changes.
 */
export class StackedChart {
  #series;
  #format;
  #points = [];
  #isKnown = false;
  #plot;
  #table;
  #rows;
  #tip;
  #empty;
  #drawnWidth = 0;
  #label;
  #isShare;

  /**
   * @param {object} options
   * @param {string} options.label
   * @param {Series[]} options.series From the bottom up.
   * @param {(value: number) => string} options.format
   * @param {boolean} [options.isShare] The axis goes to 100 %.
   * @param {string} options.empty What to say while there is nothing.
   * @param {AbortSignal} options.signal
   */
  constructor({ label, series, format, isShare = false, empty, signal }) {
    this.#label = label;
    this.#series = series;
    this.#format = format;
    this.#isShare = isShare;
    this.#empty = empty;
    this.#plot = h("div", { class: "chart-plot" });
    this.#tip = h("div", { class: "chart-tip", hidden: true });
    this.#rows = h("div");
    this.#table = h("details", { class: "as-table" }, h("summary", {}, "Show as a table"), this.#rows);
    this.#table.addEventListener("toggle", () => this.#fillTable());
    this.element = h("figure", { class: "chart", "aria-label": label }, this.#plot, this.#legend(), this.#table);
    const observer = new ResizeObserver(() => this.#draw(false));
    observer.observe(this.#plot);
    signal.addEventListener("abort", () => observer.disconnect());
    this.#plot.addEventListener("pointermove", (event) => this.#point(event));
    this.#plot.addEventListener("pointerleave", () => this.#leave());
  }

  /** @param {{unix_s: number, values: number[]}[]} points In order of time; one value a series. */
  set(points) {
    this.#points = points;
    this.#isKnown = true;
    this.#draw(true);
    this.#fillTable();
  }

  #legend() {
    return h(
      "ul",
      { class: "legend" },
      [...this.#series].reverse().map((each) => h("li", {}, swatch(each.fill), each.title)),
    );
  }

  #draw(force) {
    const width = this.#plot.clientWidth;
    const height = this.#plot.clientHeight;
    if (!this.#isKnown || !width || (!force && width === this.#drawnWidth)) return;
    this.#drawnWidth = width;
    const points = this.#points;
    const hasAny = points.some((point) => point.values.some((value) => value > 0));
    if (points.length < 2 || !hasAny) {
      fill(this.#plot, h("p", { class: "chart-note" }, this.#empty));
      return;
    }
    const sums = points.map((point) => point.values.reduce((sum, value) => sum + value, 0));
    const top = this.#isShare ? 1 : niceTop(Math.max(...sums));
    const plotHeight = height - BOTTOM - TOP;
    const x = (at) => LEFT + (at * (width - LEFT - 8)) / (points.length - 1);
    const y = (value) => TOP + plotHeight * (1 - value / top);
    const base = points.map(() => 0);
    const areas = this.#series.map((series, index) => {
      const lower = points.map((_, at) => `${x(at).toFixed(1)},${y(base[at]).toFixed(1)}`);
      points.forEach(
        (point, at) =>
          (base[at] += this.#isShare ? (sums[at] ? point.values[index] / sums[at] : 0) : point.values[index]),
      );
      const upper = points.map((_, at) => `${x(at).toFixed(1)},${y(base[at]).toFixed(1)}`);
      return svg("path", { d: `M${upper.join("L")}L${lower.reverse().join("L")}Z`, class: series.fill });
    });
    const lines = [0, 0.5, 1].map((share) => [
      svg("line", { x1: LEFT, x2: width - 8, y1: y(share * top), y2: y(share * top), class: "axis-line" }),
      svg(
        "text",
        { x: LEFT - 8, y: y(share * top) + 4, "text-anchor": "end", class: "axis" },
        this.#isShare ? `${100 * share} %` : this.#format(share * top),
      ),
    ]);
    const lengthS = points.at(-1).unix_s - points[0].unix_s;
    const isLong = lengthS > 86_400;
    const count = Math.max(2, Math.min(7, Math.floor(width / 130)));
    const times = Array.from({ length: count }, (_, index) =>
      Math.round((index * (points.length - 1)) / (count - 1)),
    ).map((at, index) =>
      svg(
        "text",
        {
          x: x(at),
          y: height - 4,
          class: "axis",
          "text-anchor": index === 0 ? "start" : index === count - 1 ? "end" : "middle",
        },
        isLong ? dateTime(points[at].unix_s).slice(5, 16) : clock(points[at].unix_s, { seconds: lengthS < 600 }),
      ),
    );
    this.#x = x;
    this.cursor = svg("line", { y1: TOP, y2: height - BOTTOM, class: "cursor-line", visibility: "hidden" });
    fill(
      this.#plot,
      svg(
        "svg",
        {
          viewBox: `0 0 ${width} ${height}`,
          role: "img",
          "aria-label": `${this.#label}. Its numbers are in the table below.`,
        },
        lines,
        areas,
        times,
        this.cursor,
      ),
      this.#tip,
    );
  }

  #x = (at) => at;

  #point(event) {
    const { points, at } = { points: this.#points, at: this.#nearest(event.offsetX) };
    if (!this.cursor?.isConnected || at === null) return;
    const point = points[at];
    const px = this.#x(at);
    this.cursor.setAttribute("x1", px);
    this.cursor.setAttribute("x2", px);
    this.cursor.setAttribute("visibility", "visible");
    fill(
      this.#tip,
      h("span", { class: "muted" }, dateTime(point.unix_s)),
      h(
        "ul",
        {},
        [...this.#series]
          .map((each, index) =>
            h("li", {}, swatch(each.fill), each.title, h("b", {}, this.#format(point.values[index]))),
          )
          .reverse(),
      ),
    );
    this.#tip.hidden = false;
    const toLeft = px > this.#plot.clientWidth / 2;
    this.#tip.style.left = `${toLeft ? px - this.#tip.offsetWidth - 12 : px + 12}px`;
  }

  #nearest(offsetX) {
    const { length } = this.#points;
    const width = this.#plot.clientWidth - LEFT - 8;
    if (length < 2 || width <= 0) return null;
    return Math.max(0, Math.min(length - 1, Math.round(((offsetX - LEFT) / width) * (length - 1))));
  }

  #leave() {
    this.#tip.hidden = true;
    this.cursor?.setAttribute("visibility", "hidden");
  }

  #fillTable() {
    if (!this.#table.open) return;
    const step = Math.max(1, Math.ceil(this.#points.length / TABLE_ROWS));
    const rows = this.#points.filter((_, at) => at % step === 0).reverse();
    const table = plainTable(
      this.#label,
      ["Time", ...this.#series.map((each) => each.title)],
      rows.map((point) => [dateTime(point.unix_s), ...point.values.map(this.#format)]),
    );
    fill(this.#rows, table);
  }
}

function niceTop(value) {
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * size).find((top) => top >= value) ?? value;
}
