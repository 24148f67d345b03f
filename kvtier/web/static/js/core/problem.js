// What goes wrong, as the API says it (RFC 9457) or as the browser does.

/** A refusal or a failure, with the remedy in `detail`. */
export class Problem extends Error {
  /**
   * @param {number} status Of HTTP; 0: no answer came.
   * @param {string} title
   * @param {string} detail
   * @param {any} [body] The whole of problem+json.
   */
  constructor(status, title, detail, body) {
    super(detail || title);
    this.name = "Problem";
    Object.assign(this, { status, title, detail, body });
  }
}

const TITLES = {
  0: "The daemon does not answer",
  400: "This cannot be used",
  401: "Sign in",
  403: "Your role does not allow this",
  404: "Not found",
  409: "This conflicts with what there is",
  429: "Too many requests",
  503: "The daemon is not available",
  504: "The daemon did not answer in time",
  507: "It does not fit",
};

/** Return what people read first of a problem. */
export function titleOf(problem) {
  return TITLES[problem.status] ?? problem.title ?? "Something failed";
}

/** Make a problem of an answer that is none of success. */
export async function problemOf(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // A proxy between may answer with a page of its own.
  }
  const detail = typeof body?.detail === "string" ? body.detail : `HTTP ${response.status} ${response.statusText}`;
  return new Problem(response.status, body?.title ?? "", detail, body);
}

/** Make a problem of whatever was thrown. */
export function asProblem(error) {
  if (error instanceof Problem) return error;
  if (error instanceof TypeError && /fetch|network|load failed/i.test(error.message))
    return new Problem(0, "", "No answer came. Is kvtier-daemon running? It is asked again by itself.");
  return new Problem(-1, "Something failed in this page", String(error?.message ?? error));
}
