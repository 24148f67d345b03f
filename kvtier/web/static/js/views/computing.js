// Has vLLM compute what was pinned. Such a call is answered when all is durable, so that none is waited for: it runs by
// itself, one at a time, because a browser has six connections to a host, and the page needs them.

import { api } from "../core/api.js";
import { plural } from "../core/format.js";
import { Problem } from "../core/problem.js";
import { complain } from "../ui/notices.js";

/** For one prompt. What takes longer is stored with the next request that has it. */
const TIMEOUT_S = 60;
const MAX_SAID = 5;

/** @type {((signal: AbortSignal) => Promise<void>)[]} */
const waiting = [];
let running = null;

/** Forget what waits, when the caller signs out. */
export function forgetComputing() {
  waiting.length = 0;
  running?.abort();
}

/**
 * Have a prompt computed that was pinned without.
 * @param {string} name As it was asked for; the answer has another while it waits to replace that.
 * @param {any} answered What the pin was answered.
 * @param {object} source As in the pin; what else it says stays as it is by then.
 */
export function computePin(name, answered, source) {
  enqueue(async (signal) => {
    if (await isPinned([answered.name, name], answered.pin_id, signal))
      await api.pin(name, { ...source, timeout_s: TIMEOUT_S }, signal);
  });
}

/** Have what a file says computed, once it is applied. */
export function computeApplied(text, how) {
  enqueue(async (signal) => {
    // What was changed again meanwhile is not changed back.
    const { changes } = await api.apply(text, { ...how, dry_run: true }, signal);
    if (!changes.length) sayWhatIsNot(await api.apply(text, { ...how, timeout_s: TIMEOUT_S }, signal));
  });
}

async function enqueue(call) {
  waiting.push(call);
  if (running) return;
  running = new AbortController();
  while (waiting.length) {
    const { signal } = running;
    try {
      await waiting.shift()(signal);
    } catch (error) {
      if (!signal.aborted) complain(error);
    }
    if (signal.aborted) running = new AbortController();
  }
  running = null;
}

/** Whether it is still what was pinned: it may have been unpinned, or replaced, while its call waited. */
async function isPinned(names, pinId, signal) {
  for (const name of new Set(names)) {
    try {
      const { pin_id, pinned } = await api.prompt(name, signal);
      if (pin_id === pinId) return pinned;
    } catch (error) {
      if (error.status !== 404) throw error;
    }
  }
  return false;
}

/** Say what vLLM has not computed, and why, where that is known. */
function sayWhatIsNot({ refused = [], incomplete = [] }) {
  const said = refused.slice(0, MAX_SAID).map((each) => `${each.name}: ${each.why}`);
  if (refused.length > MAX_SAID) said.push(`${plural(refused.length, "prompt")} refused`);
  const names = incomplete.slice(0, MAX_SAID).join(", ");
  if (names) said.push(`${plural(incomplete.length, "prompt")} not durable yet: ${names}`);
  if (said.length) complain(new Problem(-1, "Applied, and not all is computed", said.join("; ")));
}
