/** What policies attend to: a prompt under two to four of them, token by token. */

import { askJson } from "./api.js";
import { announce, h, newId } from "./dom.js";
import { ExplanationView } from "./explanation-view.js";
import { Field, FieldProblem, Form } from "./form.js";
import { PolicyChoice } from "./policy-choice.js";
import { session } from "./session.js";
import { textFileButton } from "./text-file.js";

const LETTERS = ["A", "B", "C", "D"];
const MIN_POLICIES = 2;
const FIRST_POLICIES = ["balanced", "fast", "exact", "long-prompt"];
const EXAMPLE = "The code of the green door is 4711. The code of the red door is 8052. What is the code of the green door?";
const NUMBERS = /^\d+(\s*-\s*\d+)?$/;

/** A policy of the question, as a field of its form. */
class AskedPolicy {
  constructor(index) {
    this.name = `policies.${index}`;
    this.choice = new PolicyChoice(`Policy ${LETTERS[index]}`, FIRST_POLICIES[index], { allowsDefault: false });
    this.element = h("div", { class: "asked-policy" }, h("span", { class: "mono", "aria-hidden": "true" }, LETTERS[index]), this.choice.element);
  }

  show(text) {
    this.choice.showError(text);
  }

  focus() {
    this.choice.focus();
  }

  get attention() {
    try {
      return this.choice.attention;
    } catch (error) {
      throw new FieldProblem(this.name, this.choice.error || error.message);
    }
  }
}

class Explain {
  #stopper = null;
  #policies = [];
  #grid = h("div", { class: "asked-policies" });
  #prompt = h("textarea", { rows: 6 });
  #promptField = new Field("prompt", "Prompt", this.#prompt);
  #decodeSteps = h("input", { type: "number", min: 1, max: 256, step: 1, placeholder: "8" });
  #steps = listInput("first and last");
  #layers = listInput("four");
  #heads = listInput("first and last");
  #isChat = true;
  #send = h("button", { class: "main", type: "submit" }, "Explain");
  #stop = h("button", { type: "button", disabled: true, onclick: () => this.#stopper?.abort() }, "Stop");
  #add = h("button", { type: "button", onclick: () => this.#addPolicy() }, "Add a policy");
  #remove = h("button", { type: "button", onclick: () => this.#removePolicy() }, "Remove the last");
  #state = h("span", { class: "badge", hidden: true });
  #scope = h("p", { class: "muted" }, "This needs a key with the scope 'admin'.");
  #view = new ExplanationView();
  #form;

  constructor(root) {
    this.#prompt.value = EXAMPLE;
    this.#form = new Form(
      [
        this.#promptField,
        { name: "policies", element: h("div", { class: "field" }, this.#kinds(), this.#grid), show() {}, focus: () => this.#policies[0].focus() },
        new Field("decode_steps", "Decode steps", this.#decodeSteps, "Decoded at most; 8 if empty."),
        new Field("steps", "Steps explained", this.#steps, "Such as 1, 4-8. Step 1 computes the second token."),
        new Field("layers", "Layers", this.#layers, "From 0; those without a sliding window."),
        new Field("heads", "KV heads", this.#heads, "From 0."),
      ],
      [this.#send, this.#stop, this.#add, this.#remove, this.#state],
      () => this.#ask(),
    );
    root.append(
      h("p", { class: "muted" }, "Answers the prompt under each policy, greedily, and shows what single decode steps read of it, beside the weights of dense attention."),
      this.#scope,
      h("div", { class: "card explain-question" }, this.#form.element),
      this.#view.element,
    );
    for (let index = 0; index < MIN_POLICIES; index += 1) this.#addPolicy();
    session.addEventListener("change", () => this.#allow());
    session.addEventListener("forgotten", () => this.#view.show(null));
    this.#allow();
  }

  #kinds() {
    const name = newId("explained-form");
    const kind = (isChat, words) =>
      h("label", { class: "choice" }, h("input", { type: "radio", name, checked: isChat === this.#isChat, onchange: () => this.#setKind(isChat) }), words);
    return h(
      "div",
      { class: "row" },
      h("fieldset", { class: "row" }, h("legend", { class: "unseen" }, "Form of the prompt"), kind(true, "Chat"), kind(false, "Completion")),
      ...textFileButton((text) => {
        this.#prompt.value = text;
      }),
    );
  }

  #setKind(isChat) {
    this.#isChat = isChat;
  }

  async #ask() {
    if (this.#stopper !== null) return;
    this.#promptField.name = this.#isChat ? "messages" : "prompt";
    const body = this.#question();
    this.#stopper = new AbortController();
    this.#set("asking");
    try {
      this.#view.show(await askJson("v1/attention:explain", { method: "POST", body, signal: this.#stopper.signal }));
      this.#set("done", "good");
      announce("Explained.");
    } catch (error) {
      if (error.name !== "AbortError") {
        this.#set("failed", "bad");
        throw error;
      }
      this.#set("stopped", "warn");
      announce("Stopped.");
    } finally {
      this.#stopper = null;
      this.#allow();
    }
  }

  #question() {
    const text = this.#prompt.value;
    if (text === "") throw new FieldProblem(this.#promptField.name, "prompt: must be given");
    return {
      ...(this.#isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
      policies: this.#policies.map(({ attention }) => attention),
      decode_steps: this.#decodeSteps.value === "" ? undefined : Number(this.#decodeSteps.value),
      steps: numbersIn(this.#steps, "steps"),
      layers: numbersIn(this.#layers, "layers"),
      heads: numbersIn(this.#heads, "heads"),
    };
  }

  #set(words, kind = "") {
    this.#state.hidden = false;
    this.#state.className = `badge ${kind}`;
    this.#state.textContent = words;
    this.#allow();
  }

  #allow() {
    const isRunning = this.#stopper !== null;
    this.#scope.hidden = session.may("admin");
    this.#send.disabled = isRunning || !session.may("admin");
    this.#stop.disabled = !isRunning;
    this.#add.disabled = isRunning || this.#policies.length === LETTERS.length;
    this.#remove.disabled = isRunning || this.#policies.length === MIN_POLICIES;
    this.#view.element.setAttribute("aria-busy", String(isRunning));
  }

  #addPolicy() {
    const policy = new AskedPolicy(this.#policies.length);
    this.#policies.push(policy);
    this.#form.fields.push(policy);
    this.#grid.append(policy.element);
    this.#allow();
  }

  #removePolicy() {
    const policy = this.#policies.pop();
    this.#form.fields.splice(this.#form.fields.indexOf(policy), 1);
    policy.element.remove();
    this.#allow();
    this.#add.focus();
  }
}

function listInput(placeholder) {
  return h("input", { type: "text", placeholder, autocomplete: "off", spellcheck: "false" });
}

/** The numbers of a list such as "1, 4-6"; undefined if it is empty. */
function numbersIn(input, name) {
  const text = input.value.trim();
  if (text === "") return undefined;
  return text.split(",").flatMap((part) => {
    if (!NUMBERS.test(part.trim())) throw new FieldProblem(name, `${name}: must be numbers with commas between, such as 1, 4-8`);
    const [first, last = first] = part.split("-").map(Number);
    // The service bounds how many there may be, and no list is longer than this.
    if (last < first || last - first > 1024) throw new FieldProblem(name, `${name}: ${part.trim()} is no range`);
    return Array.from({ length: last - first + 1 }, (_, index) => first + index);
  });
}

export const explain = {
  id: "explain",
  title: "Explain",
  mount: (root) => new Explain(root),
};
