// Differences of two texts, by lines, and by words within lines that changed.

import { h } from "../core/dom.js";

const MAX_EDITS = 1500;
const CONTEXT = 3;

/** @typedef {{kind: "same" | "removed" | "added", value: string}} Piece */

/**
 * The shortest edit from one list to another (Myers, 1986). Beyond MAX_EDITS everything between is replaced.
 * @param {string[]} before
 * @param {string[]} after
 * @returns {Piece[]}
 */
export function difference(before, after) {
  let head = 0;
  while (head < before.length && head < after.length && before[head] === after[head]) head += 1;
  let tail = 0;
  while (tail < before.length - head && tail < after.length - head && before.at(-1 - tail) === after.at(-1 - tail))
    tail += 1;
  const middle = shortest(before.slice(head, before.length - tail), after.slice(head, after.length - tail));
  const same = (value) => ({ kind: "same", value });
  return [...before.slice(0, head).map(same), ...middle, ...before.slice(before.length - tail).map(same)];
}

function shortest(a, b) {
  const limit = Math.min(a.length + b.length, MAX_EDITS);
  const offset = limit + 1;
  const reach = new Int32Array(2 * limit + 3);
  const trail = [];
  for (let edits = 0; edits <= limit; edits += 1) {
    trail.push(reach.slice(offset - edits - 1, offset + edits + 2));
    for (let k = -edits; k <= edits; k += 2) {
      const isDown = k === -edits || (k !== edits && reach[offset + k - 1] < reach[offset + k + 1]);
      let x = isDown ? reach[offset + k + 1] : reach[offset + k - 1] + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      reach[offset + k] = x;
      if (x >= a.length && x - k >= b.length) return walkBack(a, b, trail, edits);
    }
  }
  return [...a.map((value) => ({ kind: "removed", value })), ...b.map((value) => ({ kind: "added", value }))];
}

function walkBack(a, b, trail, edits) {
  const pieces = [];
  let [x, y] = [a.length, b.length];
  for (let left = edits; left >= 0; left -= 1) {
    const reach = trail[left];
    const at = (k) => reach[k + left + 1];
    const k = x - y;
    const isDown = k === -left || (k !== left && at(k - 1) < at(k + 1));
    const fromK = isDown ? k + 1 : k - 1;
    const fromX = left ? at(fromK) : 0;
    const fromY = left ? fromX - fromK : 0;
    while (x > fromX && y > fromY) {
      x -= 1;
      y -= 1;
      pieces.push({ kind: "same", value: a[x] });
    }
    if (!left) break;
    if (isDown) pieces.push({ kind: "added", value: b[(y -= 1)] });
    else pieces.push({ kind: "removed", value: a[(x -= 1)] });
  }
  return pieces.reverse();
}

/** Show the differences of two texts; null if there are none. */
export function diffView(before, after, label) {
  const pieces = difference(before.split("\n"), after.split("\n"));
  if (pieces.every(({ kind }) => kind === "same")) return null;
  const shown = [];
  let [left, right, hidden] = [0, 0, 0];
  const isNear = nearChanges(pieces);
  for (let at = 0; at < pieces.length;) {
    const { kind, value } = pieces[at];
    if (kind === "same") {
      left += 1;
      right += 1;
      at += 1;
      if (!isNear(at - 1)) {
        hidden += 1;
        continue;
      }
      if (hidden) shown.push(gap(hidden));
      hidden = 0;
      shown.push(line("", right, " ", value));
      continue;
    }
    if (hidden) shown.push(gap(hidden));
    hidden = 0;
    const removed = take(pieces, at, "removed");
    const added = take(pieces, at + removed.length, "added");
    at += removed.length + added.length;
    removed.forEach((text, index) =>
      shown.push(line("removed", (left += 1), "−", marked(text, added[index], "removed"))),
    );
    added.forEach((text, index) => shown.push(line("added", (right += 1), "+", marked(removed[index], text, "added"))));
  }
  if (hidden) shown.push(gap(hidden));
  return h("div", { class: "diff", tabindex: 0, role: "region", "aria-label": label }, shown);
}

function take(pieces, from, kind) {
  const values = [];
  for (let at = from; pieces[at]?.kind === kind; at += 1) values.push(pieces[at].value);
  return values;
}

function nearChanges(pieces) {
  const near = new Uint8Array(pieces.length);
  pieces.forEach(({ kind }, at) => {
    if (kind !== "same") near.fill(1, Math.max(0, at - CONTEXT), at + CONTEXT + 1);
  });
  return (at) => near[at] === 1;
}

function line(kind, number, sign, content) {
  const said = { added: "added: ", removed: "removed: " }[kind];
  return h(
    "div",
    { class: `diff-line ${kind ? `diff-${kind}` : ""}` },
    h("span", { "aria-hidden": "true" }, number),
    h("span", { "aria-hidden": "true" }, sign),
    h("span", {}, said && h("span", { class: "visually-hidden" }, said), content),
  );
}

function gap(num) {
  return h("div", { class: "diff-gap" }, num === 1 ? "1 line is the same" : `${num} lines are the same`);
}

/** Of a line that became another: the words that changed are marked. */
function marked(before, after, kind) {
  if (before === undefined || after === undefined) return kind === "added" ? after : before;
  const split = (text) => text.match(/\w+|\s+|[^\w\s]/gu) ?? [];
  const parts = [];
  for (const piece of difference(split(before), split(after))) {
    if (piece.kind !== "same" && piece.kind !== kind) continue;
    const last = parts.at(-1);
    if (last?.kind === piece.kind) last.value += piece.value;
    else parts.push({ ...piece });
  }
  return parts.map(({ kind: each, value }) =>
    each === "same" ? value : h(kind === "added" ? "ins" : "del", {}, value),
  );
}
