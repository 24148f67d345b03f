// What the daemon does, as it happens: one stream of server-sent events for all views, read by `fetch`, because an
// EventSource cannot send a token.

import { request } from "./api.js";
import { daemonNowS } from "./clock.js";
import { deadline } from "./poll.js";

const KEPT = 500;
const HIDDEN_S = 60;
/** The daemon sends a comment every 15 s: after three times that without a byte the connection carries nothing. */
const SILENT_S = 45;
const DROPPED = "dropped";

/**
 * @typedef {{id: number, name: string, unix_s: number, level: string, fields: Record<string, string>,
 *   isGap?: boolean}} DaemonEvent `isGap`: none that the daemon sent, the stream was away.
 */

/** @type {DaemonEvent[]} The last first. */
export const recent = [];
const listeners = new Set();
let stream = null;
let connected = false;
let lastId = 0;
let hiddenTimer = 0;

/**
 * Call `listener` with each event, and with null when the connection begins or ends, until `signal` aborts.
 * @param {(event: DaemonEvent | null) => void} listener
 */
export function follow(listener, signal) {
  listeners.add(listener);
  signal.addEventListener("abort", () => {
    listeners.delete(listener);
    // The next view may follow at once.
    queueMicrotask(() => {
      if (!listeners.size) stop();
    });
  });
  start();
}

export function isConnected() {
  return connected;
}

/** Forget what one caller saw, before another signs in. */
export function forgetEvents() {
  stop();
  recent.length = 0;
}

function start() {
  if (stream || document.hidden || !listeners.size) return;
  stream = new AbortController();
  if (recent.length) markGap();
  run(stream.signal);
}

function stop() {
  stream?.abort();
  stream = null;
  if (listeners.size) markGap();
  connect(false);
}

/** Whether events may be missing before this one: the stream was away, or this page read too slowly. */
export function isGap(event) {
  return event.isGap === true || event.name === DROPPED;
}

function markGap() {
  if (recent[0]?.isGap) return;
  add({ name: "Events may be missing here", unix_s: daemonNowS(), level: "warning", fields: {}, isGap: true });
}

function connect(now) {
  if (connected === now) return;
  connected = now;
  for (const listener of [...listeners]) listener(null);
}

// A hidden tab keeps its connection for a minute, then gives it to others.
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (document.hidden) hiddenTimer = setTimeout(stop, HIDDEN_S * 1000);
  else start();
});

async function run(signal) {
  for (let failures = 0; !signal.aborted; failures += 1) {
    const silence = deadline(SILENT_S, signal);
    try {
      const response = await request("events", { signal: silence.signal });
      connect(true);
      failures = 0;
      await read(response.body, silence);
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) {
        connect(false);
        return;
      }
    } finally {
      silence.end();
    }
    if (signal.aborted) return;
    markGap();
    connect(false);
    await new Promise((resolve) => setTimeout(resolve, 1000 * Math.min(2 ** failures, 30)));
  }
}

async function read(body, silence) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  const parser = new EventStreamParser();
  for (;;) {
    const { value, done } = await reader.read();
    if (done || silence.signal.aborted) return;
    silence.again();
    for (const data of parser.push(value)) take(data);
  }
}

function take(data) {
  let event;
  try {
    event = JSON.parse(data);
  } catch {
    return;
  }
  add({ fields: {}, level: "info", ...event });
}

function add(values) {
  lastId += 1;
  const event = { ...values, id: lastId };
  recent.unshift(event);
  recent.length = Math.min(recent.length, KEPT);
  for (const listener of [...listeners]) listener(event);
}

/** Server-sent events from pieces of text. */
export class EventStreamParser {
  #rest = "";

  /** @returns {string[]} The data of each event that ended. */
  push(piece) {
    const parts = (this.#rest + piece).replaceAll("\r\n", "\n").split("\n\n");
    this.#rest = parts.pop();
    const data = parts.map((part) =>
      part
        .split("\n")
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).replace(/^ /, ""))
        .join("\n"),
    );
    return data.filter(Boolean);
  }
}
