// The frame: navigation, who is signed in, theme, and where views go.

import { caller } from "../core/auth.js";
import { fill, h } from "../core/dom.js";
import { address } from "../core/router.js";
import { setTheme, theme } from "../core/theme.js";
import { segments } from "./fields.js";
import { icon } from "./icons.js";

const VIEWS = [
  ["overview", "Overview"],
  ["prompts", "Prompts"],
  ["advise", "Advice"],
  ["requests", "Requests"],
  ["disk", "Disk"],
  ["events", "Events"],
  ["apply", "Apply"],
];

export class Shell {
  #links = new Map();
  #side;
  #menu;
  #offline;
  #version;

  /** @param {{current: string, signOut: (() => void) | null}} options Without `signOut` no token was needed. */
  constructor({ current, signOut }) {
    this.#menu = h(
      "button",
      {
        type: "button",
        class: "button button-plain button-icon menu-button",
        "aria-expanded": "false",
        "aria-controls": "menu",
        "aria-label": "Menu",
        on: { click: () => this.#open(this.#side.dataset.open !== "true") },
      },
      icon("menu"),
    );
    const list = VIEWS.map(([view, title]) => {
      const link = h("a", { href: address(view) }, icon(view), title);
      this.#links.set(view, link);
      return h("li", {}, link);
    });
    this.#version = h("span", { class: "muted number" });
    const menu = h(
      "div",
      { class: "side-menu", id: "menu" },
      h("nav", { "aria-label": "Views" }, h("ul", { class: "nav-list" }, list)),
      h("div", { class: "side-foot" }, who(signOut), h("div", { class: "foot-row" }, themeSwitch(), this.#version)),
    );
    const brand = h(
      "div",
      { class: "brand" },
      h("a", { href: address("overview") }, h("img", { src: "static/icon.svg", alt: "" }), "kvtier"),
    );
    this.#side = h("header", { class: "side" }, h("div", { class: "side-top" }, brand, this.#menu), menu);
    this.#side.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || this.#side.dataset.open !== "true") return;
      this.#open(false);
      this.#menu.focus();
    });
    this.main = h("div");
    this.#offline = h("div", { class: "offline", role: "status", hidden: true });
    this.elements = [this.#side, h("main", { class: "content", id: "main" }, this.#offline, this.main)];
    this.setCurrent(current);
  }

  setCurrent(view) {
    for (const [name, link] of this.#links) {
      if (name === view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    this.#open(false);
  }

  setReachable(isReachable) {
    if (this.#offline.hidden === isReachable) return;
    this.#offline.hidden = isReachable;
    fill(
      this.#offline,
      isReachable ? null : "The daemon does not answer. What is shown is from before; it is asked again by itself.",
    );
  }

  setVersion(version) {
    fill(this.#version, version ?? "");
  }

  #open(isOpen) {
    this.#side.dataset.open = String(isOpen);
    this.#menu.setAttribute("aria-expanded", String(isOpen));
  }
}

function who(signOut) {
  const rights = [caller.role, caller.owner && `owner ${caller.owner}`].filter(Boolean).join(", ");
  return h(
    "div",
    { class: "foot-row" },
    h(
      "div",
      { class: "who" },
      h("span", { class: "who-name", title: caller.name }, caller.name || "local"),
      h("span", { class: "muted" }, rights || "admin"),
    ),
    signOut && h("button", { type: "button", class: "button", on: { click: signOut } }, "Sign out"),
  );
}

function themeSwitch() {
  return segments(
    "Theme",
    [
      ["system", icon("system"), "As the system"],
      ["light", icon("light"), "Light"],
      ["dark", icon("dark"), "Dark"],
    ],
    theme(),
    setTheme,
  );
}
