// Prompts: all of them, sorted and filtered, a page at a time.

import { api } from "../core/api.js";
import { mayChange } from "../core/auth.js";
import { fill, h } from "../core/dom.js";
import { bytes, compact, count, duration, plural, words } from "../core/format.js";
import { poll } from "../core/poll.js";
import { allPrompts, requestsOf, summarize } from "../core/readings.js";
import { address, keepQuery } from "../core/router.js";
import { choiceField, pageHead, textField } from "../ui/fields.js";
import { icon } from "../ui/icons.js";
import { command, emptyState, showProblem } from "../ui/notices.js";
import { STATES, labels, residency, stateBadge, time } from "../ui/prompt_parts.js";
import { Table } from "../ui/table.js";
import { openPinForm } from "./pin_form.js";

export const title = "Prompts";

const KINDS = [
  ["pinned", "Pinned"],
  ["", "All"],
  ["auto", "Found by kvtier"],
  ["unpinned", "Not pinned"],
];
const ORIGINS = { auto: "found by kvtier", request: "by a request", replacement: "a new version" };
const TYPING_MS = 250;

const COLUMNS = [
  {
    key: "name",
    title: "Name",
    head: true,
    kind: "name-cell",
    order: ({ prompt }) => prompt.name,
    shown: ({ prompt }) => [prompt.name, prompt.origin, prompt.labels, prompt.replacement],
    cell: ({ prompt }) => nameCell(prompt),
  },
  {
    key: "state",
    title: "State",
    order: ({ prompt }) => prompt.state,
    shown: ({ prompt }) => [prompt.state, prompt.pinned],
    cell: ({ prompt }) => (prompt.pinned ? stateBadge(prompt.state) : h("span", { class: "muted" }, "not pinned")),
  },
  {
    key: "tokens",
    title: "Tokens",
    end: true,
    order: ({ prompt }) => prompt.num_tokens,
    cell: ({ prompt }) => count(prompt.num_tokens),
  },
  {
    key: "resident",
    title: "Resident",
    order: ({ sum }) => (sum.num_chunks ? sum.num_host_chunks / sum.num_chunks : -1),
    shown: ({ sum }) => [sum.num_host_chunks, sum.num_durable_chunks, sum.num_chunks],
    cell: ({ sum }) => residency(sum),
  },
  {
    key: "disk",
    title: "Disk",
    end: true,
    order: ({ sum }) => sum.disk_bytes,
    cell: ({ sum }) => bytes(sum.disk_bytes),
  },
  {
    key: "hits",
    title: "Hits",
    end: true,
    order: ({ asked }) => asked.hits,
    shown: ({ asked }) => asked,
    cell: ({ asked }) => hitsCell(asked),
  },
  {
    key: "saved",
    title: "Saved",
    end: true,
    order: ({ prompt }) => prompt.usage.saved_prefill_s,
    cell: ({ prompt }) => duration(prompt.usage.saved_prefill_s),
  },
  {
    key: "used",
    title: "Last used",
    order: ({ prompt }) => prompt.usage.last_used_unix_s,
    shown: ({ prompt, minute }) => [prompt.usage.last_used_unix_s, minute],
    cell: ({ prompt }) => h("span", { class: "nowrap" }, time(prompt.usage.last_used_unix_s)),
  },
  {
    key: "priority",
    title: "Priority",
    end: true,
    order: ({ prompt }) => prompt.priority,
    cell: ({ prompt }) => String(prompt.priority),
  },
  { key: "owner", title: "Owner", order: ({ prompt }) => prompt.owner, cell: ({ prompt }) => prompt.owner || "–" },
];

export function show(root, { query, signal }) {
  const chosen = Object.fromEntries(
    ["q", "state", "owner", "selector", "sort"].map((key) => [key, query.get(key) ?? ""]),
  );
  chosen.kind = query.has("kind") ? query.get("kind") : "pinned";
  if (chosen.kind === "all") chosen.kind = "";
  const [key = "saved", how = "down"] = chosen.sort.split(".");
  const summary = h("p", { class: "muted small number", role: "status" }, "…");
  const problems = h("div");
  const nothing = h("div", { hidden: true });
  const table = new Table({
    label: "Prompts",
    columns: COLUMNS,
    keyOf: ({ prompt }) => prompt.pin_id || prompt.name,
    sorted: { key: key || "saved", down: how !== "up" },
    changed: (sorted) => keep({ sort: `${sorted.key}.${sorted.down ? "down" : "up"}` }),
  });
  let prompts = [];
  /** What the rows at hand were asked for; null before the first. */
  let held = null;
  /** Whether they are all that there is of what is chosen. */
  let isWhole = false;
  let listing = null;
  let typing = 0;

  const filters = h(
    "form",
    { class: "filters", role: "search", "aria-label": "Filter prompts" },
    textField("Name, owner or label", "q", { grow: true, type: "search", placeholder: "support", value: chosen.q }),
    choiceField("Show", "kind", KINDS, { value: chosen.kind }),
    choiceField("State", "state", [["", "Any"], ...STATES.map((state) => [state, words(state)])], {
      value: chosen.state,
    }),
    textField("Labels", "selector", { placeholder: "team=support,!draft", value: chosen.selector }),
  );
  filters.addEventListener("submit", (event) => event.preventDefault());
  const filter = () => {
    const changes = Object.fromEntries(new FormData(filters));
    const asksAgain = ["selector", "state"].some((name) => changes[name] !== chosen[name]);
    keep(changes);
    if (asksAgain) isWhole = false;
    draw(true);
    if (!asksAgain) return;
    listing?.abort();
    asking.now();
  };
  filters.addEventListener("input", (event) => {
    clearTimeout(typing);
    typing = setTimeout(filter, event.target.tagName === "SELECT" ? 0 : TYPING_MS);
  });
  signal.addEventListener("abort", () => clearTimeout(typing));

  const pin = () => openPinForm();
  fill(
    root,
    pageHead("Prompts", {
      beside: summary,
      actions: mayChange()
        ? [
            h(
              "button",
              { class: "button button-primary", type: "button", on: { click: pin } },
              icon("plus"),
              "Pin a prompt",
            ),
          ]
        : [],
    }),
    filters,
    problems,
    h("section", { class: "card" }, table.element, nothing),
  );

  const asking = poll(
    async (asked) => {
      const wanted = { selector: chosen.selector, state: chosen.state };
      // What is shown stays until the new list is whole; with nothing to show, pages are shown as they come.
      const stays = isWhole || (fits() && prompts.some(({ prompt }) => isWanted(prompt, chosen)));
      const running = new AbortController();
      listing = running;
      const leave = () => running.abort();
      asked.addEventListener("abort", leave);
      try {
        await allPrompts(api, wanted, running.signal, (some, isAll) => {
          if (running.signal.aborted || (stays && !isAll)) return;
          prompts = some.map((prompt) => ({
            prompt,
            sum: summarize(prompt),
            asked: requestsOf(prompt),
            minute: Math.floor(Date.now() / 60_000),
          }));
          held = wanted;
          isWhole = isAll;
          fill(problems);
          draw(false);
        });
      } catch (error) {
        // Another listing follows at once.
        if (!running.signal.aborted) throw error;
      } finally {
        asked.removeEventListener("abort", leave);
      }
    },
    5,
    signal,
    (error) => showProblem(problems, error),
  );
  if (query.get("pin")) {
    keep({ pin: "" });
    if (mayChange()) pin();
  }

  function keep(changes) {
    Object.assign(chosen, changes);
    keepQuery({ ...chosen, kind: chosen.kind === "pinned" ? "" : chosen.kind || "all" });
  }

  /** Whether the rows at hand have all that is chosen, as far as they were asked for. */
  function fits() {
    return held !== null && held.selector === chosen.selector && ["", chosen.state].includes(held.state);
  }

  function draw(fromStart) {
    const shown = prompts.filter(({ prompt }) => isWanted(prompt, chosen));
    if (fromStart) table.setFromStart(shown);
    else table.set(shown);
    table.element.hidden = shown.length === 0;
    nothing.hidden = shown.length > 0;
    if (!shown.length) fill(nothing, whyNone());
    fill(
      summary,
      shown.length === prompts.length
        ? plural(prompts.length, "prompt")
        : `${count(shown.length)} of ${plural(prompts.length, "prompt")}`,
      isWhole ? "" : " …",
    );
  }

  function whyNone() {
    if (!isWhole) return h("div", { class: "waiting" }, "…");
    return prompts.length || chosen.selector || chosen.state ? noMatch(chosen, prompts) : noPrompts(pin);
  }
}

function isWanted(prompt, { q, kind, state }) {
  if (state && prompt.state !== state.toUpperCase()) return false;
  if (kind === "pinned" && !prompt.pinned) return false;
  if (kind === "unpinned" && prompt.pinned) return false;
  if (kind === "auto" && prompt.origin !== "auto") return false;
  if (!q) return true;
  const text = `${prompt.name} ${prompt.owner} ${Object.entries(prompt.labels)
    .map((each) => each.join("="))
    .join(" ")}`.toLowerCase();
  return q
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

function nameCell(prompt) {
  const notes = [ORIGINS[prompt.origin], prompt.replacement && "a new version waits"].filter(Boolean).join(", ");
  return h(
    "div",
    {},
    h("a", { class: "cut", href: address("prompts", prompt.name), title: prompt.name }, prompt.name),
    notes && h("span", { class: "muted small" }, notes),
    Object.keys(prompt.labels).length > 0 && labels(prompt.labels),
  );
}

function hitsCell({ hits, all }) {
  return [compact(hits), all > hits && h("span", { class: "muted" }, ` / ${compact(all)}`)];
}

function noMatch({ kind }, prompts) {
  const others = kind === "pinned" && prompts.length > 0;
  return emptyState(
    "No prompt matches",
    h(
      "p",
      {},
      others ? "Change the filters, or show all prompts, not only pinned ones." : "Change the " + "filters above.",
    ),
  );
}

function noPrompts(pin) {
  return emptyState(
    "No prompts yet",
    h(
      "p",
      {},
      "Pin the system prompt that your requests share, here or from a shell. kvtier also finds such prompts " +
        "by itself, after a few requests.",
    ),
    h(
      "div",
      { class: "row" },
      mayChange() &&
        h("button", { type: "button", class: "button button-primary", on: { click: pin } }, "Pin a prompt"),
      h("a", { class: "button", href: address("advise") }, "See the advice"),
    ),
    command("kvtier pin support --system prompt.txt"),
  );
}
