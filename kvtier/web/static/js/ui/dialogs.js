// Dialogs of the browser: they keep the focus inside, close by Escape, and give the focus back.

import { fill, h, hasNoFocus, newId } from "../core/dom.js";
import { complain, problemBox } from "./notices.js";

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
 *   While it runs the dialog cannot be closed: what was sent cannot be taken back.
 * @returns {Promise<any>} What `submit` returned, also where the view, and the dialog with it, was left before;
 *   undefined if the dialog was closed without.
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
    let [isRunning, isDone, isClosed] = [false, false, false];
    cancel.addEventListener("click", () => dialog.close());
    const setRunning = (value) => {
      isRunning = value;
      doIt.disabled = cancel.disabled = value;
    };
    dialog.addEventListener("cancel", (event) => {
      if (isRunning) event.preventDefault();
    });
    // Of two times Escape in a row, Chromium closes a dialog whatever "cancel" says.
    const ignoreEscape = (event) => {
      if (isRunning && event.key === "Escape") event.preventDefault();
    };
    document.addEventListener("keydown", ignoreEscape, true);
    // A view that goes takes its dialog with it.
    const leave = () => dialog.close();
    addEventListener("hashchange", leave, { once: true });
    dialog.addEventListener("keydown", (event) => keepFocusInside(dialog, event));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (isRunning) return;
      fill(problems);
      const pressed = document.activeElement;
      setRunning(true);
      try {
        result = await submit(new FormData(form));
        isDone = true;
      } catch (error) {
        if (isClosed) complain(error);
        else fill(problems, problemBox(error));
      } finally {
        setRunning(false);
      }
      if (isClosed) resolve(result);
      else if (isDone) dialog.close();
      else if (!dialog.contains(document.activeElement)) pressed.focus();
    });
    dialog.addEventListener("close", () => {
      isClosed = true;
      removeEventListener("hashchange", leave);
      document.removeEventListener("keydown", ignoreEscape, true);
      dialog.remove();
      focusAgain(before);
      if (!isRunning) resolve(result);
    });
    dialog.showModal();
    (
      dialog.querySelector("[autofocus]") ??
      (danger || !confirm ? cancel : (form.querySelector("input, select, textarea") ?? doIt))
    ).focus();
  });
}

function focusAgain(before) {
  if (before instanceof HTMLElement && before.isConnected) before.focus();
  // What opened the dialog may be gone by now; then the title of the view is the place to go on from.
  if (hasNoFocus()) document.querySelector("h1")?.focus({ preventScroll: true });
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
