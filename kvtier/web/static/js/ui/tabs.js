// Tabs, as the ARIA practices have them: arrows move, and the panel shows at once.

import { h, newId } from "../core/dom.js";

/**
 * @param {string} label
 * @param {{key: string, title: string, panel: HTMLElement}[]} tabs
 * @param {string} chosen
 * @param {(key: string) => void} changed
 */
export function tabbed(label, tabs, chosen, changed) {
  const id = newId("tabs");
  const buttons = tabs.map(({ key, title }) =>
    h("button", { type: "button", role: "tab", id: `${id}-${key}`, "aria-controls": `${id}-${key}-panel` }, title),
  );
  const panels = tabs.map(({ key, panel }) =>
    h("div", { role: "tabpanel", id: `${id}-${key}-panel`, "aria-labelledby": `${id}-${key}`, tabindex: 0 }, panel),
  );

  function choose(index, focus) {
    buttons.forEach((button, at) => {
      button.setAttribute("aria-selected", String(at === index));
      button.tabIndex = at === index ? 0 : -1;
      panels[at].hidden = at !== index;
    });
    if (focus) buttons[index].focus();
    changed(tabs[index].key);
  }

  buttons.forEach((button, index) => {
    button.addEventListener("click", () => choose(index, false));
    button.addEventListener("keydown", (event) => {
      const last = tabs.length - 1;
      const target = {
        ArrowRight: index === last ? 0 : index + 1,
        ArrowLeft: index === 0 ? last : index - 1,
        Home: 0,
        End: last,
      }[event.key];
      if (target === undefined) return;
      event.preventDefault();
      choose(target, true);
    });
  });
  const list = h("div", { class: "tabs", role: "tablist", "aria-label": label }, buttons);
  const at = Math.max(
    0,
    tabs.findIndex(({ key }) => key === chosen),
  );
  choose(at, false);
  return {
    element: h("div", { class: "stack stack-wide" }, list, ...panels),
    choose: (key) =>
      choose(
        tabs.findIndex((each) => each.key === key),
        false,
      ),
  };
}
