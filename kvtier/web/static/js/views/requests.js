// Requests that ended lately: where their tokens came from, and why some missed.

import { api } from "../core/api.js";
import { fill, fillIfChanged, h } from "../core/dom.js";
import { count, dateTime, percent, words } from "../core/format.js";
import { poll } from "../core/poll.js";
import { address, keepQuery } from "../core/router.js";
import { bar, swatch } from "../ui/charts.js";
import { showInDialog } from "../ui/dialogs.js";
import { badge, card, choiceField, pageHead, segments, textField } from "../ui/fields.js";
import { emptyState, showProblem } from "../ui/notices.js";
import { OUTCOMES, outcomeKind } from "../core/outcomes.js";
import { time } from "../ui/prompt_parts.js";
import { Table } from "../ui/table.js";
import { explained } from "./prompt/explain.js";

export const title = "Requests";

const LIMIT = 1000;
const SOURCES = [
  ["device_tokens", "vLLM's prefix cache", "fill-device"],
  ["host_tokens", "host memory", "fill-host"],
  ["disk_tokens", "disk", "fill-disk"],
];

const COLUMNS = [
  {
    key: "outcome",
    title: "Outcome",
    order: ({ outcome }) => outcome,
    shown: ({ outcome }) => outcome,
    cell: ({ outcome }) => outcomeBadge(outcome),
  },
  {
    key: "pin",
    title: "Prompt",
    head: true,
    kind: "name-cell",
    order: ({ pin_name: name }) => name,
    shown: ({ pin_name: name }) => name,
    cell: ({ pin_name: name }) =>
      name ? h("a", { class: "cut", href: address("prompts", name) }, name) : h("span", { class: "muted" }, "none"),
  },
  {
    key: "tokens",
    title: "Tokens",
    end: true,
    order: (each) => each.prompt_tokens,
    cell: (each) => count(each.prompt_tokens),
  },
  {
    key: "sources",
    title: "From caches",
    order: (each) => cached(each) / Math.max(1, each.prompt_tokens),
    shown: (each) => SOURCES.map(([key]) => each[key]),
    cell: sources,
  },
  {
    key: "ended",
    title: "Ended",
    order: (each) => each.ended_unix_s,
    shown: (each) => [each.ended_unix_s, Math.floor(Date.now() / 30_000)],
    cell: (each) => h("span", { class: "nowrap" }, time(each.ended_unix_s)),
  },
  { key: "id", title: "Request", shown: (each) => each.request_id, cell: (each) => explainButton(each) },
];

export function show(root, { query, signal }) {
  const chosen = { misses: query.get("misses") === "1", outcome: query.get("outcome") ?? "", q: query.get("q") ?? "" };
  const table = new Table({
    label: "Requests",
    columns: COLUMNS,
    keyOf: (each) => `${each.request_id} ${each.ended_unix_s}`,
    sorted: { key: "ended", down: true },
  });
  const problems = h("div");
  const reasons = h("div", { class: "waiting" }, "…");
  const nothing = h("div", { hidden: true });
  let requests = [];

  const which = segments(
    "Which requests",
    [
      [false, "All"],
      [true, "Misses"],
    ],
    chosen.misses,
    (misses) => {
      keep({ misses });
      asking.now();
    },
  );
  const outcomes = choiceField(
    "Outcome",
    "outcome",
    [["", "Any"], ...Object.keys(OUTCOMES).map((each) => [each, words(each)])],
    { value: chosen.outcome },
  );
  const filters = h(
    "form",
    { class: "filters", role: "search", "aria-label": "Filter requests" },
    textField("Prompt or request", "q", { grow: true, type: "search", value: chosen.q }),
    outcomes,
  );
  filters.addEventListener("input", ({ target }) => {
    keep({ [target.name]: target.value });
    draw(true);
  });
  filters.addEventListener("submit", (event) => event.preventDefault());
  const legend = h(
    "ul",
    { class: "legend" },
    SOURCES.map(([, name, kind]) => h("li", {}, swatch(kind), name)),
  );
  fill(
    root,
    pageHead("Requests", { text: `The last ${count(LIMIT)} that engines have reported.`, actions: [which] }),
    problems,
    card("By outcome", reasons),
    filters,
    h(
      "section",
      { class: "card" },
      h("div", { class: "card-head" }, h("h2", {}, "Requests"), legend),
      table.element,
      nothing,
    ),
  );

  const asking = poll(
    async (asked) => {
      const misses = chosen.misses;
      const answer = await api.requests({ limit: LIMIT, misses_only: misses || undefined }, asked);
      if (misses !== chosen.misses) return;
      requests = answer.requests.map((each) => ({ ...each, outcome: each.outcome.toLowerCase() }));
      fill(problems);
      draw(false);
    },
    4,
    signal,
    (error) => showProblem(problems, error),
  );

  function keep(changes) {
    Object.assign(chosen, changes);
    keepQuery({ ...chosen, misses: chosen.misses ? "1" : "" });
  }

  function draw(fromStart) {
    showReasons(reasons, requests, (outcome) => {
      outcomes.querySelector("select").value = outcome;
      keep({ outcome });
      draw(true);
    });
    const text = chosen.q.toLowerCase();
    const shown = requests.filter(
      (each) =>
        (!chosen.outcome || each.outcome === chosen.outcome) &&
        (!text || `${each.pin_name} ${each.request_id}`.toLowerCase().includes(text)),
    );
    if (fromStart) table.setFromStart(shown);
    else table.set(shown);
    table.element.hidden = !shown.length;
    nothing.hidden = shown.length > 0;
    if (!shown.length)
      fill(
        nothing,
        requests.length
          ? emptyState("No request matches", h("p", {}, "Change the filters above."))
          : chosen.misses
            ? emptyState("No misses", h("p", {}, "Every request lately got what kvtier has of it."))
            : emptyState(
                "No requests yet",
                h("p", {}, "Send one through a vLLM that is attached. It appears here when it ends."),
              ),
      );
  }
}

function showReasons(place, requests, choose) {
  place.className = "";
  const totals = new Map();
  for (const { outcome } of requests) totals.set(outcome, (totals.get(outcome) ?? 0) + 1);
  const rows = [...totals].sort(([, a], [, b]) => b - a);
  fillIfChanged(place, rows, () =>
    rows.length === 0
      ? emptyState("Nothing to count yet")
      : h(
          "ul",
          { class: "top-list" },
          rows.map(([outcome, num]) =>
            h(
              "li",
              {},
              h(
                "span",
                { class: "row" },
                h("button", { type: "button", class: "link", on: { click: () => choose(outcome) } }, words(outcome)),
                h(
                  "span",
                  { class: "muted" },
                  OUTCOMES[outcome]
                    ? `${OUTCOMES[outcome][0]}${OUTCOMES[outcome][1] === "nothing" ? "" : `; ${OUTCOMES[outcome][1]}`}`
                    : "",
                ),
              ),
              h(
                "span",
                { class: "number" },
                count(num),
                h("span", { class: "muted" }, `  ${percent(num, requests.length)}`),
              ),
              bar(
                [
                  {
                    value: num,
                    fill: outcome === "hit" ? "fill-device" : outcome === "part" ? "fill-host" : "fill-computed",
                  },
                ],
                requests.length,
                "",
              ),
            ),
          ),
        ),
  );
}

function cached(each) {
  return SOURCES.reduce((sum, [key]) => sum + each[key], 0);
}

function sources(each) {
  const said =
    SOURCES.filter(([key]) => each[key])
      .map(([key, name]) => `${count(each[key])} from ${name}`)
      .join(", ") || "all computed";
  return h(
    "span",
    { class: "row nowrap", title: said },
    bar(
      SOURCES.map(([key, , kind]) => ({ value: each[key], fill: kind })),
      each.prompt_tokens,
      said,
      "bar-mini",
    ),
    h("span", { class: "muted number" }, percent(cached(each), each.prompt_tokens)),
  );
}

function outcomeBadge(outcome) {
  const element = badge(words(outcome), outcomeKind(outcome));
  if (OUTCOMES[outcome]) [element.title] = OUTCOMES[outcome];
  return element;
}

function explainButton(each) {
  const open = async () => {
    const place = h("div", { class: "stack waiting" }, "…");
    showInDialog(
      "Why",
      h(
        "div",
        { class: "stack" },
        h("p", { class: "muted" }, `Request ${each.request_id}, ended ${dateTime(each.ended_unix_s)}.`),
        place,
      ),
    );
    try {
      const answer = await api.explainRecent(each.request_id);
      place.className = "stack";
      fill(place, explained(answer, each.pin_name));
    } catch (error) {
      showProblem(place, error);
    }
  };
  return h(
    "button",
    {
      type: "button",
      class: "link mono cut",
      title: each.request_id,
      "aria-label": `Explain request ${each.request_id}`,
      on: { click: open },
    },
    each.request_id.length > 18 ? `${each.request_id.slice(0, 17)}…` : each.request_id,
  );
}
