// Apply: paste a file of prompts, see what it would change, then confirm.

import { api } from "../core/api.js";
import { mayChange } from "../core/auth.js";
import { fill, h } from "../core/dom.js";
import { plural, ttlText } from "../core/format.js";
import { Problem } from "../core/problem.js";
import { address } from "../core/router.js";
import { badge, card, checkField, pageHead, textArea } from "../ui/fields.js";
import { complain, emptyState, say, showProblem } from "../ui/notices.js";
import { computeApplied } from "./computing.js";

export const title = "Apply";

const EXAMPLE = `set: support
defaults:
  owner: support
  labels: {team: support}
prompts:
  - name: support-bot
    system: |
      You are the support bot of …
    priority: 10
  - name: translator
    system: You translate into French.
    ttl: 7d
    sliding: true`;
const KINDS = { create: "good", replace: "accent", update: "accent", unpin: "bad", unchanged: "" };

export function show(root, { signal }) {
  const result = h("div", { "aria-live": "polite" });
  const form = h(
    "form",
    { class: "form", novalidate: true },
    textArea("File", "text", {
      rows: 18,
      class: "yaml",
      placeholder: EXAMPLE,
      hint:
        "YAML or JSON, as kvtier apply -f takes it. Sources stand in the file itself: system, messages, " +
        "text or tokens.",
    }),
    h(
      "div",
      { class: "form-2" },
      checkField("Prune", "prune", { hint: "End pins of the same set that the file does not name." }),
      checkField("Take over", "take_over", { hint: "Move prompts of other sets to this one." }),
    ),
    h(
      "div",
      { class: "row" },
      h("button", { type: "submit", class: "button button-primary" }, "Show what would change"),
    ),
  );
  fill(
    root,
    pageHead("Apply", {
      text:
        "Prompts as a file says: new ones are pinned, others changed, nothing else touched. First you " +
        "see the difference; nothing is changed before you confirm.",
    }),
    h("div", { class: "grid grid-2" }, card("File", h("div", { class: "card-body" }, form)), h("div", {}, result)),
  );
  fill(
    result,
    card(
      "What would change",
      emptyState(
        "Nothing to compare yet",
        h("p", {}, "Paste a file, and see what it would change. Keep it in git: applying it again changes nothing."),
      ),
    ),
  );
  form.addEventListener("input", () => result.querySelector("[data-confirm]")?.remove());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const { text, how } = asked();
    // An answer to another text than the one beside it must not be confirmed.
    const isOld = () => JSON.stringify(asked()) !== JSON.stringify({ text, how });
    const button = form.querySelector("button");
    button.disabled = true;
    try {
      if (!text.trim()) throw new Problem(400, "", "the file is empty: paste one like the example");
      const done = await api.apply(text, { ...how, dry_run: true });
      if (isOld()) showEdited(result);
      else showDone(result, done, () => confirm(text, how));
    } catch (error) {
      if (isOld()) showEdited(result);
      else showFailed(result, error);
    } finally {
      button.disabled = false;
    }
  });

  function asked() {
    const values = new FormData(form);
    return { text: values.get("text"), how: { prune: values.has("prune"), take_over: values.has("take_over") } };
  }

  async function confirm(text, how) {
    const button = result.querySelector("[data-confirm]");
    button.disabled = true;
    try {
      const done = await api.apply(text, { ...how, warm: "false" });
      showDone(result, done, null);
      say(`Applied: ${plural(done.changes.length, "change")}. vLLM computes what is new.`);
      computeApplied(text, how);
    } catch (error) {
      if (signal.aborted) complain(error);
      else showFailed(result, error);
    }
  }
}

function showEdited(place) {
  fill(
    place,
    card(
      "What would change",
      emptyState("The file was edited meanwhile", h("p", {}, "See again what it would change, as it is now.")),
    ),
  );
}

/** Mistakes of the file, each with its line; or whatever else went wrong. */
function showFailed(place, error) {
  const mistakes = error.body?.errors;
  if (!Array.isArray(mistakes) || !mistakes.length) {
    showProblem(place, error);
    return;
  }
  fill(
    place,
    h(
      "div",
      { role: "alert" },
      card(
        "Mistakes",
        mistakes.map((each) =>
          h(
            "div",
            { class: "change" },
            badge(each.line ? `line ${each.line}` : "file", "bad"),
            h("div", {}, each.message),
          ),
        ),
        { note: "Nothing was applied." },
      ),
    ),
  );
}

function showDone(place, done, confirm) {
  const { changes, num_unchanged: same = 0, refused = [], unrendered = [], not_in_files: left = [] } = done;
  const isDry = confirm !== null;
  const button =
    isDry &&
    changes.length > 0 &&
    mayChange() &&
    h(
      "button",
      { type: "button", class: "button button-primary", "data-confirm": "", on: { click: confirm } },
      `Apply ${plural(changes.length, "change")}`,
    );
  const note = `${plural(changes.length, "change")}, ${same} the same`;
  fill(
    place,
    card(
      isDry ? "What would change" : "Applied",
      [
        changes.length === 0 &&
          emptyState(
            isDry ? "Nothing differs" : "Nothing was to do",
            h("p", {}, "Every prompt is as the " + "file says."),
          ),
        changes.map((each) =>
          h(
            "div",
            { class: "change" },
            badge(each.change, KINDS[each.change] ?? ""),
            h(
              "span",
              { class: "change-name" },
              isDry && each.change === "create"
                ? each.name
                : h("a", { href: address("prompts", each.name) }, each.name),
            ),
            fieldsOf(each.fields ?? {}),
          ),
        ),
        refused.map((each) =>
          h(
            "div",
            { class: "change" },
            badge("refused", "bad"),
            h("span", { class: "change-name" }, each.name),
            h("p", { class: "change-fields" }, each.why),
          ),
        ),
        unrendered.length > 0 &&
          h(
            "p",
            { class: "change" },
            badge("no tokens yet", "warn"),
            h("span", {}, `${unrendered.join(", ")}: a vLLM with warm_url renders them when it attaches.`),
          ),
        left.length > 0 &&
          h(
            "p",
            { class: "change" },
            badge("in no file"),
            h("span", {}, `${left.join(", ")}: Prune ends ` + `these pins.`),
          ),
      ],
      { note, beside: button },
    ),
  );
}

function fieldsOf(fields) {
  const shown = Object.entries(fields)
    .map(([name, { before, after }]) => [name, text(name, before), text(name, after)])
    .filter(([, before, after]) => before !== after);
  return (
    shown.length > 0 &&
    h(
      "ul",
      { class: "change-fields" },
      shown.map(([name, before, after]) => h("li", {}, `${name}: ${before} → ${after}`)),
    )
  );
}

function text(name, value) {
  if (name === "ttl_s") return ttlText(value) || "never";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
