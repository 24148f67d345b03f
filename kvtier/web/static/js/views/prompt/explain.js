// Why a request hits a prompt or not: paste it as a client sends it.

import { api } from "../../core/api.js";
import { fill, h } from "../../core/dom.js";
import { count, percent, plural, words } from "../../core/format.js";
import { Problem } from "../../core/problem.js";
import { bar } from "../../ui/charts.js";
import { badge, facts, textArea } from "../../ui/fields.js";
import { showProblem } from "../../ui/notices.js";
import { outcomeKind } from "../../core/outcomes.js";

const EXAMPLE = '{"model": "…", "messages": [{"role": "system", "content": "…"}, {"role": "user", "content": "…"}]}';

export function explainPanel(name) {
  const result = h("div", { class: "stack", "aria-live": "polite" });
  const button = h("button", { type: "submit", class: "button button-primary" }, "Explain");
  const form = h(
    "form",
    { class: "form", novalidate: true },
    textArea("Request", "request", {
      rows: 10,
      placeholder: EXAMPLE,
      hint: "JSON as a client sends it to vLLM. Nothing is computed or stored.",
    }),
    h("div", { class: "row" }, button),
  );
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      const request = parsed(new FormData(form).get("request"));
      fill(result, explained(await api.explain(request), name));
    } catch (error) {
      showProblem(result, error);
    } finally {
      button.disabled = false;
    }
  });
  return h("section", { class: "card" }, h("div", { class: "card-body" }, form, result));
}

function parsed(text) {
  if (!text.trim()) throw new Problem(400, "", "request is empty: paste the JSON that your client sends");
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Problem(400, "", `request is no JSON: ${error.message}`);
  }
}

/** @param {any} answer `Explained` of the library. @param {string} [name] The prompt that is asked about. */
export function explained(answer, name = "") {
  const { explanation, num_tokens: num, difference } = answer;
  const near = explanation.prompts.find((each) => each.name === name) ?? explanation.prompts[0];
  return [
    h(
      "div",
      { class: "row" },
      badge(words(explanation.outcome), outcomeKind(explanation.outcome)),
      h("span", {}, explanation.reason),
    ),
    near &&
      h(
        "div",
        { class: "stack" },
        bar([{ value: near.shared_tokens, fill: "fill-host" }], Math.max(num, near.num_tokens), "", "bar-tall"),
        facts([
          num > 0 && ["Request", plural(num, "token")],
          ["Nearest prompt", near.name],
          [
            "Shared",
            `${count(near.shared_tokens)} of ${plural(near.num_tokens, "token")}, ` +
              `${percent(near.shared_tokens, near.num_tokens)}`,
          ],
          near.differs_at > 0 && ["First differing token", count(near.differs_at)],
          near.differs_in.length > 0 && ["Also differs in", near.differs_in.join(", ")],
          ...near.bindings
            .filter((each) => each.bound)
            .map((each) => [
              each.model || each.namespace_id,
              `${plural(each.num_host_chunks, "chunk")} in host memory, ${count(each.num_disk_chunks)} on ` +
                `disk, ${count(each.num_missing_chunks)} missing`,
            ]),
        ]),
      ),
    difference &&
      differenceView(
        difference,
        explanation.prompts.find((each) => each.name === difference.name),
      ),
  ];
}

function differenceView({ name, before, in_request: inRequest, in_prompt: inPrompt, looks_like: kind }, near) {
  const [request, prompt] = firstDiffering(inRequest, inPrompt);
  const row = (title, [same, changed, rest]) =>
    h(
      "div",
      { class: "difference-row" },
      h("span", {}, title),
      h(
        "div",
        { class: "difference-text" },
        h("span", { class: "muted" }, before),
        same,
        h("mark", {}, changed || " "),
        rest,
      ),
    );
  const isText = kind === "TEXT";
  return h(
    "div",
    { class: "difference" },
    h("h2", {}, `Where it differs from ${name}${near?.differs_at ? `: token ${count(near.differs_at)}` : ""}`),
    row("In the request", request),
    row("In the prompt", prompt),
    !isText &&
      h(
        "p",
        { class: "hint" },
        h("strong", {}, `This looks like ${kind === "ID" ? "an id" : `a ${words(kind)}`}. `),
        "If it changes from request to request, nothing behind it can be restored. Put it behind the pinned " +
          "prompt, into the user turn.",
      ),
  );
}

/** Cut two texts into what is the same, the first word that differs, and the rest. */
function firstDiffering(one, other) {
  let at = 0;
  while (at < one.length && at < other.length && one[at] === other[at]) at += 1;
  if (at && [one, other].some((text) => text.codePointAt(at - 1) > 0xffff)) at -= 1; // not within a character
  return [one, other].map((text) => {
    const word = /^(\w+|\s+|[^\w\s])?/u.exec(text.slice(at))[0];
    return [text.slice(0, at), word, text.slice(at + word.length)];
  });
}
