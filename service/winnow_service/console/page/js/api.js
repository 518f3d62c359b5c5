/** The service's API, beside which this page lies, whatever a proxy puts before the path. */

import { session } from "./session.js";

const ROOT = new URL("../../", import.meta.url);

/** What the service, or the runtime behind it, says in place of an answer. */
export class Problem extends Error {
  /**
   * @param status of HTTP; null where there was no answer.
   * @param code by which the service's errors are told apart, if it is one.
   * @param param the field that is wrong, if it is one.
   */
  constructor(message, { status = null, code = null, param = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.param = param;
  }

  /** Whether it is the service that refuses the key, or that there is none; a runtime may want one of its own. */
  get refusesKey() {
    return ["missing_key", "invalid_key"].includes(this.code);
  }

  /** From a body: problem details, OpenAI's error object, or SGLang's own error. */
  static of(body, status) {
    const error = typeof body?.error === "object" && body.error !== null ? body.error : {};
    const message = body?.detail ?? error.message ?? body?.message;
    return new Problem(typeof message === "string" ? message : `The answer has the status ${status}.`, {
      status: body?.status ?? status,
      code: error.code ?? body?.code ?? null,
      param: error.param ?? body?.param ?? null,
    });
  }
}

/**
 * Ask for `path` with the key of the session.
 *
 * @throws Problem if the answer is not 2xx, or there is none.
 */
export async function ask(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (session.key !== null) sent.authorization = `Bearer ${session.key}`;
  if (body !== undefined) sent["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), {
      method,
      headers: sent,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal,
    });
  } catch (error) {
    throw lost(error, "The service cannot be reached.");
  }
  if (answer.ok) return answer;
  const problem = Problem.of(await answer.json().catch(() => null), answer.status);
  if (problem.refusesKey) session.refused(problem);
  throw problem;
}

/** Ask for `path` and return the JSON that is answered. */
export async function askJson(path, options) {
  return (await ask(path, options)).json();
}

/** What to throw for an error of fetch: a request that was stopped stays one. */
export function lost(error, message) {
  return error.name === "AbortError" ? error : new Problem(message);
}

/** `name` as one part of a path. */
export function part(name) {
  return encodeURIComponent(name);
}
