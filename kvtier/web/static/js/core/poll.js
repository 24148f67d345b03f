// Asking again and again, politely: never twice at once, not in a hidden tab, less often after failures.

import { Problem } from "./problem.js";

/**
 * Call `ask` now and then again, until `signal` aborts. A hidden tab asks nothing, and at once when it is seen again.
 * @param {(signal: AbortSignal) => Promise<void>} ask
 * @param {number} everyS Seconds between an answer and the next request. Slow answers make it longer: at least ten
 *   times what one took.
 * @param {AbortSignal} signal
 * @param {(error: any) => void} failed
 * @returns {{now: () => void}} `now` asks without waiting for the time.
 */
export function poll(ask, everyS, signal, failed) {
  let timer = 0;
  let running = false;
  let again = false;
  let failures = 0;

  async function once() {
    clearTimeout(timer);
    if (signal.aborted || document.hidden) return;
    if (running) {
      again = true;
      return;
    }
    running = true;
    const began = performance.now();
    try {
      await ask(signal);
      failures = 0;
    } catch (error) {
      if (signal.aborted) return;
      failures += 1;
      failed(error);
    } finally {
      running = false;
    }
    if (signal.aborted) return;
    if (again) {
      again = false;
      once();
      return;
    }
    const tookMs = performance.now() - began;
    const pauseMs = Math.max(everyS * 1000, 10 * tookMs) * Math.min(2 ** Math.max(0, failures - 1), 4);
    timer = setTimeout(once, pauseMs);
  }

  const seen = () => {
    if (!document.hidden) once();
  };
  document.addEventListener("visibilitychange", seen, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  once();
  return { now: once };
}

// AbortSignal.any would do some of it, and is newer than the browsers of the console.
/**
 * A signal that aborts with `signal`, and with a problem when `seconds` have passed without `again`.
 * @param {number} seconds
 * @param {AbortSignal} [signal]
 * @returns {{signal: AbortSignal, again: () => void, end: () => void}} `end` has to be called.
 */
export function deadline(seconds, signal) {
  const controller = new AbortController();
  const late = () =>
    controller.abort(new Problem(0, "", `No answer came within ${seconds} s. It is asked again by itself.`));
  const leave = () => controller.abort(signal.reason);
  let timer = setTimeout(late, seconds * 1000);
  signal?.addEventListener("abort", leave);
  if (signal?.aborted) leave();
  return {
    signal: controller.signal,
    again: () => {
      clearTimeout(timer);
      timer = setTimeout(late, seconds * 1000);
    },
    end: () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", leave);
    },
  };
}
