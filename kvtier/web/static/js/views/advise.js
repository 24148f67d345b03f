// Advice: what requests share and no pin keeps, and prompts that change in the middle.

import { api } from "../core/api.js";
import { mayChange } from "../core/auth.js";
import { fill, fillIfChanged, h } from "../core/dom.js";
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
  const head = h("div", {}, pageHead("Advice"));
  fill(root, head, problems, fill(content, h("div", { class: "waiting" }, "…")));
  const asking = poll(
    async (asked) => {
      const advice = await api.advice({}, asked);
      fill(problems);
      fillIfChanged(head, [advice.mode, advice.max_bytes], () =>
        pageHead("Advice", { text: `${MODES[advice.mode] ?? ""} The budget is ${bytes(advice.max_bytes)} on disk.` }),
      );
      fillIfChanged(content, advice, () => all(advice, () => asking.now()));
    },
    10,
    signal,
    (error) => showProblem(problems, error),
  );
}

function all(advice, changed) {
  const namespaces = advice.namespaces.filter((each) => each.prefixes.length || each.places.length);
  if (!namespaces.length)
    return h(
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
  return namespaces.map((each) => [
    card(each.model, [each.prefixes.map((prefix) => prefixRow(prefix, advice.mode, changed))], {
      note:
        `${compact(Math.round(each.requests_per_hour))} requests and ` +
        `${compact(Math.round(each.prompt_tokens_per_hour))} prompt tokens an hour. What is chosen saves ` +
        `${duration(each.saved_s_per_hour)} of prefill an hour, ${percent(each.saved_share)} of all prompt tokens.`,
    }),
    each.places.length > 0 &&
      card("Prompts that change in the middle", each.places.map(placeRow), {
        note: "Nothing behind such a place is shared. Put it behind the system prompt, into the user turn.",
      }),
  ]);
}

function prefixRow(prefix, mode, changed) {
  const verdict = words(prefix.verdict).replaceAll(" ", "_");
  const isChosen = verdict === "chosen";
  const name = `${prefix.is_system_prompt ? "System prompt" : "Beginning"} of ${plural(prefix.num_tokens, "token")}`;
  return h(
    "div",
    { class: "advice" },
    h(
      "div",
      { class: "stack" },
      h(
        "div",
        { class: "row" },
        h("h3", {}, prefix.pin_name ? h("a", { href: address("prompts", prefix.pin_name) }, prefix.pin_name) : name),
        badge(isChosen ? "worth a pin" : (WHY_NOT[verdict] ?? words(verdict)), isChosen ? "good" : ""),
      ),
      h(
        "div",
        { class: "advice-facts" },
        prefix.pin_name && h("span", {}, name),
        h("span", {}, h("b", {}, compact(Math.round(prefix.requests_per_hour))), " requests an hour"),
        h("span", {}, h("b", {}, count(prefix.num_prompts)), " different prompts"),
        h("span", {}, h("b", {}, duration(prefix.saved_s_per_hour)), " of prefill saved an hour"),
        h("span", {}, h("b", {}, bytes(prefix.added_bytes)), " more on disk"),
        h("span", {}, "seen ", ago(prefix.last_seen_unix_s)),
      ),
    ),
    mayChange() && verdict !== "named" && isChosen && acceptButton(prefix, mode, changed),
  );
}

/** One click: it gets a name that can be changed later. The automatic pin is adopted, its chunks stay. */
function acceptButton(prefix, mode, changed) {
  if (!prefix.pin_name)
    return mode === "pin" && h("span", { class: "muted small" }, "Pinned with the next such request");
  const label = `Accept ${prefix.pin_name}`;
  const button = h("button", { type: "button", class: "button button-primary", "aria-label": label }, "Accept");
  const named = h("button", { type: "button", class: "button", "aria-label": `${label} with a name` }, "Name…");
  button.addEventListener("click", async () => {
    button.disabled = true;
    try {
      await accept(prefix, prefix.pin_name.replace(/^auto-/, "prompt-"));
      changed();
    } catch (error) {
      complain(error);
      button.disabled = false;
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
}

async function accept(prefix, name) {
  await api.adopt(name, prefix.pin_name);
  say(`${name} is pinned, and stays.`);
}

function placeRow(place) {
  return h(
    "div",
    { class: "advice" },
    h(
      "div",
      { class: "stack" },
      h("h3", {}, `After ${plural(place.num_stable_tokens, "token")} of ${count(place.num_tokens)}`),
      h(
        "p",
        { class: "difference-text" },
        place.before && h("span", { class: "muted" }, `…${place.before}`), // a viewer gets none
        place.examples.map((each, at) => [at > 0 && h("span", { class: "muted" }, " | "), h("mark", {}, each)]),
      ),
      h(
        "p",
        { class: "advice-facts" },
        `${plural(place.num_prompts, "different prompt")}, seen ${ago(place.seen_unix_s)}`,
      ),
    ),
  );
}
