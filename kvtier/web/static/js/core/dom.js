// Elements made by calls. No text ever becomes HTML: children that are strings become text nodes.

const SVG = "http://www.w3.org/2000/svg";

/** @typedef {Node | string | number | null | undefined | false | Child[]} Child */

/**
 * Make an element.
 * @param {string} tag
 * @param {Record<string, any>} [attributes] `on` is an object of listeners; null, undefined and false leave one out.
 * @param {...Child} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAll(element, attributes);
  element.append(...flat(children));
  return element;
}

/** Make an SVG element; as `h`. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  setAll(element, attributes);
  element.append(...flat(children));
  return element;
}

function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "value" && "value" in element) element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

function flat(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

/** Replace what is in an element. */
export function fill(element, ...children) {
  lastShown.delete(element);
  element.replaceChildren(...flat(children));
  return element;
}

/**
 * Replace what is in an element only if it differs from what was put there last, so that focus and selection stay.
 * @param {HTMLElement} element
 * @param {any} values What the children show, as JSON values.
 * @param {() => Child} make
 */
export function fillIfChanged(element, values, make) {
  const shown = JSON.stringify(values);
  if (lastShown.get(element) === shown) return;
  fill(element, make());
  lastShown.set(element, shown);
}
const lastShown = new WeakMap();

/** Put elements into a parent in this order, and move only those that are elsewhere: focus stays in the others. */
export function place(parent, elements) {
  const wanted = new Set(elements);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  elements.forEach((element, at) => {
    if (parent.children[at] !== element) parent.insertBefore(element, parent.children[at] ?? null);
  });
}

/** Whether no element has the focus: what had it is gone or disabled. */
export function hasNoFocus() {
  return !document.activeElement || document.activeElement === document.body;
}

/** Return a function that calls `draw` with the next frame, once for however many calls there are until then. */
export function oncePerFrame(draw) {
  let isAsked = false;
  return () => {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => {
      isAsked = false;
      draw();
    });
  };
}

let lastId = 0;
/** Return an id that no other element has. */
export function newId(stem) {
  lastId += 1;
  return `${stem}-${lastId}`;
}
