// Starts the console: who is here, which view, and the frame around it.

import { api, connection, learnCaller } from "./core/api.js";
import { caller, forgetToken, token } from "./core/auth.js";
import { fill, h } from "./core/dom.js";
import { forgetEvents } from "./core/live.js";
import { asProblem } from "./core/problem.js";
import { here } from "./core/router.js";
import { Shell } from "./ui/shell.js";
import { problemBox } from "./ui/notices.js";
import * as advise from "./views/advise.js";
import * as apply from "./views/apply.js";
import { forgetComputing } from "./views/computing.js";
import * as disk from "./views/disk.js";
import * as events from "./views/events.js";
import * as overview from "./views/overview.js";
import * as prompt from "./views/prompt/view.js";
import * as prompts from "./views/prompts.js";
import * as requests from "./views/requests.js";
import { signIn } from "./views/sign_in.js";

/** @typedef {{argument: string, query: URLSearchParams, signal: AbortSignal}} ViewContext */

const VIEWS = { overview, prompts, advise, requests, disk, events, apply };
const RETRY_MS = 3000;

const frame = document.getElementById("shell");
let shell = null;
let leaving = new AbortController();

document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.querySelector("h1")?.focus();
});
addEventListener("hashchange", () => showView(true));
connection.addEventListener("signed-out", () => showGate());
connection.addEventListener("reached", () => shell?.setReachable(true));
connection.addEventListener("unreachable", () => shell?.setReachable(false));
start();

async function start() {
  try {
    await learnCaller();
  } catch (error) {
    if (asProblem(error).status !== 401) showFailure(error);
    return;
  }
  showShell();
}

function showShell() {
  shell = new Shell({ current: here().view, signOut: token() ? signOut : null });
  fill(frame, ...shell.elements);
  showView(false);
  api.status().then(
    (status) => shell?.setVersion(status.version),
    () => {},
  );
}

function showView(isMove) {
  if (!shell) return;
  leaving.abort();
  leaving = new AbortController();
  const place = here();
  const isPrompt = place.view === "prompts" && place.argument;
  const view = isPrompt ? prompt : (VIEWS[place.view] ?? overview);
  const name = VIEWS[place.view] ? place.view : "overview";
  shell.setCurrent(name);
  document.title = `${isPrompt ? place.argument : view.title} · kvtier`;
  const root = h("div", { class: "content-inner", "data-view": isPrompt ? "prompt" : name });
  fill(shell.main, root);
  view.show(root, { argument: place.argument, query: place.query, signal: leaving.signal });
  scrollTo(0, 0);
  if (isMove) root.querySelector("h1")?.focus({ preventScroll: true });
}

function showGate(reason = "") {
  if (!frame.querySelector(".gate form")) {
    leaving.abort();
    for (const dialog of document.querySelectorAll("dialog")) dialog.close();
    forgetEvents();
    forgetComputing();
    const wasRefused = Boolean(token());
    forgetToken();
    shell = null;
    document.title = "Sign in · kvtier";
    const said = reason || (wasRefused ? "This token is not valid, or it was revoked." : "");
    fill(frame, signIn({ reason: said, done: showShell }));
    frame.querySelector("input").focus();
  }
}

function signOut() {
  forgetToken();
  Object.assign(caller, { name: "", role: "", owner: "" });
  showGate("You have signed out of this tab.");
}

/** The daemon does not answer yet: asked again until it does. */
function showFailure(error) {
  const again = h("button", { class: "button", type: "button" }, "Try again");
  const card = h(
    "main",
    { class: "gate", id: "main" },
    h(
      "div",
      { class: "gate-card" },
      h("h1", { tabindex: -1 }, "kvtier"),
      problemBox(error),
      h("div", { class: "row" }, again),
    ),
  );
  fill(frame, card);
  const timer = setTimeout(start, RETRY_MS);
  again.addEventListener("click", () => {
    clearTimeout(timer);
    start();
  });
}
