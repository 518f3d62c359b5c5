/** Finding out what the service lets this session do. There is no route that says it: one of each scope is asked. */

import { askJson } from "./api.js";
import { session } from "./session.js";

export const SCOPES = { infer: "v1/models", read: "v1/policies", admin: "v1/keys" };

/** Use `key` from now on, or none if it is null. */
export async function useKey(key) {
  session.keep(key);
  await look();
}

/** Ask what is allowed; the session dispatches "change". */
export async function look() {
  const names = Object.keys(SCOPES);
  const answers = await Promise.allSettled(names.map((name) => askJson(SCOPES[name])));
  // Of an open service the runtime may want a key, which the service passes on.
  const refuses = (reason) => reason?.refusesKey || (reason?.status === 401 && session.key === null);
  const refusal = answers.map((answer) => answer.reason).find(refuses);
  const reached = answers.some((answer) => answer.status === "fulfilled" || answer.reason.status !== null);
  const models = answers[0].value?.data;
  session.learn({
    mode: mode(refusal, reached),
    problem: refusal ?? null,
    scopes: Object.fromEntries(
      names.map((name, index) => [name, answers[index].status === "fulfilled" || answers[index].reason]),
    ),
    model: Array.isArray(models) && typeof models[0]?.id === "string" ? models[0].id : session.model,
  });
}

function mode(refusal, reached) {
  if (refusal) return "locked";
  if (!reached) return "unknown";
  return session.key === null ? "open" : "key";
}
