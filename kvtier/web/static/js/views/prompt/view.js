// One prompt: where its chunks are, what it was good for, its source and versions, why requests hit it, what happens.

import { api } from "../../core/api.js";
import { mayChange } from "../../core/auth.js";
import { fill, fillIfChanged, h } from "../../core/dom.js";
import { bytes, compact, count, dateTime, duration, percent, until, words } from "../../core/format.js";
import { poll } from "../../core/poll.js";
import { chunkPlaces, requestsOf, summarize } from "../../core/readings.js";
import { address, keepQuery } from "../../core/router.js";
import { bar } from "../../ui/charts.js";
import { chunkMap } from "../../ui/chunk_map.js";
import { facts, fillTiles, pageHead } from "../../ui/fields.js";
import { emptyState, problemBox, showProblem } from "../../ui/notices.js";
import { labels, sourceText, stateBadge, time } from "../../ui/prompt_parts.js";
import { tabbed } from "../../ui/tabs.js";
import { actionsOf } from "./actions.js";
import { explainPanel } from "./explain.js";
import { eventsPanel } from "./events.js";
import { versionsPanel } from "./versions.js";

export const title = "Prompt";

export function show(root, { argument: name, query, signal }) {
  const badge = h("span");
  const [problems, hints] = [h("div"), h("div", { class: "stack" })];
  const tiles = h("dl", { class: "tiles" });
  const [map, about, source] = [
    h("div", { class: "card-body" }),
    h("div", { class: "card-body" }),
    h("div", { class: "card-body" }),
  ];
  const again = () => asking.now();
  const actions = actionsOf(again);
  const versions = versionsPanel(name, signal, again);
  const panels = [
    {
      key: "chunks",
      title: "Chunks",
      panel: h(
        "div",
        { class: "grid grid-2 grid-loose" },
        h("section", { class: "card" }, map),
        h("section", { class: "card" }, about),
      ),
    },
    { key: "source", title: "Source", panel: h("section", { class: "card" }, source) },
    { key: "versions", title: "Versions", panel: versions.element },
    { key: "explain", title: "Explain a request", panel: explainPanel(name) },
    { key: "events", title: "Events", panel: eventsPanel(name, signal) },
  ];
  const parts = tabbed("Parts of the prompt", panels, query.get("tab") ?? "chunks", (tab) => {
    keepQuery({ tab: tab === "chunks" ? "" : tab });
    if (tab === "versions") versions.shown();
  }).element;
  // The head stays the same element: the title has the focus on arrival.
  const head = pageHead(name, { beside: badge, actions: mayChange() ? [actions.element] : [] });
  fill(root, h("div", { class: "stack" }, crumbs(name), head), problems, hints, tiles, parts);
  showTiles(tiles, null);
  const showMap = mapShown(map, signal);

  const asking = poll(
    async (asked) => {
      const prompt = await api.prompt(name, asked);
      tiles.hidden = parts.hidden = false;
      fill(problems);
      fillIfChanged(badge, [prompt.state, prompt.pinned], () =>
        prompt.pinned ? stateBadge(prompt.state) : h("span", { class: "badge" }, "not pinned"),
      );
      actions.set(prompt);
      showHints(hints, prompt);
      showTiles(tiles, prompt);
      showFacts(about, prompt);
      showSource(source, prompt);
      versions.know(prompt);
      await showMap(prompt, asked);
    },
    3,
    signal,
    (error) => {
      if (error.status === 404) {
        const hadFocus = parts.contains(document.activeElement);
        tiles.hidden = parts.hidden = true;
        for (const each of [badge, hints, about, source]) fill(each);
        showMap(null);
        actions.set(null);
        if (hadFocus) head.querySelector("h1").focus({ preventScroll: true });
        fillIfChanged(problems, 404, () =>
          emptyState(
            `There is no prompt ${name}`,
            h("p", {}, "It was renamed, or evicted after its pin ended."),
            h("div", { class: "row" }, h("a", { class: "button", href: address("prompts") }, "All prompts")),
          ),
        );
      } else showProblem(problems, error);
    },
  );
}

function ending(prompt) {
  if (!prompt.pinned) {
    return "not pinned";
  }
  return prompt.expires_unix_s ? "ends by itself" : "never ends by itself";
}

function crumbs(name) {
  return h(
    "nav",
    { class: "crumbs", "aria-label": "Breadcrumb" },
    h("a", { href: address("prompts") }, "Prompts"),
    h("span", { "aria-hidden": "true" }, "  /  "),
    h("span", { "aria-current": "page" }, name),
  );
}

function showHints(place, prompt) {
  fillIfChanged(place, [prompt.error, prompt.replacement, prompt.state, prompt.origin], () => [
    prompt.error && h("p", { class: "hint hint-warn" }, prompt.error),
    prompt.replacement &&
      h(
        "p",
        { class: "hint" },
        "A new version, ",
        h("a", { href: address("prompts", prompt.replacement) }, prompt.replacement),
        ", takes its place when it is durable.",
      ),
    prompt.state === "OVER_QUOTA" &&
      h(
        "p",
        { class: "hint hint-warn" },
        "disk.bytes is used up, or the file system is full. Free space, or unpin what is not needed.",
      ),
    prompt.origin === "auto" &&
      h(
        "p",
        { class: "hint" },
        "kvtier found this prompt in requests and pinned it by itself. Adopt it to give it a name; then it stays.",
      ),
  ]);
}

function showTiles(place, prompt) {
  const sum = prompt && summarize(prompt);
  const asked = prompt && requestsOf(prompt);
  const usage = prompt?.usage;
  const values = prompt
    ? [
        ["Tokens", count(prompt.num_tokens), `${count(sum.covered_tokens)} in ${count(sum.num_chunks)} chunks`],
        [
          "Hits",
          compact(asked.hits),
          asked.all ? `${percent(asked.hits, asked.all)} of ${compact(asked.all)} requests` : "no request yet",
        ],
        [
          "Prefill saved",
          duration(usage.saved_prefill_s),
          `${compact(usage.host_tokens + usage.disk_tokens)} tokens restored`,
        ],
        [
          "On disk",
          bytes(sum.disk_bytes),
          sum.disk_bytes ? `${(sum.durable_raw_bytes / sum.disk_bytes).toFixed(2)} times smaller` : "nothing yet",
        ],
        ["Priority", String(prompt.priority), ending(prompt)],
      ]
    : ["Tokens", "Hits", "Prefill saved", "On disk", "Priority"].map((each) => [each, "–", ""]);
  fillTiles(place, values);
}

/** Return what shows where the chunks of a prompt are; of null nothing. */
function mapShown(place, signal) {
  let drawn = new AbortController();
  signal.addEventListener("abort", () => drawn.abort());
  const renewed = () => {
    drawn.abort();
    drawn = new AbortController();
    return drawn.signal;
  };
  return async (prompt, asked) => {
    if (prompt) await showMap(place, prompt, renewed, asked);
    else {
      renewed();
      fill(place);
    }
  };
}

/** @param {() => AbortSignal} renewed Ends the maps that are shown; of the next ones. */
async function showMap(place, prompt, renewed, asked) {
  let namespaces;
  try {
    namespaces = await chunkPlaces(api, prompt, asked);
  } catch (error) {
    if (asked.aborted) return;
    fillIfChanged(place, error.message, () => {
      renewed();
      return problemBox(error);
    });
    return;
  }
  if (asked.aborted) return;
  fillIfChanged(place, namespaces, () => {
    const ended = renewed();
    if (!namespaces.length)
      return emptyState(
        "No chunks yet",
        h(
          "p",
          {},
          "No engine has recognized this prompt. Attach a vLLM that serves its model; it then computes the " +
            "prompt once.",
        ),
      );
    return namespaces.map((each) =>
      h(
        "div",
        { class: "tier" },
        h(
          "div",
          { class: "spread" },
          h("h2", {}, each.model || each.namespace_id),
          h("span", { class: "muted small" }, each.live ? "engine attached" : "no engine attached"),
        ),
        chunkMap(each.chunks, ended),
      ),
    );
  });
}

function showFacts(place, prompt) {
  const { usage } = prompt;
  const sum = summarize(prompt);
  const minute = Math.floor(Date.now() / 60_000);
  const { bindings: _, recipe: __, ...shown } = prompt;
  fillIfChanged(place, [shown, sum, minute], () => {
    const total = usage.device_tokens + usage.host_tokens + usage.disk_tokens;
    return [
      facts([
        ["Model", prompt.model || "any"],
        prompt.lora_name && ["Adapter", prompt.lora_name],
        ["Owner", prompt.owner || "–"],
        ["Labels", Object.keys(prompt.labels).length ? labels(prompt.labels) : "–"],
        [
          "Kind",
          {
            named: "pinned by a person",
            auto: "found by kvtier",
            request: "pinned by a request",
            replacement: "a version that waits",
          }[prompt.origin] ?? prompt.origin,
        ],
        ["Created", dateTime(prompt.created_unix_s)],
        [
          prompt.pinned ? "Ends" : "Ended",
          prompt.expires_unix_s
            ? h("span", {}, time(prompt.expires_unix_s, "never", until), prompt.sliding && ", again after each use")
            : prompt.pinned ? "never" : "–",
        ],
        ["Last used", time(usage.last_used_unix_s)],
        ["Engines", `${prompt.num_confirmed} of ${prompt.num_engines} have recognized it`],
        ["Public", prompt.public ? "any cache_salt may use it" : "no"],
        sum.num_shared_chunks > 0 && ["Shared chunks", `${count(sum.num_shared_chunks)}, with other pinned prompts`],
        ["Digest", h("code", {}, prompt.tokens_digest)],
      ]),
      h(
        "div",
        { class: "stack" },
        h("h2", {}, "Where its tokens came from"),
        bar(
          [
            { value: usage.device_tokens, fill: "fill-device" },
            { value: usage.host_tokens, fill: "fill-host" },
            { value: usage.disk_tokens, fill: "fill-disk" },
          ],
          total,
          "",
          "bar-tall",
        ),
        h(
          "p",
          { class: "small muted number" },
          total
            ? `${compact(usage.device_tokens)} from vLLM's prefix cache, ${compact(usage.host_tokens)} from ` +
                `host memory, ${compact(usage.disk_tokens)} from disk`
            : "No request has begun with it yet.",
        ),
      ),
      usage.others.length > 0 &&
        h(
          "div",
          { class: "stack" },
          h("h2", {}, "Requests that did not hit"),
          facts(usage.others.map((each) => [words(each.outcome), count(each.num_requests)])),
        ),
    ];
  });
}

function showSource(place, prompt) {
  fillIfChanged(place, [prompt.recipe, prompt.source_digest], () => {
    const text = sourceText(prompt.recipe);
    if (!text)
      return emptyState(
        "No text is kept",
        h(
          "p",
          {},
          prompt.recipe === undefined || prompt.recipe === null
            ? "Your role does not show it, or it was pinned by token ids."
            : "It was pinned by token ids.",
        ),
      );
    return [
      h(
        "div",
        { class: "spread" },
        h("span", { class: "muted small" }, `${words(prompt.recipe.kind)}, ${count(text.length)} characters`),
      ),
      h("pre", { class: "source", tabindex: 0, role: "region", "aria-label": "Source" }, text),
    ];
  });
}
