/** One prompt under two to four policies, side by side. */

import { Column } from "./column.js";
import { announce, h, newId } from "./dom.js";
import { textFileButton } from "./text-file.js";

const LETTERS = ["A", "B", "C", "D"];
const MIN_COLUMNS = 2;
// What is sent first, to begin with: dense attention, and what a reader is asked to take.
const FIRST_POLICIES = ["exact", "balanced", "fast", "long-prompt"];
const EXAMPLE = "Explain in three sentences why decoding with a long context is slow.";

class Playground {
  #columns = [];
  #form = null;
  #kind = "chat";
  #stopper = null;
  #drawn = false;
  #grid = h("div", { class: "columns" });
  #prompt = h("textarea", { rows: 6, id: newId("prompt") });
  #maxTokens = h("input", { type: "number", min: 1, step: 1, value: 128, id: newId("max") });
  #temperature = h("input", { type: "number", min: 0, max: 2, step: 0.1, value: 0, id: newId("temperature") });
  #order = h(
    "select",
    { id: newId("order") },
    h("option", { value: "together" }, "all at once"),
    h("option", { value: "in turn" }, "one after another"),
  );
  #marks = h("input", { type: "checkbox", checked: true, onchange: () => this.#draw() });
  #send = h("button", { class: "main", type: "submit" }, "Send");
  #stop = h("button", { type: "button", disabled: true, onclick: () => this.#stopper?.abort() }, "Stop");
  #add = h("button", { type: "button", onclick: () => this.#addColumn() }, "Add a column");
  #size = h("span", { class: "small muted" });

  constructor(root) {
    this.#prompt.value = EXAMPLE;
    this.#prompt.addEventListener("input", () => this.#measure());
    this.#prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#form.requestSubmit();
    });
    root.append(this.#controls(), this.#grid);
    for (let index = 0; index < MIN_COLUMNS; index += 1) this.#addColumn();
    this.#measure();
  }

  /** Use the policy of that name in the last column. */
  choose(name) {
    this.#columns.at(-1).choice.choose(name);
  }

  #controls() {
    const kind = (value, words) =>
      h(
        "label",
        { class: "choice" },
        h("input", {
          type: "radio",
          name: "form",
          value,
          checked: value === this.#kind,
          onchange: () => {
            this.#kind = value;
          },
        }),
        words,
      );
    this.#form = h(
      "form",
      { class: "card prompt", novalidate: true },
      h(
        "div",
        { class: "field" },
        h("div", { class: "row spread" }, h("label", { for: this.#prompt.id }, "Prompt"), this.#size),
        this.#prompt,
      ),
      h(
        "div",
        { class: "row" },
        h("fieldset", { class: "row" }, h("legend", { class: "unseen" }, "Form of the request"), kind("chat", "Chat"), kind("text", "Completion")),
        h("label", { class: "choice", for: this.#maxTokens.id }, "Max tokens", this.#maxTokens),
        h("label", { class: "choice", for: this.#temperature.id }, "Temperature", this.#temperature),
        h("label", { class: "choice", for: this.#order.id }, "Send", this.#order),
        ...textFileButton((text) => {
          this.#prompt.value = text;
          this.#measure();
        }),
      ),
      h(
        "div",
        { class: "row" },
        this.#send,
        this.#stop,
        this.#add,
        h("label", { class: "choice" }, this.#marks, "Mark what differs from A"),
        h("span", { class: "small muted" }, "Ctrl+Enter sends. Columns sent at once share the server: their times are of that."),
      ),
    );
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#stopper === null) this.#run();
    });
    return this.#form;
  }

  async #run() {
    this.#stopper = new AbortController();
    this.#running(true);
    this.#columns.forEach((column) => column.clear());
    announce("Sent.");
    const { signal } = this.#stopper;
    const asked = {
      form: this.#kind,
      prompt: this.#prompt.value,
      maxTokens: numberIn(this.#maxTokens),
      temperature: numberIn(this.#temperature),
    };
    const runs = this.#columns.map((column) => () => column.run(asked, () => this.#drawSoon(), signal));
    if (this.#order.value === "together") {
      await Promise.all(runs.map((run) => run()));
    } else {
      for (const run of runs) {
        if (!signal.aborted) await run();
      }
    }
    this.#stopper = null;
    this.#running(false);
    this.#draw();
  }

  #running(is) {
    this.#send.disabled = is;
    this.#stop.disabled = !is;
    this.#limitColumns();
  }

  // A fast stream has more events than a screen has frames.
  #drawSoon() {
    if (this.#drawn) return;
    this.#drawn = true;
    requestAnimationFrame(() => {
      this.#drawn = false;
      this.#draw();
    });
  }

  #draw() {
    this.#columns.forEach((column, index) => column.show(index === 0 ? null : this.#columns[0], this.#marks.checked));
  }

  #addColumn() {
    const index = this.#columns.length;
    const column = new Column(LETTERS[index], FIRST_POLICIES[index], () => this.#removeColumn(column));
    this.#columns.push(column);
    this.#grid.append(column.element);
    this.#limitColumns();
  }

  #removeColumn(column) {
    this.#columns = this.#columns.filter((each) => each !== column);
    column.element.remove();
    this.#limitColumns();
    this.#add.focus();
  }

  #limitColumns() {
    const running = this.#stopper !== null;
    const last = this.#columns.length - 1;
    this.#add.disabled = running || this.#columns.length === LETTERS.length;
    // Only the last goes, so that letters stay in order.
    this.#columns.forEach((column, index) => column.allowRemoval(!running && index === last && index >= MIN_COLUMNS));
  }

  #measure() {
    this.#size.textContent = `${this.#prompt.value.length.toLocaleString("en")} characters`;
  }
}

// What is left empty, the service decides.
function numberIn(input) {
  return input.value === "" ? undefined : Number(input.value);
}

export const playground = {
  id: "playground",
  title: "Playground",
  mount: (root) => new Playground(root),
};
