// Events: what the daemon does, live.

import { fill, fillIfChanged, h, oncePerFrame } from "../core/dom.js";
import { plural } from "../core/format.js";
import { follow, isConnected, isGap, recent } from "../core/live.js";
import { EventList, liveMark, notConnected, withGaps } from "../ui/event_list.js";
import { choiceField, pageHead, textField } from "../ui/fields.js";
import { emptyState } from "../ui/notices.js";

export const title = "Events";

const LEVELS = [
  ["", "Any"],
  ["warning", "Warnings and errors"],
  ["error", "Errors"],
];
const RANKS = { info: 0, warning: 1, error: 2, critical: 3 };

export function show(root, { signal }) {
  const list = new EventList("Events");
  const mark = liveMark();
  const number = h("span", { class: "muted small number" });
  let paused = null;
  const pause = h("button", { type: "button", class: "button", "aria-pressed": "false" }, "Pause");
  const filters = h(
    "form",
    { class: "filters", role: "search", "aria-label": "Filter events" },
    textField("Event or field", "q", { grow: true, type: "search", placeholder: "pin_registered" }),
    choiceField("Level", "level", LEVELS),
  );
  const nothing = h("div");

  const draw = () => {
    const chosen = new FormData(filters);
    const text = chosen.get("q").trim().toLowerCase();
    const rank = RANKS[chosen.get("level")] ?? 0;
    const shown = withGaps(
      paused ?? recent,
      (event) =>
        (RANKS[event.level] ?? 0) >= rank &&
        (!text || `${event.name} ${JSON.stringify(event.fields)}`.toLowerCase().includes(text)),
    );
    list.set(shown);
    const num = shown.filter((event) => !isGap(event)).length;
    const isAnyKept = recent.some((event) => !isGap(event));
    list.element.hidden = !shown.length;
    nothing.hidden = num > 0 || (shown.length > 0 && !isAnyKept);
    if (!nothing.hidden) fillIfChanged(nothing, [isAnyKept, isConnected()], () => why(isAnyKept));
    mark.set(isConnected(), paused !== null);
    fill(number, plural(num, "event"));
  };
  pause.addEventListener("click", () => {
    paused = paused ? null : [...recent];
    pause.setAttribute("aria-pressed", String(paused !== null));
    fill(pause, paused ? "Resume" : "Pause");
    draw();
  });
  filters.addEventListener("input", draw);
  filters.addEventListener("submit", (event) => event.preventDefault());
  fill(
    root,
    pageHead("Events", { beside: mark.element, actions: [pause] }),
    filters,
    h(
      "section",
      { class: "card" },
      h("div", { class: "card-head" }, h("h2", {}, "The last first"), number),
      list.element,
      nothing,
    ),
  );
  // Events come in bursts, and a burst is one picture.
  follow(oncePerFrame(draw), signal);
  draw();
}

/** Why there is no line. */
function why(isAnyKept) {
  if (isAnyKept) return emptyState("No event matches", h("p", {}, "Change the filters above."));
  if (!isConnected()) return notConnected();
  return emptyState(
    "Quiet so far",
    h(
      "p",
      {},
      "Pins, evictions, packs and faults appear here as they happen. The last 500 stay until you close the tab.",
    ),
  );
}
