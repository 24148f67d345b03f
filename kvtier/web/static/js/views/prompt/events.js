// What happens to a prompt, while it is looked at.

import { fillIfChanged, h, oncePerFrame } from "../../core/dom.js";
import { follow, isConnected, isGap, recent } from "../../core/live.js";
import { EventList, liveMark, notConnected, withGaps } from "../../ui/event_list.js";
import { emptyState } from "../../ui/notices.js";

export function eventsPanel(name, signal) {
  const list = new EventList(`Events of ${name}`);
  const mark = liveMark();
  const nothing = h("div");
  let openedId = 0;
  const draw = () => {
    const events = withGaps(
      recent,
      ({ fields }) => [fields.name, fields.before, fields.renamed].includes(name) || fields.version === name,
    );
    // Of the time before this page was opened the list has what it has: nothing is missing before the oldest line.
    while (events.length && isGap(events.at(-1)) && events.at(-1).id <= openedId) events.pop();
    list.set(events);
    list.element.hidden = events.length === 0;
    nothing.hidden = events.length > 0;
    if (!nothing.hidden) fillIfChanged(nothing, isConnected(), () => (isConnected() ? quiet() : notConnected()));
    mark.set(isConnected());
  };
  follow(oncePerFrame(draw), signal);
  openedId = recent[0]?.id ?? 0;
  draw();
  return h(
    "section",
    { class: "card" },
    h("div", { class: "card-head" }, h("h2", {}, "Events"), mark.element),
    list.element,
    nothing,
  );
}

function quiet() {
  return emptyState(
    "Nothing has happened since this page was opened",
    h(
      "p",
      {},
      "Changes of the pin, its versions, verifications and transfers appear here as they happen. The " +
        "daemon's log has those from before.",
    ),
  );
}
