// Overview: what is saved, where tokens come from, how full the tiers are, who is attached, what is not ready.

import { api } from "../core/api.js";
import { mayChange } from "../core/auth.js";
import { fill, fillIfChanged, h } from "../core/dom.js";
import { ago, bytes, compact, count, dateTime, duration, percent, plural } from "../core/format.js";
import { poll } from "../core/poll.js";
import { asProblem, titleOf } from "../core/problem.js";
import { address } from "../core/router.js";
import { StackedChart, bar, swatch } from "../ui/charts.js";
import { badge, card, fillTiles, pageHead, segments } from "../ui/fields.js";
import { command, emptyState, showProblem } from "../ui/notices.js";
import { stateBadge } from "../ui/prompt_parts.js";
import { plainTable } from "../ui/table.js";
import { SOURCE_SERIES, historyPoints, savingsOf } from "../core/readings.js";

export const title = "Overview";

/** From the bottom of the chart up: the nearest first. */
const SOURCES = [
  { key: "device", title: "vLLM's prefix cache", fill: "fill-device" },
  { key: "host", title: "host memory", fill: "fill-host" },
  { key: "disk", title: "disk", fill: "fill-disk" },
  { key: "computed", title: "computed", fill: "fill-computed" },
];
/** Seconds between questions for savings: the daemon goes through all prompts for them. */
const SAVINGS_S = 30;
/** A day is the end of a week. */
const SPANS = { hour: ["hour", 3600, 360], day: ["week", 86_400, 1000], week: ["week", 604_800, 500] };

export function show(root, { signal }) {
  const tiles = h("dl", { class: "tiles" });
  const chart = new StackedChart({
    label: "Prompt tokens by where they came from",
    series: SOURCES,
    format: (value) => `${compact(Math.round(value))} /s`,
    isShare: true,
    signal,
    empty: "No requests in this time. Send one through vLLM, and its tokens appear here.",
  });
  let span = "hour";
  const old = h("div");
  const history = poll(
    async (asked) => {
      await showHistory(chart, () => span, asked);
      fill(old);
    },
    10,
    signal,
    (error) => fillIfChanged(old, asProblem(error).message, () => notCurrent(error)),
  );
  const spans = segments(
    "Time",
    [
      ["hour", "Hour"],
      ["day", "Day"],
      ["week", "Week"],
    ],
    span,
    (chosen) => {
      span = chosen;
      history.now();
    },
  );
  const [tiers, engines, ready, best] = [1, 2, 3, 4].map(() => h("div", { class: "waiting" }, "…"));
  const problems = h("div");
  fill(
    root,
    pageHead("Overview"),
    problems,
    tiles,
    card("Where prompt tokens came from", h("div", { class: "card-body" }, old, chart.element), { beside: spans }),
    h("div", { class: "grid grid-2" }, card("Tiers", tiers), card("Readiness", ready)),
    h("div", { class: "grid grid-2" }, card("Prompts that saved the most", best), card("Engines", engines)),
  );
  showTiles(tiles, null, null, null);

  let savings = null;
  let savingsAtMs = 0;
  poll(
    async (asked) => {
      const isOld = !savings || performance.now() - savingsAtMs > SAVINGS_S * 1000;
      const [status, readiness, newSavings] = await Promise.all([
        api.status(undefined, asked),
        api.readiness(undefined, asked),
        isOld ? api.savings(undefined, asked) : savings,
      ]);
      if (isOld) savingsAtMs = performance.now();
      savings = newSavings;
      if (signal.aborted) return;
      fill(problems);
      const saved = savingsOf(savings);
      showTiles(tiles, status, saved, readiness);
      showTiers(tiers, status);
      showEngines(engines, status);
      showReadiness(ready, readiness);
      showBest(best, saved);
    },
    5,
    signal,
    (error) => showProblem(problems, error),
  );
}

async function showHistory(chart, chosen, signal) {
  const span = chosen();
  const [kept, lengthS, points] = SPANS[span];
  const known = historyPoints(await api.history({ span: kept, name: SOURCE_SERIES, points }, signal));
  if (span !== chosen()) return;
  // By the daemon's clock: the browser's may be another.
  const since = (known.at(-1)?.unix_s ?? 0) - lengthS;
  chart.set(known.filter((point) => point.unix_s >= since));
}

function notCurrent(error) {
  const problem = asProblem(error);
  return h("p", { class: "hint hint-warn", role: "status" }, `Not up to date. ${titleOf(problem)}: ${problem.message}`);
}

function showTiles(place, status, saved, readiness) {
  const isThere = status && saved && readiness;
  const values = isThere
    ? [
        [
          "Tokens restored",
          compact(saved.restored_tokens),
          saved.since_unix_s ? `by kvtier, since ${dateTime(saved.since_unix_s).slice(0, 16)}` : "by kvtier",
        ],
        ["Prefill saved", duration(saved.saved_s), "of computing; what loads took is not subtracted"],
        [
          "From a cache",
          percent(saved.cached_tokens, saved.prompt_tokens),
          `of ${compact(saved.prompt_tokens)} prompt tokens`,
        ],
        ["Prompts", count(status.num_pinned), `pinned, of ${count(status.num_prompts)} known`],
        [
          "Ready",
          readiness.num_prompts ? `${count(readiness.num_ready)} of ${count(readiness.num_prompts)}` : "–",
          readiness.ready ? "all can be restored" : "can be restored now",
        ],
      ]
    : ["Tokens restored", "Prefill saved", "From a cache", "Prompts", "Ready"].map((name) => [name, "–", ""]);
  fillTiles(place, values);
}

function showTiers(place, status) {
  place.className = "card-body";
  const tiers = [
    ["Host memory", status.host],
    ["Disk", status.disk],
  ];
  fillIfChanged(place, tiers, () =>
    tiers.map(([name, tier]) =>
      h(
        "div",
        { class: "tier" },
        h(
          "div",
          { class: "spread" },
          h("h3", {}, name),
          h(
            "span",
            { class: "number small" },
            `${bytes(tier.used_bytes)} of ${bytes(tier.limit_bytes)}`,
            h("span", { class: "muted" }, `  ${percent(tier.used_bytes, tier.limit_bytes)}`),
          ),
        ),
        bar(
          [
            { value: Math.min(tier.pinned_bytes, tier.used_bytes), fill: "fill-device" },
            { value: Math.max(0, tier.used_bytes - tier.pinned_bytes), fill: "fill-soft" },
          ],
          tier.limit_bytes,
          `${name}: ${percent(tier.used_bytes, tier.limit_bytes)} used, ` +
            `${percent(tier.pinned_bytes, tier.limit_bytes)} pinned`,
          "bar-tall",
        ),
        h(
          "ul",
          { class: "legend" },
          h("li", {}, swatch("fill-device"), "pinned ", h("b", {}, bytes(tier.pinned_bytes))),
          h(
            "li",
            {},
            swatch("fill-soft"),
            "other ",
            h("b", {}, bytes(Math.max(0, tier.used_bytes - tier.pinned_bytes))),
          ),
          h("li", {}, plural(tier.num_chunks, "chunk")),
        ),
        tier.breaker_open_reason &&
          h("p", { class: "hint hint-warn" }, `Switched off after errors: ${tier.breaker_open_reason}`),
      ),
    ),
  );
}

function showEngines(place, status) {
  place.className = "";
  const models = new Map(status.namespaces.map((each) => [each.namespace_id, each.model]));
  const rows = status.sessions.map((each) => [
    each.model_names[0] ?? models.get(each.namespace_id) ?? "–",
    each.pid,
    each.num_leases,
    each.attached_unix_s,
    each.quarantined,
  ]);
  fillIfChanged(place, [rows, Math.floor(Date.now() / 60_000)], () =>
    rows.length === 0
      ? emptyState(
          "No engine is attached",
          h("p", {}, "Start vLLM with the connector. It attaches by itself."),
          command('vllm serve MODEL --kv-transfer-config \'{"kv_connector": "KVTierConnector", …}\''),
        )
      : plainTable(
          "Engines",
          ["Model", "Process", "Chunks in use", "Attached"],
          rows.map(([model, pid, leases, attached, isGone]) => [
            h("span", { class: "row" }, model, isGone && badge("connection lost", "warn")),
            pid,
            count(leases),
            h("time", { title: dateTime(attached) }, ago(attached)),
          ]),
        ),
  );
}

function showReadiness(place, readiness) {
  place.className = "";
  fillIfChanged(place, readiness, () => {
    if (!readiness.num_prompts)
      return emptyState(
        "Nothing is pinned yet",
        h("p", {}, "Pin a system prompt, or let kvtier find those that requests share."),
        h(
          "div",
          { class: "row" },
          mayChange() &&
            h("a", { class: "button button-primary", href: address("prompts", "", { pin: "1" }) }, "Pin a prompt"),
          h("a", { class: "button", href: address("advise") }, "See the advice"),
        ),
      );
    const bad = readiness.waiting ?? [];
    if (!bad.length)
      return emptyState(
        "Every pinned prompt is ready",
        h(
          "p",
          {},
          `${plural(readiness.num_prompts, "prompt")} can be restored by every attached engine, from disk ` +
            `or from memory.`,
        ),
      );
    return h(
      "ul",
      { class: "top-list" },
      bad
        .slice(0, 6)
        .map((each) =>
          h(
            "li",
            {},
            h("a", { class: "cut", href: address("prompts", each.name) }, each.name),
            stateBadge(each.state),
            h("span", { class: "muted" }, each.why),
          ),
        ),
      bad.length > 6 && h("li", {}, h("a", { href: address("prompts") }, `${count(bad.length - 6)} more`)),
    );
  });
}

function showBest(place, saved) {
  place.className = "";
  const shown = saved.prompts.filter((each) => each.saved_s > 0).slice(0, 6);
  fillIfChanged(place, shown, () =>
    shown.length === 0
      ? emptyState(
          "Nothing was saved yet",
          h("p", {}, "Savings appear with the first request that begins with a pinned prompt."),
        )
      : h(
          "ul",
          { class: "top-list" },
          shown.map((each) =>
            h(
              "li",
              {},
              h("a", { class: "cut", href: address("prompts", each.name) }, each.name),
              h(
                "span",
                { class: "number" },
                duration(each.saved_s),
                h("span", { class: "muted" }, ` · ${compact(each.restored_tokens)} tokens`),
              ),
              bar([{ value: each.saved_s, fill: "fill-host" }], shown[0].saved_s, ""),
            ),
          ),
        ),
  );
}
