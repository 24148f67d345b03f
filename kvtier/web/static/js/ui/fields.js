// Labelled fields of forms, and how values are shown.

import { fillIfChanged, h, newId } from "../core/dom.js";

/**
 * @param {string} label
 * @param {string} name
 * @param {object} [options] `hint`, `value`, `type`, `grow`; everything else is an attribute of the input.
 */
export function textField(label, name, { hint, grow = false, ...attributes } = {}) {
  return wrapped(label, hint, grow, (id, described) =>
    h("input", {
      id,
      name,
      type: "text",
      autocomplete: "off",
      spellcheck: "false",
      "aria-describedby": described,
      ...attributes,
    }),
  );
}

export function textArea(label, name, { hint, ...attributes } = {}) {
  return wrapped(label, hint, false, (id, described) =>
    h("textarea", { id, name, spellcheck: "false", "aria-describedby": described, ...attributes }),
  );
}

/** @param {[string, string][]} choices Value and text. */
export function choiceField(label, name, choices, { hint, value, grow = false, ...attributes } = {}) {
  return wrapped(label, hint, grow, (id, described) =>
    h(
      "select",
      { id, name, "aria-describedby": described, ...attributes },
      choices.map(([each, text]) => h("option", { value: each, selected: each === value }, text)),
    ),
  );
}

export function checkField(label, name, { hint, ...attributes } = {}) {
  return h(
    "label",
    { class: "check" },
    h("input", { type: "checkbox", name, ...attributes }),
    h("span", {}, label, hint && h("small", { class: "small" }, hint)),
  );
}

function wrapped(label, hint, grow, make) {
  const id = newId("field");
  const hintId = hint ? `${id}-hint` : null;
  return h(
    "div",
    { class: grow ? "field field-grow" : "field" },
    h("label", { for: id }, label),
    make(id, hintId),
    hint && h("p", { id: hintId, class: "field-hint" }, hint),
  );
}

/**
 * Buttons of which one is pressed.
 * @param {string} label Of the group.
 * @param {[string, any][]} choices Value and content; a content that is no text needs a `title` as third.
 */
export function segments(label, choices, chosen, changed) {
  const buttons = choices.map(([value, content, title]) =>
    h(
      "button",
      {
        type: "button",
        "aria-pressed": String(value === chosen),
        title,
        "aria-label": title,
        on: {
          click: () => {
            buttons.forEach((each, index) => each.setAttribute("aria-pressed", String(choices[index][0] === value)));
            changed(value);
          },
        },
      },
      content,
    ),
  );
  return h("div", { class: "segments", role: "group", "aria-label": label }, buttons);
}

/** A card with a head. `beside` is at the end of the head. */
export function card(title, body, { beside, note, level = "h2" } = {}) {
  const head = h("div", { class: "card-head" }, h("div", {}, h(level, {}, title), note && h("p", {}, note)), beside);
  return h("section", { class: "card" }, head, body);
}

/** The head of a page: its title and what can be done. */
export function pageHead(title, { text, actions = [], beside } = {}) {
  return h(
    "header",
    { class: "page-head" },
    h(
      "div",
      { class: "page-head-text" },
      h("div", { class: "title-row" }, h("h1", { tabindex: -1 }, title), beside),
      text && h("p", {}, text),
    ),
    actions.length > 0 && h("div", { class: "row" }, actions),
  );
}

/** Names and values. */
export function facts(pairs) {
  return h(
    "dl",
    { class: "facts" },
    pairs.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

/** A time for people, with the exact one as its title. */
export function badge(text, kind = "") {
  return h("span", { class: `badge ${kind ? `badge-${kind}` : ""}` }, text);
}

/**
 * Show numbers as tiles; nothing changes where they are the same as before.
 * @param {HTMLElement} place A `dl`.
 * @param {[string, string, string][]} values Name, value and a note of each.
 */
export function fillTiles(place, values) {
  fillIfChanged(place, values, () =>
    values.map(([name, value, note]) =>
      h(
        "div",
        { class: "tile" },
        h("dt", {}, name),
        h("dd", { class: "tile-value" }, value),
        h("dd", { class: "tile-note" }, note),
      ),
    ),
  );
}
