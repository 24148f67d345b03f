// What can be done with a prompt. What loses something asks first.

import { api } from "../../core/api.js";
import { h, hasNoFocus, place } from "../../core/dom.js";
import { bytes, plural, ttlSeconds, ttlText } from "../../core/format.js";
import { Problem } from "../../core/problem.js";
import { go, leftSince } from "../../core/router.js";
import { openDialog } from "../../ui/dialogs.js";
import { checkField, choiceField, textField } from "../../ui/fields.js";
import { say } from "../../ui/notices.js";
import { computePin } from "../computing.js";
import { readLabels } from "../pin_form.js";

const NAME = "[A-Za-z0-9][A-Za-z0-9._/@-]{0,127}";

/** Each with what it does, its class, and whether the daemon would do it. */
const ACTIONS = [
  ["Adopt", adopt, "button-primary", ({ origin, pinned }) => pinned && origin === "auto"],
  ["Change", change, "", ({ origin, pinned }) => pinned && ["named", "replacement"].includes(origin)],
  ["Pin again", pinAgain, "button-primary", ({ pinned, recipe }) => !pinned && isRenderable(recipe)],
  ["Rename", rename, "", ({ origin }) => origin === "named"],
  ["Verify", verify, "", () => true],
  ["Unpin", unpin, "", ({ pinned }) => pinned],
  ["Evict", evict, "", () => true],
];

/** Token ids are no source: they would have to be given again. */
function isRenderable(recipe) {
  return Boolean(recipe) && recipe.kind !== "tokens";
}

/**
 * The buttons of a prompt. Each stays the same element while it is shown, so that the focus can come back to it.
 * @param {() => void} changed Called after a change.
 */
export function actionsOf(changed) {
  const element = h("div", { class: "row" });
  let latest = null;
  const buttons = new Map(
    ACTIONS.map(([text, act, kind]) => {
      const click = async () => {
        if (await act(latest)) changed();
      };
      return [text, h("button", { type: "button", class: `button ${kind}`, on: { click } }, text)];
    }),
  );
  return {
    element,
    /** @param {any} prompt As it was answered last; null: there is none to act on. */
    set: (prompt) => {
      latest = prompt;
      const hadFocus = element.contains(document.activeElement);
      const wanted = prompt ? ACTIONS.filter(([, , , isFor]) => isFor(prompt)) : [];
      place(
        element,
        wanted.map(([text]) => buttons.get(text)),
      );
      if (hadFocus && hasNoFocus()) document.querySelector("h1")?.focus({ preventScroll: true });
    },
  };
}

function change(prompt) {
  return openDialog({
    title: `Change ${prompt.name}`,
    confirm: "Save",
    fields: [
      h(
        "div",
        { class: "form-2" },
        textField("Priority", "priority", {
          type: "number",
          min: -100,
          max: 100,
          value: prompt.priority,
          hint: "−100 to 100, higher stays longer.",
        }),
        textField("Time to live", "ttl", {
          value: ttlText(prompt.ttl_s),
          hint: "It begins again now: 7d, 12h, 30m. Empty: forever.",
        }),
      ),
      h(
        "div",
        { class: "form-2" },
        textField("Owner", "owner", { value: prompt.owner }),
        textField("Labels", "labels", {
          value: Object.entries(prompt.labels)
            .filter(([key]) => !key.startsWith("kvtier/"))
            .map(([key, value]) => `${key}=${value}`)
            .join(","),
          placeholder: "team=support",
        }),
      ),
      h(
        "div",
        { class: "form-2" },
        checkField("Sliding", "sliding", { checked: prompt.sliding, hint: "The time begins again with each use." }),
        checkField("Public", "public", { checked: prompt.public, hint: "Any cache_salt may use it." }),
      ),
    ],
    submit: async (values) => {
      const body = differing(prompt, values);
      if (body.ttl_s === prompt.ttl_s) await refuseIfTtlDiffers(prompt);
      const isAny = Object.keys(body).length > 0;
      if (isAny) await api.change(prompt.name, body);
      say(isAny ? `${prompt.name} is changed.` : `Nothing differs: ${prompt.name} stays as it is.`);
      return true;
    },
  });
}

/** The time to live begins again though no one has edited it: not as it was, where it was changed meanwhile. */
async function refuseIfTtlDiffers({ name, ttl_s: shown }) {
  const { ttl_s: latest } = await api.prompt(name);
  if (latest !== shown) {
    const isNow = latest ? `is ${ttlText(latest)} now` : "has no end now";
    throw new Problem(
      409,
      "Changed meanwhile",
      `The time to live of ${name} was changed meanwhile, and ${isNow}. Nothing is saved: cancel, and begin again.`,
    );
  }
}

function differing(prompt, values) {
  const ttl = ttlSeconds(values.get("ttl"));
  if (Number.isNaN(ttl))
    throw new Problem(400, "", `time to live = "${values.get("ttl")}": write it like 7d, 12h or 30m`);
  const priority = Number(values.get("priority"));
  if (!Number.isInteger(priority) || Math.abs(priority) > 100)
    throw new Problem(400, "", `priority = "${values.get("priority")}": a whole number from −100 to 100`);
  const wanted = {
    priority,
    ttl_s: ttl,
    owner: values.get("owner").trim(),
    sliding: values.has("sliding"),
    public: values.has("public"),
  };
  // The same time to live is a change too: it begins again.
  const body = Object.fromEntries(
    Object.entries(wanted).filter(([key, value]) => value !== prompt[key] || (key === "ttl_s" && value > 0)),
  );
  const before = Object.fromEntries(Object.entries(prompt.labels).filter(([key]) => !key.startsWith("kvtier/")));
  const after = readLabels(values.get("labels"));
  const changes = Object.entries(after).filter(([key, value]) => before[key] !== value);
  const removed = Object.keys(before)
    .filter((key) => !(key in after))
    .map((key) => [key, null]);
  if (changes.length || removed.length) body.labels = Object.fromEntries([...changes, ...removed]);
  return body;
}

function adopt(prompt) {
  const hasLeft = leftSince();
  return openDialog({
    title: `Adopt ${prompt.name}`,
    confirm: "Adopt",
    text: "It gets a name, and stays from then on. Its chunks are kept throughout.",
    fields: [textField("Name", "name", { required: true, pattern: NAME, placeholder: "support" })],
    submit: async (values) => {
      const name = named(values);
      await api.adopt(name, prompt.name);
      say(`${name} is pinned.`);
      if (!hasLeft()) go("prompts", name);
      return true;
    },
  });
}

function rename(prompt) {
  const hasLeft = leftSince();
  return openDialog({
    title: `Rename ${prompt.name}`,
    confirm: "Rename",
    text: "Its versions go with it. Requests do not change.",
    fields: [textField("New name", "name", { required: true, pattern: NAME, value: prompt.name })],
    submit: async (values) => {
      const name = named(values);
      await api.rename(prompt.name, name);
      say(`${prompt.name} is ${name} now.`);
      if (!hasLeft()) go("prompts", name);
      return true;
    },
  });
}

function named(values) {
  const name = values.get("name").trim();
  if (!new RegExp(`^${NAME}$`).test(name))
    throw new Problem(
      400,
      "",
      `name = "${name}": a name has 1 to 128 letters, digits and . _ / @ -, and begins with a letter or digit`,
    );
  return name;
}

function pinAgain(prompt) {
  return openDialog({
    title: `Pin ${prompt.name} again`,
    confirm: "Pin",
    text: "vLLM renders it again from the source that is stored with it.",
    submit: async () => {
      computePin(prompt.name, await api.pin(prompt.name, { warm: false }), {});
      say(`${prompt.name} is pinned.`);
      return true;
    },
  });
}

function unpin(prompt) {
  return openDialog({
    title: `Unpin ${prompt.name}?`,
    confirm: "Unpin",
    danger: true,
    text: "The promise ends. Its chunks stay as cache until their place is needed, and you can pin it again.",
    submit: async () => {
      await api.unpin(prompt.name);
      say(`${prompt.name} is unpinned.`);
      return true;
    },
  });
}

function evict(prompt) {
  const hasLeft = leftSince();
  const text = prompt.pinned
    ? "Its chunks are dropped, except those that other pinned prompts have. The pin stays: the next request " +
      "computes and stores them again."
    : "Its chunks are dropped, except those that pinned prompts have. Evicted from everywhere, the prompt " +
      "is forgotten.";
  return openDialog({
    title: `Evict ${prompt.name}?`,
    confirm: "Evict",
    danger: true,
    text,
    fields: [
      choiceField("From", "tier", [
        ["", "Host memory and disk"],
        ["host", "Host memory only"],
        ["disk", "Disk only"],
      ]),
    ],
    submit: async (values) => {
      const tier = values.get("tier");
      const done = await api.evict(prompt.name, { force: prompt.pinned, ...(tier ? { tier } : {}) });
      const kept = done.num_shared_chunks
        ? `; ${plural(done.num_shared_chunks, "chunk")} shared with pinned prompts stay`
        : "";
      say(
        `${plural(done.num_chunks, "chunk")} dropped: ${bytes(done.host_bytes)} of memory, ` +
          `${bytes(done.disk_bytes)} of disk${kept}.`,
      );
      if (!prompt.pinned && !tier && !hasLeft()) go("prompts");
      return true;
    },
  });
}

function verify(prompt) {
  return openDialog({
    title: `Verify ${prompt.name}`,
    confirm: "Verify",
    text:
      "Every chunk in memory and on disk is compared with its checksum. Damaged ones are dropped, and " +
      "stored again when next computed.",
    submit: async () => {
      const result = await api.verify(prompt.name);
      const namespaces = result.checksums?.namespaces ?? result.namespaces ?? [];
      const bad = namespaces.reduce(
        (sum, { host, disk, num_differing_chunks: differing }) =>
          sum + host.num_damaged_chunks + disk.num_damaged_chunks + disk.num_refused_chunks + differing,
        0,
      );
      const whole = namespaces.reduce(
        (sum, { host, disk }) => sum + host.num_verified_chunks + disk.num_verified_chunks,
        0,
      );
      const lost = namespaces.reduce((sum, each) => sum + each.num_lost_chunks, 0);
      if (bad)
        throw new Problem(
          -1,
          "Damaged",
          `${plural(bad, "chunk")} of ${prompt.name} were not what was stored, or could not be read. See ` +
            `the disk view, and run kvtier fsck --deep.`,
        );
      if (!whole)
        throw new Problem(
          -1,
          "Nothing was compared",
          `Nothing of ${prompt.name} is stored now. The next request that has it stores it.`,
        );
      const compared = `${plural(whole, "chunk")} compared`;
      say(
        lost
          ? `What is stored of ${prompt.name} is intact: ${compared}; ${plural(lost, "chunk")} not stored.`
          : `${prompt.name} is intact: ${compared}.`,
      );
      return true;
    },
  });
}
