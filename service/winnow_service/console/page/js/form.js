/** Forms whose errors stand at their fields, in the service's own words. */

import { h, newId } from "./dom.js";

/**
 * A field with a label, a hint and a place for its error.
 *
 * @param name as the service calls it in `error.param`: "scopes", "limits.tokens_per_minute".
 * @param control an input, a select or a textarea; or a fieldset, whose legend `label` then is.
 */
export class Field {
  constructor(name, label, control, hint = null) {
    this.name = name;
    this.control = control;
    const isGroup = control.tagName === "FIELDSET";
    const hintId = newId("hint");
    this.error = h("p", { class: "error small", id: newId("error") });
    control.id ||= newId("control");
    control.setAttribute("aria-describedby", hint ? `${hintId} ${this.error.id}` : this.error.id);
    if (isGroup) control.prepend(h("legend", {}, label));
    this.element = h(
      "div",
      { class: "field" },
      !isGroup && h("label", { for: control.id }, label),
      control,
      hint && h("p", { class: "small muted", id: hintId }, hint),
      this.error,
    );
  }

  /** Show what is wrong; "" if nothing is. */
  show(text) {
    this.error.textContent = text;
    if (text) this.control.setAttribute("aria-invalid", "true");
    else this.control.removeAttribute("aria-invalid");
  }

  focus() {
    const first = this.control.tagName === "FIELDSET" ? this.control.querySelector("input") : this.control;
    first.focus();
  }
}

/** A value in a field that cannot be sent. */
export class FieldProblem extends Error {
  constructor(param, message) {
    super(message);
    this.param = param;
  }
}

/**
 * A form of fields.
 *
 * @param send called with nothing when the form is to be sent; what it throws is shown.
 */
export class Form {
  #problem = h("div", { class: "problem", role: "alert", hidden: true });

  constructor(fields, buttons, send) {
    this.fields = fields;
    this.element = h(
      "form",
      { class: "fields", novalidate: true },
      ...fields.map((field) => field.element),
      this.#problem,
      h("div", { class: "row" }, ...buttons),
    );
    this.element.addEventListener("submit", async (event) => {
      event.preventDefault();
      await this.attempt(send);
    });
  }

  /** Do something, and show what it throws. */
  async attempt(act) {
    this.clear();
    try {
      await act();
    } catch (error) {
      this.#show(error);
    }
  }

  clear() {
    this.fields.forEach((field) => field.show(""));
    this.#problem.hidden = true;
  }

  #show(error) {
    // The field itself, or the one that what is wrong is in: attention.decode.p is in attention.
    const parts = (error.param ?? "").split(".");
    const paths = parts.map((_, index) => parts.slice(0, parts.length - index).join("."));
    const field = paths.map((path) => this.fields.find(({ name }) => name === path)).find(Boolean);
    if (field) {
      field.show(error.message);
      field.focus();
    } else {
      this.#problem.hidden = false;
      this.#problem.textContent = error.message;
    }
  }
}

/** The JSON object in `control`; null if it is empty. Throws a FieldProblem of `name` if it is none. */
export function jsonIn(control, name) {
  const text = control.value.trim();
  if (text === "") return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldProblem(name, `${name}: this is not valid JSON: ${error.message}`);
  }
}

/**
 * Ask whether to do what cannot be undone.
 *
 * @returns a promise of the answer.
 */
export function confirmed(question, doIt) {
  return new Promise((answer) => {
    const titleId = newId("question");
    const dialog = h(
      "dialog",
      { "aria-labelledby": titleId },
      h("p", { id: titleId }, question),
      h(
        "form",
        { method: "dialog", class: "row dialog-buttons" },
        h("button", { value: "no", autofocus: true }, "Cancel"),
        h("button", { value: "yes", class: "danger" }, doIt),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      answer(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
