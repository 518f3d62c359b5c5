/** Whose session this is, at the top, and the form that asks for a key where the service wants one. */

import { useKey } from "./access.js";
import { announce, fill, h } from "./dom.js";
import { Field, FieldProblem, Form } from "./form.js";
import { session } from "./session.js";

/** Keep `access` and the form in `signIn` as the session is. */
export function installSignIn(access, signIn) {
  const key = h("input", { type: "password", autocomplete: "off", spellcheck: "false" });
  const field = new Field("key", "Key", key, "Kept by this tab only, and sent as Authorization: Bearer. Closing the tab forgets it.");
  const form = new Form([field], [h("button", { class: "main", type: "submit" }, "Use this key")], async () => {
    const text = key.value.trim();
    // What a header cannot carry is no key of the service either.
    if (!/^[\x21-\x7e]+$/.test(text)) throw new FieldProblem("key", "A key has letters, digits and signs, without spaces.");
    await useKey(text);
    if (session.mode === "locked") {
      const { message } = session.problem;
      await useKey(null);
      throw new FieldProblem("key", message);
    }
    key.value = "";
    announce("The key is in use.");
  });
  signIn.append(
    h("h2", { id: "sign-in-title" }, "This service needs a key"),
    h("p", { class: "muted" }, "Of its scopes, infer sends requests, read lists policies and metrics, admin changes policies and keys."),
    form.element,
  );
  let wasShown = false;
  session.addEventListener("change", () => {
    fill(access, ...whose());
    signIn.hidden = session.mode !== "locked";
    if (!signIn.hidden && session.key !== null) field.show(session.problem.message);
    if (!signIn.hidden && !wasShown && document.activeElement === document.body) key.focus();
    wasShown = !signIn.hidden;
  });
}

function whose() {
  if (session.mode === "open") {
    return [h("span", { class: "badge warn", title: "Make a key to shut it." }, "open: no keys"), h("span", { class: "muted small" }, "Whoever reaches it may do everything.")];
  }
  const scopes = Object.keys(session.scopes).filter((scope) => session.may(scope));
  return [
    session.mode === "locked" && h("span", { class: "badge bad" }, session.key === null ? "no key" : "key refused"),
    session.mode === "key" && h("span", {}, "Key ", session.keyId && h("code", {}, session.keyId)),
    ...(session.mode === "key" ? scopes.map((scope) => h("span", { class: "badge" }, scope)) : []),
    session.key !== null && h("button", { onclick: forget }, "Forget the key"),
  ];
}

async function forget() {
  await useKey(null);
  announce("The key is forgotten.");
}
