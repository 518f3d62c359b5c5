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
  #error;
  #wanted;
  #allowsDefault;

  /**
   * @param label of the control.
   * @param wanted the policy's name that is chosen at first.
   * @param allowsDefault whether none may be asked for, which gets the server's default.
   */
  constructor(label, wanted, { allowsDefault = true } = {}) {
    const errorId = newId("error");
    this.#wanted = NAMED + wanted;
    this.#allowsDefault = allowsDefault;
    this.#select = h("select", { "aria-label": label, "aria-describedby": errorId, onchange: () => this.#chosen() });
    this.#typed = h("textarea", { rows: 3, spellcheck: "false", class: "mono", placeholder: EXAMPLE, "aria-describedby": errorId, hidden: true });
    this.#error = h("p", { class: "error small", id: errorId, hidden: true });
    this.#typed.setAttribute("aria-label", `${label}, as JSON or as a name`);
    this.element = h("div", { class: "policy-choice field" }, this.#select, this.#typed, this.#error);
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
    this.showError("");
    const { value } = this.#select;
    if (value === DEFAULT) return undefined;
    if (value !== TYPED) return value.slice(NAMED.length);
    const text = this.#typed.value.trim();
    if (!text.startsWith("{")) return text;
    try {
      return JSON.parse(text);
    } catch (error) {
      this.showError(`This is not valid JSON: ${error.message}.`);
      this.#typed.focus();
      throw error;
    }
  }

  /** What is wrong; "" if nothing is. */
  get error() {
    return this.#error.textContent;
  }

  /** Show what is wrong; "" if nothing is. */
  showError(text) {
    this.#error.textContent = text;
    this.#error.hidden = text === "";
    this.#select.removeAttribute("aria-invalid");
    this.#typed.removeAttribute("aria-invalid");
    if (text !== "") this.#control.setAttribute("aria-invalid", "true");
  }

  focus() {
    this.#control.focus();
  }

  /** The one in which the policy is said. */
  get #control() {
    return this.#select.value === TYPED ? this.#typed : this.#select;
  }

  #chosen() {
    this.#wanted = this.#select.value;
    this.#showTyped();
  }

  #showTyped() {
    this.#typed.hidden = this.#select.value !== TYPED;
    if (!this.#typed.hidden && this.#typed.value === "") this.#typed.value = EXAMPLE;
  }

  #list() {
    const group = (label, policies) =>
      policies.length > 0 &&
      h("optgroup", { label }, ...policies.map(({ name }) => h("option", { value: NAMED + name }, name)));
    fill(
      this.#select,
      group("Presets", knownPolicies.all.filter(({ preset }) => preset)),
      group("Stored", knownPolicies.all.filter(({ preset }) => !preset)),
      this.#allowsDefault && h("option", { value: DEFAULT }, "The default (ask for none)"),
      h("option", { value: TYPED }, "JSON or name…"),
    );
    this.#select.value = this.#wanted;
    // What was wanted is not there, or not there any more.
    if (this.#select.selectedIndex < 0) this.#select.value = this.#allowsDefault ? DEFAULT : TYPED;
    this.#showTyped();
  }
}
