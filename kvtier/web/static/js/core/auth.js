// The token of this tab. It is kept in sessionStorage and sent as a header: there is no cookie to misuse.

const KEY = "kvtier-token";
let inMemory = "";

/** @returns {string} Empty: none. */
export function token() {
  try {
    return sessionStorage.getItem(KEY) ?? inMemory;
  } catch {
    return inMemory;
  }
}

export function keepToken(value) {
  inMemory = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // No storage: until the page is loaded again.
  }
}

export function forgetToken() {
  inMemory = "";
  try {
    sessionStorage.removeItem(KEY);
  } catch {
    // Nothing was kept.
  }
}

/** @returns {Record<string, string>} The header of a request. */
export function credentials() {
  const value = token();
  return value ? { Authorization: `Bearer ${value}` } : {};
}

/** Who asks; what is null is not known yet. */
export const caller = { name: "", role: "", owner: "", version: "" };

/** Whether the caller may change things. The daemon decides; this only keeps buttons from being offered in vain. */
export function mayChange() {
  return caller.role !== "viewer";
}
