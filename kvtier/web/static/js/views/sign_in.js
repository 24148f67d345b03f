// Sign-in: a token, kept in this tab only.

import { learnCaller } from "../core/api.js";
import { forgetToken, keepToken } from "../core/auth.js";
import { fill, h } from "../core/dom.js";
import { asProblem } from "../core/problem.js";
import { textField } from "../ui/fields.js";
import { problemBox } from "../ui/notices.js";

/** @param {{reason: string, done: () => void}} options `reason`: why it is shown. */
export function signIn({ reason, done }) {
  const problems = h("div", { "aria-live": "assertive" }, reason && h("p", { class: "hint" }, reason));
  const button = h("button", { type: "submit", class: "button button-primary" }, "Sign in");
  const field = textField("Token", "token", {
    type: "password",
    placeholder: "kvt_…",
    required: true,
    hint: "It stays in this tab until you close it.",
  });
  const form = h("form", { class: "form", novalidate: true }, field, problems, button);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const value = new FormData(form).get("token").trim();
    if (!value) {
      fill(problems, h("p", { class: "field-error" }, "Paste a token: it begins with kvt_."));
      return;
    }
    button.disabled = true;
    keepToken(value);
    try {
      await learnCaller();
      done();
    } catch (error) {
      forgetToken();
      const problem = asProblem(error);
      if (problem.status === 401)
        problem.message = "This token is not valid: it may be mistyped, expired " + "or revoked.";
      fill(problems, problemBox(problem));
    } finally {
      button.disabled = false;
    }
  });
  return h(
    "main",
    { class: "gate", id: "main" },
    h(
      "div",
      { class: "gate-card" },
      h("div", { class: "brand" }, h("img", { src: "static/icon.svg", alt: "" }), h("h1", { tabindex: -1 }, "kvtier")),
      form,
      h(
        "p",
        { class: "small muted" },
        "An operator of the host makes tokens: ",
        h("code", { class: "command" }, "kvtier token create NAME --role operator"),
      ),
    ),
  );
}
