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

/** All pages of the list of prompts, page by page: `onPage` gets what there is so far. */
export async function allPrompts(api, query, signal, onPage) {
  const prompts = [];
  for (let token = ""; ; ) {
    const page = await api.prompts({ ...query, page_token: token }, signal);
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
  return Promise.all(bindings.map(async ({ namespace_id, model, live: isLive }) => {
    const { chunks } = await api.chunks(prompt.name, namespace_id, signal);
    return { namespace_id, model, live: isLive, chunks: placesOf(chunks) };
  }));
}

/** A byte a chunk, as hex. */
function placesOf(hex) {
  const places = [];
  for (let at = 0; at < hex.length; at += 2) places.push(PLACES[Number.parseInt(hex.slice(at, at + 2), 16)] ?? "missing");
  return places;
}

/** What pins saved, over all and by prompt. */
export function savingsOf(answer) {
  const restored = answer.host_tokens + answer.disk_tokens;
  return {
    since_unix_s: answer.since_unix_s,
    restored_tokens: restored,
    cached_tokens: restored + answer.device_tokens,
    prompt_tokens: answer.prompt_tokens,
    saved_s: answer.saved_prefill_s,
    prompts: answer.prompts.map((each) => ({ name: each.name, saved_s: each.saved_prefill_s, restored_tokens: each.restored_tokens })),
  };
}

/** @returns {{unix_s: number, device: number, host: number, disk: number, computed: number}[]} Tokens by second or minute. */
export function historyPoints(answer) {
  return answer.points;
}
