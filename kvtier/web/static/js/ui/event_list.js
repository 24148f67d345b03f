// Lines of events, the last first.

import { fill, h } from "../core/dom.js";
import { clock, dateTime } from "../core/format.js";
import { isGap } from "../core/live.js";
import { emptyState } from "./notices.js";

export function eventLine(event) {
  const fields = Object.entries(event.fields).map(([key, value]) => [" ", h("b", {}, `${key}=`), String(value)]);
  const isLoud = ["warning", "error", "critical"].includes(event.level);
  return h(
    "li",
    { class: `event event-${event.level}` },
    h("time", { title: dateTime(event.unix_s) }, clock(event.unix_s)),
    h(
      "span",
      { class: "event-name" },
      event.name,
      isLoud && h("span", { class: "visually-hidden" }, ` (${event.level})`),
    ),
    h("span", { class: "event-fields" }, fields),
  );
}

/** Return the wanted events, the last first, and where some may be missing between them. */
export function withGaps(events, isWanted) {
  return events
    .filter((event) => isGap(event) || isWanted(event))
    .filter((event, at, all) => !event.isGap || !all[at - 1]?.isGap);
}

/** What stands for events before the stream of them is open: none means nothing yet. */
export function notConnected() {
  return emptyState(
    "Not connected yet",
    h("p", {}, "Events appear here as they happen, once the daemon sends them. It is asked again by itself."),
  );
}

/** Show these events, and make only the lines that are new. */
export class EventList {
  #lines = new Map();

  constructor(label) {
    this.element = h("ol", { class: "event-list", tabindex: 0, "aria-label": label });
  }

  set(events) {
    const known = this.#lines;
    this.#lines = new Map(events.map((event) => [event.id, known.get(event.id) ?? eventLine(event)]));
    fill(this.element, ...this.#lines.values());
  }
}

export function liveMark() {
  const mark = h("span", { class: "live", role: "status" }, "connecting");
  return {
    element: mark,
    set: (isOn, isPaused = false) => {
      mark.className = isOn && !isPaused ? "live live-on" : "live";
      const text = isPaused ? "paused" : isOn ? "live" : "connecting";
      if (mark.textContent !== text) fill(mark, text);
    },
  };
}
