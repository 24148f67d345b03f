// The form that pins a prompt.

import { api } from "../core/api.js";
import { h } from "../core/dom.js";
import { ttlSeconds } from "../core/format.js";
import { Problem } from "../core/problem.js";
import { address, go, leftSince } from "../core/router.js";
import { openDialog } from "../ui/dialogs.js";
import { checkField, choiceField, textArea, textField } from "../ui/fields.js";
import { say } from "../ui/notices.js";
import { computePin } from "./computing.js";

const KINDS = [
  ["system", "System prompt"],
  ["messages", "Chat messages (JSON)"],
  ["text", "Text, without a chat template"],
  ["tokens", "Token ids"],
];
const EXAMPLE = '[{"role": "system", "content": "You are ..."}]';
const HINTS = {
  system: "Exactly as requests send it.",
  messages: "A JSON list as in the OpenAI API. The prompt is what every conversation with them begins with.",
  text: "For the completions API.",
  tokens: "Numbers, with commas or blanks between. They need no vLLM.",
};

/** @param {{name?: string, kind?: string, content?: string}} [known] To begin with. */
export async function openPinForm(known = {}) {
  const source = textArea("Source", "content", {
    hint: HINTS.system,
    value: known.content ?? "",
    rows: 10,
    required: true,
  });
  const kind = choiceField("Kind", "kind", KINDS, { value: known.kind ?? "system" });
  kind.querySelector("select").addEventListener("change", (event) => {
    source.querySelector(".field-hint").textContent = HINTS[event.target.value];
  });
  const hasLeft = leftSince();
  const done = await openDialog({
    title: "Pin a prompt",
    confirm: "Pin",
    wide: true,
    text: "vLLM computes it once; from then on it is restored. It is durable a while after it is pinned.",
    fields: [
      h(
        "div",
        { class: "form-2" },
        textField("Name", "name", {
          required: true,
          placeholder: "support",
          value: known.name ?? "",
          pattern: "[A-Za-z0-9][A-Za-z0-9._/@-]{0,127}",
        }),
        kind,
      ),
      source,
      h(
        "div",
        { class: "form-2" },
        textField("Model", "model", { hint: "Empty: the first that vLLM serves." }),
        textField("Time to live", "ttl", { hint: "7d, 12h, 30m. Empty: forever." }),
        textField("Priority", "priority", {
          type: "number",
          min: -100,
          max: 100,
          value: "0",
          hint: "−100 to 100, higher stays longer.",
        }),
      ),
      h(
        "div",
        { class: "form-2" },
        textField("Owner", "owner", { hint: "A team or a service." }),
        textField("Labels", "labels", { placeholder: "team=support,tier=gold" }),
      ),
      h(
        "div",
        { class: "form-2" },
        checkField("Sliding", "sliding", { hint: "The time to live begins again with each use." }),
        checkField("Public", "public", { hint: "Requests with any cache_salt may use it." }),
        checkField("Compute now", "warm", { checked: true, hint: "Else with the next request that has it." }),
        checkField("Replace", "replace", { hint: "If the name is taken: a new version." }),
      ),
    ],
    submit: async (values) => {
      const [name, body] = read(values);
      const prompt = await api.pin(name, { ...body, warm: false });
      // The prompt's own page shows how far it is.
      const kind = values.get("kind");
      const source = { [kind]: body[kind], ...(body.model ? { model: body.model } : {}), replace: true };
      if (values.has("warm")) computePin(name, prompt, source);
      return { name, made: prompt.name };
    },
  });
  if (!done) return;
  const { name, made } = done;
  // A version that waits loses its name when it replaces the pin, whose page has a link to it until then.
  const waits = made !== name && made.startsWith(`${name}@`);
  say(waits ? `${made} takes the place of ${name} when it is durable.` : `${made} is pinned.`);
  const target = waits ? name : made;
  if (!hasLeft() && location.hash !== address("prompts", target)) go("prompts", target);
}

function read(values) {
  const name = values.get("name").trim();
  if (!/^[A-Za-z0-9][A-Za-z0-9._/@-]{0,127}$/.test(name))
    throw new Problem(
      400,
      "",
      `name = "${name}": a name has 1 to 128 letters, digits and . _ / @ -, and begins with a letter or digit`,
    );
  const ttl = ttlSeconds(values.get("ttl"));
  if (Number.isNaN(ttl))
    throw new Problem(400, "", `time to live = "${values.get("ttl")}": write it like 7d, 12h or 30m`);
  const body = {
    [values.get("kind")]: contentOf(values.get("kind"), values.get("content")),
    ttl_s: ttl,
    priority: Number(values.get("priority") || 0),
    sliding: values.has("sliding"),
    public: values.has("public"),
    replace: values.has("replace"),
  };
  for (const field of ["model", "owner"]) if (values.get(field).trim()) body[field] = values.get(field).trim();
  if (values.get("labels").trim()) body.labels = readLabels(values.get("labels"));
  return [name, body];
}

function contentOf(kind, content) {
  if (!content.trim()) throw new Problem(400, "", "source is empty: paste the prompt as requests send it");
  if (kind === "tokens") {
    const tokens = content
      .split(/[\s,[\]]+/)
      .filter(Boolean)
      .map(Number);
    if (!tokens.every((each) => Number.isInteger(each) && each >= 0))
      throw new Problem(400, "", "source: token ids are whole numbers, with commas or blanks between");
    return tokens;
  }
  if (kind !== "messages") return content;
  try {
    const messages = JSON.parse(content);
    if (Array.isArray(messages)) return messages;
  } catch {
    // Said below.
  }
  throw new Problem(400, "", `source is no JSON list of messages, like ${EXAMPLE}`);
}

/** @returns {Record<string, string>} */
export function readLabels(text) {
  const pairs = text
    .split(",")
    .map((each) => each.trim())
    .filter(Boolean)
    .map((each) => each.split("="));
  if (pairs.some((pair) => pair.length > 2))
    throw new Problem(400, "", `labels = "${text}": write them like team=support,tier=gold`);
  return Object.fromEntries(pairs.map(([key, value = ""]) => [key.trim(), value.trim()]));
}
