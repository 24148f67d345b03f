// Where the chunks of a prompt are: a square each, or for several chunks together.

import { fill, h, svg } from "../core/dom.js";
import { count, plural } from "../core/format.js";
import { swatch } from "./charts.js";

const MAX_CELLS = 1200;
const CELL = 12;
const GAP = 2;

/** In order: a square of several chunks shows the one that is farthest. */
const PLACES = [
  { key: "both", title: "host memory and disk", fill: "fill-both" },
  { key: "host", title: "host memory only", fill: "fill-host" },
  { key: "disk", title: "disk only", fill: "fill-disk" },
  { key: "missing", title: "not stored", fill: "fill-missing" },
];

/**
 * @param {string[]} chunks In prefix order: "both", "host", "disk" or "missing".
 * @param {AbortSignal} signal Aborts when the map is no longer shown.
 */
export function chunkMap(chunks, signal) {
  const totals = Object.fromEntries(PLACES.map(({ key }) => [key, 0]));
  for (const key of chunks) totals[key] += 1;
  const each = Math.ceil(chunks.length / MAX_CELLS);
  const cells = [];
  for (let at = 0; at < chunks.length; at += each) cells.push(farthest(chunks.slice(at, at + each)));
  const said = PLACES.filter(({ key }) => totals[key]).map(({ key, title }) =>
    `${count(totals[key])} in ${title}`.replace("in not", "not"),
  );
  const box = h("div");
  const draw = () => {
    const width = box.clientWidth;
    const columns = Math.floor((width + GAP) / (CELL + GAP));
    if (columns < 1) return;
    const rows = Math.ceil(cells.length / columns);
    const height = rows * (CELL + GAP) - GAP;
    fill(
      box,
      svg(
        "svg",
        {
          class: "chunk-map",
          viewBox: `0 0 ${width} ${height}`,
          width,
          height,
          role: "img",
          "aria-label": `${plural(chunks.length, "chunk")} in prefix order: ${said.join(", ")}`,
        },
        cells.map((cell, at) => {
          const isHollow = PLACES[cell].key === "missing";
          const inset = isHollow ? 0.5 : 0;
          const first = at * each;
          const last = Math.min(first + each, chunks.length) - 1;
          return svg(
            "rect",
            {
              x: (at % columns) * (CELL + GAP) + inset,
              y: Math.floor(at / columns) * (CELL + GAP) + inset,
              width: CELL - 2 * inset,
              height: CELL - 2 * inset,
              rx: 2.5,
              class: PLACES[cell].fill,
            },
            svg(
              "title",
              {},
              `${first === last ? `Chunk ${first}` : `Chunks ${first} to ${last}`}: ${PLACES[cell].title}`,
            ),
          );
        }),
      ),
    );
  };
  const observer = new ResizeObserver(draw);
  observer.observe(box);
  signal.addEventListener("abort", () => observer.disconnect());
  const legend = h(
    "ul",
    { class: "legend" },
    PLACES.map(({ key, title, fill: kind }) => h("li", {}, swatch(kind), title, " ", h("b", {}, count(totals[key])))),
  );
  return h(
    "div",
    { class: "stack" },
    box,
    legend,
    each > 1 &&
      h("p", { class: "small muted" }, `A square is ${each} chunks, and shows the one that is farthest away.`),
  );
}

function farthest(keys) {
  return Math.max(...keys.map((key) => PLACES.findIndex((place) => place.key === key)));
}
