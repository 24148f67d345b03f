// Addresses of views: #/prompts/NAME?tab=versions. The fragment never leaves the browser.

/** @typedef {{view: string, argument: string, query: URLSearchParams}} Place */

/** @returns {Place} */
export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [view = "", ...rest] = path.split("/");
  return { view: view || "overview", argument: decoded(rest.join("/")), query: new URLSearchParams(query) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Return the address of a view, for links. */
export function address(view, argument = "", query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value);
  const tail = kept.length ? `?${new URLSearchParams(kept)}` : "";
  return `#/${view}${argument ? `/${encodeURIComponent(argument)}` : ""}${tail}`;
}

export function go(view, argument = "", query = {}) {
  location.hash = address(view, argument, query);
}

/** Return a function that says whether another view is shown by now. */
export function leftSince() {
  const began = here();
  return () => began.view !== here().view || began.argument !== here().argument;
}

/** Change the query of the address without a step in the history, and without showing the view again. */
export function keepQuery(query) {
  const place = here();
  history.replaceState(null, "", address(place.view, place.argument, query));
}
