// How a prompt is shown, in lists and alone.

import { h } from "../core/dom.js";
import { ago, dateTime, percent, words } from "../core/format.js";
import { bar } from "./charts.js";
import { badge } from "./fields.js";

const KINDS = {
  DURABLE: "good",
  CAPTURING: "accent",
  REFRESHING: "accent",
  WAITING: "",
  UNRENDERED: "",
  STALE: "warn",
  OVER_QUOTA: "bad",
  REFUSED: "bad",
};
const MEANINGS = {
  DURABLE: "Every chunk is on disk",
  CAPTURING: "Some chunks are not on disk yet",
  WAITING: "No engine has recognized it yet",
  UNRENDERED: "It has no tokens yet: a vLLM has to render it",
  OVER_QUOTA: "The disk quota keeps it from becoming durable",
  STALE: "Durable for engines of before, not for those attached now",
  REFRESHING: "Being computed for the engines attached now",
  REFUSED: "An engine cannot use it",
};
export const STATES = Object.keys(MEANINGS);

export function stateBadge(state) {
  const name = String(state).toUpperCase();
  const element = badge(words(name), KINDS[name] ?? "");
  if (MEANINGS[name]) element.title = MEANINGS[name];
  return element;
}

/** @param {(unixS: number) => string} [said] `until` for what is ahead. */
export function time(unixS, empty = "never", said = ago) {
  return unixS
    ? h("time", { title: dateTime(unixS), datetime: new Date(unixS * 1000).toISOString() }, said(unixS))
    : h("span", { class: "muted" }, empty);
}

export function labels(map) {
  return h(
    "span",
    { class: "labels" },
    Object.entries(map).map(([key, value]) => h("span", { class: "label" }, value ? `${key}=${value}` : key)),
  );
}

/** How much of it is in host memory and on disk. */
export function residency(sum) {
  if (!sum.num_chunks) return h("span", { class: "muted" }, "–");
  const said =
    `${percent(sum.num_host_chunks, sum.num_chunks)} in host memory, ` +
    `${percent(sum.num_durable_chunks, sum.num_chunks)} on disk`;
  const mini = (part, kind) => bar([{ value: part, fill: kind }], sum.num_chunks, "", "bar-mini");
  return h(
    "span",
    { class: "residency", title: said },
    mini(sum.num_host_chunks, "fill-host"),
    mini(sum.num_durable_chunks, "fill-device"),
    h("span", { class: "visually-hidden" }, said),
  );
}

function textOf(content) {
  return typeof content === "string" ? content : JSON.stringify(content, null, 2);
}

/** Return a recipe as text that can be read and compared; empty without one. */
export function sourceText(recipe) {
  if (!recipe || typeof recipe !== "object") return typeof recipe === "string" ? recipe : "";
  const { content, tools, chat_template_kwargs: kwargs } = recipe;
  const parts = [];
  if (typeof content === "string") parts.push(content);
  else if (Array.isArray(content))
    parts.push(
      content
        .map(
          (each) =>
            `[${each.role}]\n${textOf(each.content)}`,
        )
        .join("\n\n"),
    );
  if (tools) parts.push(`[tools]\n${JSON.stringify(tools, null, 2)}`);
  if (kwargs) parts.push(`[chat_template_kwargs]\n${JSON.stringify(kwargs, null, 2)}`);
  return parts.join("\n\n");
}
