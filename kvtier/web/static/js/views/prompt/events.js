// What happens to a prompt, while it is looked at.

import { h } from "../../core/dom.js";
import { follow, isConnected, recent } from "../../core/live.js";
import { EventList, liveMark } from "../../ui/event_list.js";
import { emptyState } from "../../ui/notices.js";

export function eventsPanel(name, signal) {
  const list = new EventList(`Events of ${name}`);
  const mark = liveMark();
  const nothing = emptyState(
    "Nothing has happened since this page was opened",
    h(
      "p",
      {},
      "Changes of the pin, its versions, verifications and transfers appear here as they happen. The " +
        "daemon's log has those from before.",
    ),
  );
  const draw = () => {
    const events = recent.filter(
      ({ fields }) => [fields.name, fields.before, fields.renamed].includes(name) || fields.version === name,
    );
    list.set(events);
    list.element.hidden = events.length === 0;
    nothing.hidden = events.length > 0;
    mark.set(isConnected());
  };
  follow(draw, signal);
  draw();
  return h(
    "section",
    { class: "card" },
    h("div", { class: "card-head" }, h("h2", {}, "Events"), mark.element),
    list.element,
    nothing,
  );
}
