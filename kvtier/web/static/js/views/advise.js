// Advice: what requests share and no pin keeps, and prompts that change in the middle.

import { api } from "../core/api.js";
import { mayChange } from "../core/auth.js";
import { fill, fillIfChanged, h, hasNoFocus, place } from "../core/dom.js";
import { ago, bytes, compact, count, duration, percent, plural, words } from "../core/format.js";
import { poll } from "../core/poll.js";
import { address } from "../core/router.js";
import { openDialog } from "../ui/dialogs.js";
import { badge, card, pageHead, textField } from "../ui/fields.js";
import { command, complain, emptyState, say, showProblem } from "../ui/notices.js";

export const title = "Advice";

const MODES = {
  off: "Prompts are not looked for: cache.auto_pin is off.",
  observe: "kvtier looks, and pins nothing by itself: cache.auto_pin is observe. Pin what is worth it under Prompts.",
  pin: "kvtier pins what is worth it, within its budget. Adopt a pin to give it a name and keep it.",
};
const WHY_NOT = {
  contained: "a longer one is chosen",
  too_short: "too short",
  too_few_requests: "too few requests",
  one_prompt: "one prompt, repeated",
  over_budget: "over the budget",
  named: "already pinned by a person",
};

export function show(root, { signal }) {
  const [problems, content] = [h("div"), h("div", { class: "stack stack-wide" })];
  const mode = h("span");
  fill(root, pageHead("Advice", { text: mode }), problems, fill(content, h("div", { class: "waiting" }, "…")));
  const showAll = allShown(content, () => asking.now());
  const asking = poll(
    async (asked) => {
      const advice = await api.advice({}, asked);
      fill(problems);
      fillIfChanged(mode, [advice.mode, advice.max_bytes], () =>
        [MODES[advice.mode], `The budget is ${bytes(advice.max_bytes)} on disk.`].filter(Boolean).join(" "),
      );
      showAll(advice);
    },
    10,
    signal,
    (error) => showProblem(problems, error),
  );
}

/** Return what shows advice. Rates differ with each answer: numbers change in their place, rows and buttons stay. */
function allShown(content, changed) {
  const nothing = h(
    "section",
    { class: "card" },
    emptyState(
      "No advice yet",
      h(
        "p",
        {},
        "kvtier counts what requests begin with. After a few requests that share a system prompt, what is " +
          "worth a pin is listed here.",
      ),
      command("kvtier advise"),
    ),
  );
  const namespaceOf = keyed(() => namespaceShown(changed));
  return (advice) => {
    const shown = namespaceOf(
      advice.namespaces.filter((each) => each.prefixes.length || each.places.length),
      (each) => each.namespace_id,
    ).flatMap(([each, { elements, set }]) => {
      set(each, advice.mode);
      return elements;
    });
    place(content, shown.length ? shown : [nothing]);
  };
}

/** Return a function that pairs values with what was made for them before, by key, or is made now. */
function keyed(make) {
  let known = new Map();
  return (values, keyOf) => {
    const pairs = values.map((value) => [keyOf(value), value]);
    known = new Map(pairs.map(([key]) => [key, known.get(key) ?? make()]));
    return pairs.map(([key, value]) => [value, known.get(key)]);
  };
}

function namespaceShown(changed) {
  const [title, note, rows, places] = [h("span"), h("span"), h("div"), h("div")];
  const prefixes = card(title, rows, { note });
  const middle = card("Prompts that change in the middle", places, {
    note: "Nothing behind such a place is shared. Put it behind the system prompt, into the user turn.",
  });
  const rowOf = keyed(() => prefixRow(changed));
  return {
    elements: [prefixes, middle],
    set: (namespace, mode) => {
      fillIfChanged(title, namespace.model, () => namespace.model);
      const said =
        `${compact(Math.round(namespace.requests_per_hour))} requests and ` +
        `${compact(Math.round(namespace.prompt_tokens_per_hour))} prompt tokens an hour. What is chosen saves ` +
        `${duration(namespace.saved_s_per_hour)} of prefill an hour, ${percent(namespace.saved_share)} of all ` +
        `prompt tokens.`;
      fillIfChanged(note, said, () => said);
      const wanted = rowOf(namespace.prefixes, (each) => each.digest).map(([prefix, row]) => {
        row.set(prefix, mode);
        return row.element;
      });
      place(rows, isHeld(rows) ? asBefore([...rows.children], wanted) : wanted);
      middle.hidden = !namespace.places.length;
      fillIfChanged(places, [namespace.places, minute()], () => namespace.places.map(placeRow));
    },
  };
}

const minute = () => Math.floor(Date.now() / 60_000);

/** Whether someone points at it, or has the focus in it: then nothing in it may change its place. */
function isHeld(element) {
  return element.matches(":hover") || element.contains(document.activeElement);
}

/** What was shown stays in its order, and what is new comes behind it. */
function asBefore(before, wanted) {
  const shown = before.filter((each) => wanted.includes(each));
  return [...shown, ...wanted.filter((each) => !shown.includes(each))];
}

function prefixRow(changed) {
  const [heading, verdictMark] = [h("h3", { tabindex: -1 }), h("span")];
  const [numbers, buttons] = [h("div", { class: "advice-facts" }), h("div")];
  const element = h(
    "div",
    { class: "advice" },
    h("div", { class: "stack" }, h("div", { class: "row" }, heading, verdictMark), numbers),
    buttons,
  );
  const accepting = acceptance(heading, changed);
  return {
    element,
    set: (prefix, mode) => {
      const verdict = words(prefix.verdict).replaceAll(" ", "_");
      const isChosen = verdict === "chosen";
      const begins = prefix.is_system_prompt ? "System prompt" : "Beginning";
      const name = `${begins} of ${plural(prefix.num_tokens, "token")}`;
      fillIfChanged(heading, [prefix.pin_name, name], () =>
        prefix.pin_name ? h("a", { href: address("prompts", prefix.pin_name) }, prefix.pin_name) : name,
      );
      fillIfChanged(verdictMark, verdict, () =>
        badge(isChosen ? "worth a pin" : (WHY_NOT[verdict] ?? words(verdict)), isChosen ? "good" : ""),
      );
      fillIfChanged(numbers, [prefix, minute()], () => numbersOf(prefix, name));
      if (accepting.isRunning()) return;
      const hadFocus = buttons.contains(document.activeElement);
      const isOffered = mayChange() && isChosen;
      fillIfChanged(buttons, [isOffered, prefix.pin_name, mode], () => isOffered && accepting.buttons(prefix, mode));
      buttons.hidden = !buttons.hasChildNodes();
      if (hadFocus && hasNoFocus()) heading.focus({ preventScroll: true });
    },
  };
}

function numbersOf(prefix, name) {
  return [
    prefix.pin_name && h("span", {}, name),
    h("span", {}, h("b", {}, compact(Math.round(prefix.requests_per_hour))), " requests an hour"),
    h("span", {}, h("b", {}, count(prefix.num_prompts)), " different prompts"),
    h("span", {}, h("b", {}, duration(prefix.saved_s_per_hour)), " of prefill saved an hour"),
    h("span", {}, h("b", {}, bytes(prefix.added_bytes)), " more on disk"),
    h("span", {}, "seen ", ago(prefix.last_seen_unix_s)),
  ];
}

/** One click: it gets a name that can be changed later. The automatic pin is adopted, its chunks stay. */
function acceptance(heading, changed) {
  let isRunning = false;
  return {
    isRunning: () => isRunning,
    buttons: (prefix, mode) => {
      if (!prefix.pin_name)
        return mode === "pin" && h("span", { class: "muted small" }, "Pinned with the next such request");
      const label = `Accept ${prefix.pin_name}`;
      const button = h("button", { type: "button", class: "button button-primary", "aria-label": label }, "Accept");
      const named = h("button", { type: "button", class: "button", "aria-label": `${label} with a name` }, "Name…");
      const run = (value) => {
        isRunning = button.disabled = named.disabled = value;
      };
      button.addEventListener("click", async () => {
        run(true);
        try {
          await accept(prefix, prefix.pin_name.replace(/^auto-/, "prompt-"));
          isRunning = false; // the buttons go with the next answer
          if (hasNoFocus()) heading.focus({ preventScroll: true });
          changed();
        } catch (error) {
          complain(error);
          run(false);
          if (hasNoFocus()) button.focus();
        }
      });
      named.addEventListener("click", async () => {
        const done = await openDialog({
          title: `Name ${prefix.pin_name}`,
          confirm: "Accept",
          text: "It is pinned by this name from now on. Its chunks stay.",
          fields: [textField("Name", "name", { required: true, placeholder: "support" })],
          submit: async (values) => {
            await accept(prefix, values.get("name").trim());
            return true;
          },
        });
        if (done) changed();
      });
      return h("div", { class: "row" }, named, button);
    },
  };
}

async function accept(prefix, name) {
  await api.adopt(name, prefix.pin_name);
  say(`${name} is pinned, and stays.`);
}

function placeRow(found) {
  return h(
    "div",
    { class: "advice" },
    h(
      "div",
      { class: "stack" },
      h("h3", {}, `After ${plural(found.num_stable_tokens, "token")} of ${count(found.num_tokens)}`),
      h(
        "p",
        { class: "difference-text" },
        found.before && h("span", { class: "muted" }, `…${found.before}`), // a viewer gets none
        found.examples.map((each, at) => [at > 0 && h("span", { class: "muted" }, " | "), h("mark", {}, each)]),
      ),
      h(
        "p",
        { class: "advice-facts" },
        `${plural(found.num_prompts, "different prompt")}, seen ${ago(found.seen_unix_s)}`,
      ),
    ),
  );
}
