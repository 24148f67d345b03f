// Icons, drawn here: 16 by 16, lines of the text's colour.

import { svg } from "../core/dom.js";

const PATHS = {
  overview: "M2.5 9.5h4v4h-4zM9.5 2.5h4v6h-4zM2.5 2.5h4v4h-4zM9.5 11.5h4v2h-4z",
  prompts: "M3 3.5h10M3 8h10M3 12.5h6",
  advise: "M8 2a4 4 0 0 0-2.4 7.2c.5.4.7.9.7 1.5v.3h3.4v-.3c0-.6.2-1.1.7-1.5A4 4 0 0 0 8 2zM6.5 13.5h3",
  requests: "M2.5 5h8M8 2.5 10.5 5 8 7.5M13.5 11h-8M8 8.5 5.5 11 8 13.5",
  disk:
    "M2.5 4.5c0-1.1 2.5-2 5.5-2s5.5.9 5.5 2-2.5 2-5.5 2-5.5-.9-5.5-2zM2.5 4.5v7c0 1.1 2.5 2 5.5 " +
    "2s5.5-.9 5.5-2v-7M2.5 8c0 1.1 2.5 2 5.5 2s5.5-.9 5.5-2",
  events: "M1.5 8h3l2-5 3 10 2-5h3",
  apply: "M8 10.5v-8M5 5.5l3-3 3 3M2.5 10.5v3h11v-3",
  system: "M2 3h12v8H2zM6 13.5h4",
  light:
    "M8 5.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6zM8 1.5v1.3M8 13.2v1.3M1.5 8h1.3M13.2 8h1.3M3.4 " +
    "3.4l.9.9M11.7 11.7l.9.9M3.4 12.6l.9-.9M11.7 4.3l.9-.9",
  dark: "M13.5 9.6A5.8 5.8 0 0 1 6.4 2.5a5.8 5.8 0 1 0 7.1 7.1z",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  down: "M3.5 6 8 10.5 12.5 6",
  plus: "M8 3v10M3 8h10",
  close: "M4 4l8 8M12 4l-8 8",
};

export function icon(name) {
  return svg(
    "svg",
    { viewBox: "0 0 16 16", width: 16, height: 16, "aria-hidden": "true", focusable: "false" },
    svg("path", {
      d: PATHS[name],
      fill: "none",
      stroke: "currentColor",
      "stroke-width": 1.4,
      "stroke-linecap": "round",
      "stroke-linejoin": "round",
    }),
  );
}
