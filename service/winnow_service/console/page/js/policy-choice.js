/** Choosing a policy: one that has a name, the server's default, or one that is typed in. */

import { h, fill, newId } from "./dom.js";
import { knownPolicies } from "./policies-known.js";

const DEFAULT = "default";
const TYPED = "typed";
const NAMED = "name:";
const EXAMPLE = '{"decode": {"policy": "lowbit_top_k", "budget": 1024}}';

/** A control for the field `attention` of a request. */
export class PolicyChoice {
  #select;
  #typed;
  #field;
  #error;
  #wanted;

  /**
   * @param label of the control.
   * @param wanted the policy's name that is chosen at first.
   */
  constructor(label, wanted) {
    const errorId = newId("error");
    this.#wanted = NAMED + wanted;
    this.#select = h("select", { "aria-label": label, onchange: () => this.#chosen() });
    this.#typed = h("textarea", { rows: 3, spellcheck: "false", class: "mono", placeholder: EXAMPLE, "aria-describedby": errorId });
    this.#error = h("p", { class: "error small", id: errorId });
    this.#typed.setAttribute("aria-label", `${label}, as JSON or as a name`);
    this.#field = h("div", { class: "field", hidden: true }, this.#typed, this.#error);
    this.element = h("div", { class: "policy-choice" }, this.#select, this.#field);
    knownPolicies.addEventListener("change", () => this.#list());
    this.#list();
  }

  /** Choose the policy of that name. */
  choose(name) {
    this.#wanted = NAMED + name;
    this.#list();
  }

  /** What is chosen, in a word or two. */
  get title() {
    const { value } = this.#select;
    if (value === DEFAULT) return "the default";
    return value === TYPED ? "a policy typed in" : value.slice(NAMED.length);
  }

  /**
   * What a request has to say: a policy, a name, or undefined for the default.
   *
   * @throws SyntaxError if what was typed in is no JSON; then the field says so.
   */
  get attention() {
    this.#showError("");
    const { value } = this.#select;
    if (value === DEFAULT) return undefined;
    if (value !== TYPED) return value.slice(NAMED.length);
    const text = this.#typed.value.trim();
    if (!text.startsWith("{")) return text;
    try {
      return JSON.parse(text);
    } catch (error) {
      this.#showError(`This is not valid JSON: ${error.message}.`);
      this.#typed.focus();
      throw error;
    }
  }

  #chosen() {
    this.#wanted = this.#select.value;
    this.#field.hidden = this.#wanted !== TYPED;
    if (!this.#field.hidden && this.#typed.value === "") this.#typed.value = EXAMPLE;
  }

  #list() {
    const group = (label, policies) =>
      policies.length > 0 &&
      h("optgroup", { label }, ...policies.map(({ name }) => h("option", { value: NAMED + name }, name)));
    fill(
      this.#select,
      group("Presets", knownPolicies.all.filter(({ preset }) => preset)),
      group("Stored", knownPolicies.all.filter(({ preset }) => !preset)),
      h("option", { value: DEFAULT }, "The default (ask for none)"),
      h("option", { value: TYPED }, "JSON or name…"),
    );
    this.#select.value = this.#wanted;
    // What was wanted is not there, or not there any more.
    if (this.#select.selectedIndex < 0) this.#select.value = DEFAULT;
    this.#field.hidden = this.#select.value !== TYPED;
  }

  #showError(text) {
    this.#error.textContent = text;
    this.#typed.toggleAttribute("aria-invalid", text !== "");
    if (text !== "") this.#typed.setAttribute("aria-invalid", "true");
  }
}
