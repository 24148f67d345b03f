// The versions of a prompt, what changed between two, and the way back.

import { api } from "../../core/api.js";
import { mayChange } from "../../core/auth.js";
import { fill, fillIfChanged, h } from "../../core/dom.js";
import { count, dateTime } from "../../core/format.js";
import { diffView } from "../../ui/diff.js";
import { openDialog } from "../../ui/dialogs.js";
import { choiceField } from "../../ui/fields.js";
import { emptyState, say, showProblem } from "../../ui/notices.js";
import { sourceText, stateBadge } from "../../ui/prompt_parts.js";
import { plainTable } from "../../ui/table.js";

/** @returns {{element: HTMLElement, shown: () => void, know: (prompt: any) => void}} It asks only while it is shown. */
export function versionsPanel(name, signal, changed) {
  const list = h("div", { class: "waiting" }, "…");
  const compared = h("div", { class: "card-body" });
  const element = h(
    "div",
    { class: "stack stack-wide" },
    h("section", { class: "card" }, list),
    h("section", { class: "card" }, compared),
  );
  const comparison = comparisonIn(compared, signal);
  let known = "";
  let isShown = false;
  let isAsking = false;
  let isCurrent = false;

  async function ask() {
    if (isAsking) return;
    isAsking = true;
    const asked = known;
    try {
      const answer = await api.versions(name, signal);
      const versions = answer.versions.toReversed();
      list.className = "";
      showList(list, name, versions, changed);
      comparison.set(versions);
      isCurrent = asked === known;
    } catch (error) {
      isCurrent = false;
      if (!signal.aborted) showProblem(list, error);
    } finally {
      isAsking = false;
    }
  }

  return {
    element,
    shown: () => {
      if (!isShown) ask();
      isShown = true;
    },
    /** Called with each answer about the prompt: what has changed, or failed, is asked again. */
    know: ({ pin_id, replacement, state }) => {
      const now = JSON.stringify([pin_id, replacement, state]);
      if (known && known !== now) isCurrent = false;
      known = now;
      if (!isShown) return;
      if (isCurrent) comparison.retry();
      else ask();
    },
  };
}

function showList(place, name, versions, changed) {
  fillIfChanged(
    place,
    versions.map(({ name: each, state, pinned, num_tokens }) => [each, state, pinned, num_tokens]),
    () => {
      if (versions.length < 2)
        return emptyState(
          "One version",
          h(
            "p",
            {},
            "Pin the same name again with another text and Replace: this one serves until the new one is " +
              "durable, and stays here to come back to.",
          ),
        );
      return plainTable(
        "Versions",
        ["Version", "State", "Tokens", "Created", h("span", { class: "visually-hidden" }, "Action")],
        versions.map((each) => [
          each.name,
          each.name === name
            ? stateBadge(each.state)
            : h("span", { class: "muted" }, each.pinned ? "waits to replace" : "before"),
          count(each.num_tokens),
          dateTime(each.created_unix_s),
          each.name !== name && !each.pinned && mayChange() ? rollbackButton(name, each, changed) : "",
        ]),
      );
    },
  );
}

function rollbackButton(name, version, changed) {
  const number = Number(/@(\d+)$/.exec(version.name)?.[1]);
  const click = async () => {
    const done = await openDialog({
      title: `Roll ${name} back to ${version.name}?`,
      confirm: "Roll back",
      text:
        "The version from then becomes the newest one. The present one serves until it is durable, and " +
        "stays in this list.",
      submit: async () => {
        const status = await api.rollback(name, number);
        say(
          status.name === name
            ? `${name} is rolled back.`
            : `${status.name} takes the place of ${name} when it is durable.`,
        );
        return true;
      },
    });
    if (done) changed();
  };
  return h(
    "button",
    { type: "button", class: "button", on: { click }, "aria-label": `Roll back to ${version.name}` },
    "Roll back",
  );
}

/** What differs between two versions that are chosen; `retry` asks again after a failure. */
function comparisonIn(place, signal) {
  let compare = null;
  let hasFailed = false;
  return {
    set: (versions) => {
      place.parentElement.hidden = versions.length < 2;
      // The same versions stay as they are chosen.
      fillIfChanged(
        place,
        versions.map(({ name, pin_id }) => [name, pin_id]),
        () => {
          if (versions.length < 2) return null;
          const made = comparisonOf(versions, signal, (failed) => (hasFailed = failed));
          compare = made.compare;
          compare();
          return made.elements;
        },
      );
    },
    retry: () => {
      if (hasFailed) compare();
    },
  };
}

function comparisonOf(versions, signal, ended) {
  const names = versions.map((each) => [each.name, each.name]);
  const result = h("div", { class: "stack", "aria-live": "polite" });
  const before = choiceField("From", "before", names, { value: names[1][0] });
  const after = choiceField("To", "after", names, { value: names[0][0] });
  const texts = new Map();
  const textOf = async (each) => {
    if (!texts.has(each)) texts.set(each, sourceText((await api.prompt(each, signal)).recipe));
    return texts.get(each);
  };
  const compare = async () => {
    const [from, to] = [before, after].map((each) => each.querySelector("select").value);
    try {
      const [left, right] = await Promise.all([textOf(from), textOf(to)]);
      if (!left && !right)
        fill(
          result,
          h(
            "p",
            { class: "muted" },
            "No text is kept of these versions: they were pinned by token ids, or your role does not show it.",
          ),
        );
      else
        fill(
          result,
          diffView(left, right, `Differences from ${from} to ${to}`) ??
            h("p", { class: "muted" }, "Their texts are the same."),
        );
      ended(false);
    } catch (error) {
      ended(true);
      if (!signal.aborted) showProblem(result, error);
    }
  };
  for (const each of [before, after]) each.addEventListener("change", compare);
  return { compare, elements: [h("div", { class: "filters" }, before, after), result] };
}
