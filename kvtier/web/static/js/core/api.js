// The API of the daemon, one function a route. Values are those that `kvtier ... --json` prints.

import { caller, credentials } from "./auth.js";
import { learnClock } from "./clock.js";
import { deadline } from "./poll.js";
import { Problem, asProblem, problemOf } from "./problem.js";

const BASE = new URL("api/v1/", document.baseURI);
/** For reads: without it a connection that no longer carries anything looks like one that waits. */
const READ_TIMEOUT_S = 30;

/** Fires "signed-out" when a token is refused, and "reached" or "unreachable" after each call. */
export const connection = new EventTarget();

/**
 * @param {string} path Below /api/v1/.
 * @param {{method?: string, query?: object, body?: any, text?: string, type?: string, signal?: AbortSignal}} [options]
 * @returns {Promise<Response>} One of success.
 */
export async function request(path, options = {}) {
  const { method = "GET", query = {}, body, text, type = "application/json", signal } = options;
  const url = new URL(path, BASE);
  for (const [name, value] of Object.entries(query))
    for (const each of Array.isArray(value) ? value : [value])
      if (each !== undefined && each !== null && each !== "" && each !== false) url.searchParams.append(name, each);
  const sent = text ?? (body === undefined ? undefined : JSON.stringify(body));
  const headers = {
    Accept: "application/json",
    ...credentials(),
    ...(sent === undefined ? {} : { "Content-Type": type }),
  };
  let response;
  try {
    response = await fetch(url, { method, headers, body: sent, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    throw unanswered(error, signal);
  }
  learnClock(response.headers.get("Date"));
  if (response.ok) {
    connection.dispatchEvent(new Event("reached"));
    return response;
  }
  const problem = await problemOf(response);
  if (problem.status === 401) connection.dispatchEvent(new Event("signed-out"));
  else connection.dispatchEvent(new Event("reached"));
  throw problem;
}

/** Return what to throw when no answer came; nothing is wrong with the daemon where the caller has left. */
function unanswered(error, signal) {
  const reason = signal?.aborted ? signal.reason : error;
  if (signal?.aborted && !(reason instanceof Problem)) return error;
  connection.dispatchEvent(new Event("unreachable"));
  return asProblem(reason);
}

/** As `request`; returns the JSON value. Reads end after READ_TIMEOUT_S. */
export async function call(path, options = {}) {
  if ((options.method ?? "GET") !== "GET") return valueOf(path, options);
  const bounded = deadline(READ_TIMEOUT_S, options.signal);
  try {
    return await valueOf(path, { ...options, signal: bounded.signal });
  } finally {
    bounded.end();
  }
}

async function valueOf(path, options) {
  const response = await request(path, options);
  if (response.status === 204) return null;
  try {
    return await response.json();
  } catch (error) {
    if (options.signal?.aborted) throw unanswered(error, options.signal);
    throw new Problem(response.status, "", `The answer to ${path} is no JSON. Is a proxy between?`);
  }
}

const prompt = (name, part = "") => `prompts/${encodeURIComponent(name)}${part ? `/${part}` : ""}`;
const get = (path) => (query, signal) => call(path, { query, signal });
const post = (path, body = {}) => call(path, { method: "POST", body });

export const api = {
  whoami: (signal) => call("whoami", { signal }),
  status: get("status"),
  tiers: get("tiers"),
  engines: get("engines"),
  namespaces: get("namespaces"),
  savings: get("savings"),
  readiness: get("readiness"),
  remote: get("remote"),
  advice: get("advice"),
  history: get("history"),
  requests: get("requests"),
  prompts: get("prompts"),
  prompt: (name, signal) => call(prompt(name), { signal }),
  versions: (name, signal) => call(prompt(name, "versions"), { signal }),
  chunks: (name, namespaceId, signal) => call(prompt(name, "chunks"), { query: { namespace_id: namespaceId }, signal }),
  pin: (name, body, signal) => call(prompt(name), { method: "PUT", body, signal }),
  change: (name, body) => call(prompt(name), { method: "PATCH", body }),
  unpin: (name) => post(prompt(name, "unpin")),
  evict: (name, body) => post(prompt(name, "evict"), body),
  rename: (name, newName) => post(prompt(name, "rename"), { new_name: newName }),
  rollback: (name, version) => post(prompt(name, "rollback"), version ? { version } : {}),
  /** Give the automatic pin the name. */
  adopt: (name, automatic) => post(prompt(name, "adopt"), { automatic }),
  verify: (name) => post(prompt(name, "verify"), { live: false }),
  explain: (request) => post("explain", { request }),
  explainRecent: (id) => call(`requests/${encodeURIComponent(id)}`),
  /** @param {object} how `dry_run`, `prune`, `take_over`, `warm`, `timeout_s`. */
  apply: (text, how, signal) => call("apply", { method: "POST", query: how, text, type: "application/yaml", signal }),
};

/** Ask who the caller is, and keep it. @returns {Promise<typeof caller>} */
export async function learnCaller(signal) {
  const { name = "", role = "", owner = "", version = "" } = await api.whoami(signal);
  return Object.assign(caller, { name, role, owner: owner ?? "", version: version ?? "" });
}
