// Numbers, times and words as people read them.

import { daemonNowS } from "./clock.js";

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function count(value) {
  return GROUPED.format(value ?? 0);
}

/** 1.2M; exact below 10,000. */
export function compact(value) {
  return Math.abs(value ?? 0) < 10_000 ? count(value) : COMPACT.format(value);
}

export function bytes(value) {
  let size = Number(value ?? 0);
  let unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return (
    `${size >= 100 || unit === 0 ? size.toFixed(0) : size >= 10 ? size.toFixed(1) : size.toFixed(2)} ` +
    `${UNITS[unit]}`
  );
}

export function percent(part, whole = 1) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  if (share > 0 && share < 0.1) return "< 0.1 %";
  // 100 % is all of it, and no less.
  if (part < whole && share >= 99.5) return "99 %";
  return `${share < 10 && share % 1 !== 0 ? share.toFixed(1) : share.toFixed(0)} %`;
}

/** Seconds as 0.4 s, 12 s, 3 min 5 s, 2 h 10 min, 4 d 3 h. */
export function duration(seconds) {
  const value = Number(seconds ?? 0);
  if (value < 10) return `${value === 0 ? 0 : value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  for (const [size, name, part, partName] of [
    [86_400, "d", 3600, "h"],
    [3600, "h", 60, "min"],
    [60, "min", 1, "s"],
  ]) {
    if (whole < size) continue;
    const rest = Math.floor((whole % size) / part);
    return `${Math.floor(whole / size)} ${name}${rest ? ` ${rest} ${partName}` : ""}`;
  }
  return `${whole} s`;
}

/** Seconds as commands take them: 7d, 12h, 90s. */
export function ttlText(seconds) {
  for (const [size, name] of [
    [86_400, "d"],
    [3600, "h"],
    [60, "m"],
  ])
    if (seconds && seconds % size === 0) return `${seconds / size}${name}`;
  return seconds ? `${seconds}s` : "";
}

/** The other way; NaN if it is none, 0 of an empty text: never. */
export function ttlSeconds(text) {
  const trimmed = text.trim();
  if (!trimmed || trimmed === "0") return 0;
  const match = /^(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)?$/.exec(trimmed);
  const size = { s: 1, m: 60, min: 60, h: 3600, d: 86_400, w: 604_800 };
  return match ? Math.round(Number(match[1]) * size[match[2] ?? "s"]) : Number.NaN;
}

const pad = (value) => String(value).padStart(2, "0");

/** 2026-11-27 07:14:03, in the browser's time zone. */
export function dateTime(unixS) {
  const at = new Date(unixS * 1000);
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${clock(unixS)}`;
}

export function clock(unixS, { seconds = true } = {}) {
  const at = new Date(unixS * 1000);
  return `${pad(at.getHours())}:${pad(at.getMinutes())}${seconds ? `:${pad(at.getSeconds())}` : ""}`;
}

/** Of what has happened: "3 min ago", "never" for 0. A time ahead is a clock that is off, and is "now". */
export function ago(unixS, nowS = daemonNowS()) {
  if (!unixS) return "never";
  const passed = nowS - unixS;
  return passed < 2 ? "now" : `${roughly(passed)} ago`;
}

/** Of what will happen: "in 2 h", and as `ago` when it has. */
export function until(unixS, nowS = daemonNowS()) {
  const left = unixS - nowS;
  return unixS && left >= 2 ? `in ${roughly(left)}` : ago(unixS, nowS);
}

function roughly(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} d`;
}

/** `NOT_STORED`, `over_quota`: "not stored", "over quota". */
export function words(name) {
  return String(name ?? "")
    .toLowerCase()
    .replaceAll("_", " ");
}

/** "1 chunk", "3 chunks". */
export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}
