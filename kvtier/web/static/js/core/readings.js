// What the API answers, as views use it.

/** Sums of a prompt over the namespaces of attached engines, or over the last one if none is attached. */
export function summarize(prompt) {
  const live = prompt.bindings.filter((each) => each.live);
  const bindings = live.length ? live : prompt.bindings.slice(-1);
  const sum = (name) => bindings.reduce((total, each) => total + each[name], 0);
  return {
    num_chunks: sum("num_chunks"),
    num_host_chunks: sum("num_host_chunks"),
    num_durable_chunks: sum("num_durable_chunks"),
    num_shared_chunks: sum("num_shared_chunks"),
    raw_bytes: sum("raw_bytes"),
    disk_bytes: sum("disk_bytes"),
    disk_share_bytes: sum("disk_share_bytes"),
    durable_raw_bytes: sum("durable_raw_bytes"),
    covered_tokens: Math.max(0, ...bindings.map((each) => each.covered_tokens)),
  };
}

/** Requests that had the prompt as their pin: hits, and all. */
export function requestsOf({ usage }) {
  const others = usage.others.reduce((sum, each) => sum + each.num_requests, 0);
  return { hits: usage.num_hits, all: usage.num_hits + others };
}

const PAGE = 500;

/** All pages of the list of prompts, page by page: `onPage` gets what there is so far. */
export async function allPrompts(api, query, signal, onPage) {
  const prompts = [];
  for (let token = ""; ;) {
    const page = await api.prompts({ ...query, page_size: PAGE, page_token: token }, signal);
    prompts.push(...page.prompts);
    token = page.next_page_token ?? "";
    onPage(prompts, !token);
    if (!token) return prompts;
  }
}

const PLACES = ["missing", "disk", "host", "both"];
const MAX_MAPS = 4;

/**
 * Where the chunks of a prompt are, in the namespaces of attached engines, or in the last one if none is attached.
 * @returns {Promise<{namespace_id: string, model: string, live: boolean, chunks: string[]}[]>}
 */
export async function chunkPlaces(api, prompt, signal) {
  const live = prompt.bindings.filter((each) => each.live);
  const bindings = (live.length ? live : prompt.bindings.slice(-1)).slice(0, MAX_MAPS);
  return Promise.all(
    bindings.map(async ({ namespace_id, model, live: isLive }) => {
      const { chunks } = await api.chunks(prompt.name, namespace_id, signal);
      return { namespace_id, model, live: isLive, chunks: placesOf(chunks) };
    }),
  );
}

/** A byte a chunk, as hex. */
function placesOf(hex) {
  const places = [];
  for (let at = 0; at < hex.length; at += 2)
    places.push(PLACES[Number.parseInt(hex.slice(at, at + 2), 16)] ?? "missing");
  return places;
}

/** What requests got since the daemon's start, and what prompts saved since they were pinned. */
export function savingsOf({ since_unix_s, prompt_tokens: tokens, saved_prefill_s, prompts }) {
  const restored = tokens.host + tokens.disk;
  return {
    since_unix_s,
    restored_tokens: restored,
    cached_tokens: restored + tokens.device,
    prompt_tokens: restored + tokens.device + tokens.computed,
    saved_s: saved_prefill_s,
    prompts: prompts.map(({ name, usage }) => ({
      name,
      saved_s: usage.saved_prefill_s,
      restored_tokens: usage.host_tokens + usage.disk_tokens,
    })),
  };
}

/** Names of the series of prompt tokens, a second: the nearest first. */
export const SOURCE_SERIES = ["device", "host", "disk", "computed"].map((source) => `prompt_tokens_${source}`);

/** @returns {{unix_s: number, values: number[]}[]} A value for each of SOURCE_SERIES. */
export function historyPoints({ unix_s: times, series }) {
  return times.map((unix_s, at) => ({ unix_s, values: SOURCE_SERIES.map((name) => series[name]?.[at] ?? 0) }));
}
