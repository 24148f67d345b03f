// Dialogs of the browser: they keep the focus inside, close by Escape, and give the focus back.

import { fill, h, newId } from "../core/dom.js";
import { problemBox } from "./notices.js";

/** Show something that can only be read and closed. */
export function showInDialog(title, content) {
  return openDialog({ title, text: content, confirm: "", wide: true, submit: async () => true });
}

/**
 * Show a form in a dialog, and call `submit` with its values.
 * @param {object} options
 * @param {string} options.title
 * @param {any} [options.text] Below the title.
 * @param {any[]} [options.fields] Elements of the form.
 * @param {string} options.confirm The button that does it; empty: there is nothing to do.
 * @param {boolean} [options.danger]
 * @param {boolean} [options.wide]
 * @param {(values: FormData) => Promise<any>} options.submit What it throws is shown in the dialog, which stays open.
 * @returns {Promise<any>} What `submit` returned; undefined if the dialog was closed without.
 */
export function openDialog({ title, text, fields = [], confirm, danger = false, wide = false, submit }) {
  const titleId = newId("dialog-title");
  const before = document.activeElement;
  const problems = h("div", { "aria-live": "assertive" });
  const doIt = h(
    "button",
    { type: "submit", class: `button ` + `${danger ? "button-danger" : "button-primary"}` },
    confirm,
  );
  const cancel = h("button", { type: "button", class: "button" }, confirm ? "Cancel" : "Close");
  const form = h(
    "form",
    { class: "dialog-form", novalidate: true },
    h("h2", { id: titleId }, title),
    text && (typeof text === "string" ? h("p", {}, text) : text),
    ...fields,
    problems,
    h("div", { class: "dialog-buttons" }, cancel, confirm && doIt),
  );
  const dialog = h("dialog", { "aria-labelledby": titleId, class: wide ? "dialog-wide" : "" }, form);
  document.body.append(dialog);

  return new Promise((resolve) => {
    let result;
    cancel.addEventListener("click", () => dialog.close());
    // A view that goes takes its dialog with it.
    const leave = () => dialog.close();
    addEventListener("hashchange", leave, { once: true });
    dialog.addEventListener("keydown", (event) => keepFocusInside(dialog, event));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      fill(problems);
      doIt.disabled = true;
      try {
        result = await submit(new FormData(form));
        dialog.close();
      } catch (error) {
        fill(problems, problemBox(error));
      } finally {
        doIt.disabled = false;
      }
    });
    dialog.addEventListener("close", () => {
      removeEventListener("hashchange", leave);
      dialog.remove();
      if (before instanceof HTMLElement && before.isConnected) before.focus();
      resolve(result);
    });
    dialog.showModal();
    (
      dialog.querySelector("[autofocus]") ??
      (danger || !confirm ? cancel : (form.querySelector("input, select, textarea") ?? doIt))
    ).focus();
  });
}

// showModal makes the page inert, and yet Tab may leave for the browser's own bar.
function keepFocusInside(dialog, event) {
  if (event.key !== "Tab") return;
  const inside = [...dialog.querySelectorAll("button, input, select, textarea, a[href], summary")].filter(
    (each) => !each.disabled && each.offsetParent !== null,
  );
  const [first, last] = [inside[0], inside.at(-1)];
  const leaving = event.shiftKey ? first : last;
  if (document.activeElement !== leaving) return;
  event.preventDefault();
  (event.shiftKey ? last : first).focus();
}
