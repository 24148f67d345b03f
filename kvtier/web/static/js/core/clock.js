// The daemon's clock: its times are compared with it, because the browser's may be minutes off.

const IGNORED_S = 5;
let aheadS = 0;

/** @param {string | null} date The Date header of an answer that has just come. */
export function learnClock(date) {
  const unixMs = Date.parse(date ?? "");
  if (Number.isNaN(unixMs)) return;
  const differenceS = (unixMs - Date.now()) / 1000;
  // The header has whole seconds, and was a while on its way.
  aheadS = Math.abs(differenceS) < IGNORED_S ? 0 : differenceS;
}

export function daemonNowS() {
  return Date.now() / 1000 + aheadS;
}
