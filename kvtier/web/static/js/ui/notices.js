// Short messages at the edge, and problems in place.

import { fill, h } from "../core/dom.js";
import { asProblem, titleOf } from "../core/problem.js";
import { icon } from "./icons.js";

const SHOWN_MS = 6000;

/** Say that something was done. */
export function say(text) {
  show(text, "", SHOWN_MS);
}

/** Say what failed; it stays until it is closed. */
export function complain(error) {
  const problem = asProblem(error);
  if (problem.status === 401) return; // the sign-in, which comes at once, says so
  show(`${titleOf(problem)}: ${problem.message}`, "notice-bad", 0);
}

function show(text, kind, ms) {
  const box = document.getElementById("notices");
  const close = h(
    "button",
    { class: "button button-plain button-icon", type: "button", "aria-label": "Close the message" },
    icon("close"),
  );
  const notice = h("div", { class: `notice ${kind}` }, h("p", {}, text), close);
  close.addEventListener("click", () => notice.remove());
  box.append(notice);
  while (box.children.length > 4) box.firstElementChild.remove();
  if (ms) setTimeout(() => notice.remove(), ms);
}

/** A problem where its content would be: what it is and its remedy. */
export function problemBox(error) {
  const problem = asProblem(error);
  const fields = Array.isArray(problem.body?.errors) ? problem.body.errors : [];
  return h(
    "div",
    { class: "problem", role: "alert" },
    h("strong", {}, titleOf(problem)),
    h("p", {}, problem.message),
    fields.length > 0 &&
      h(
        "ul",
        {},
        fields.map((each) =>
          h("li", { class: "small" }, typeof each === "string" ? each : (each.message ?? JSON.stringify(each))),
        ),
      ),
  );
}

/** Fill a place with a problem; the next answer takes its place. */
export function showProblem(place, error) {
  fill(place, problemBox(error));
}

/**
 * Nothing is here, and what to do.
 * @param {string} title
 * @param {...any} children
 */
export function emptyState(title, ...children) {
  return h("div", { class: "empty" }, h("h2", {}, title), ...children);
}

export function command(text) {
  return h("code", { class: "command" }, text);
}
