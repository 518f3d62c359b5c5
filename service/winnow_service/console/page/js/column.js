/** One column of the playground: a policy, and what came of the prompt with it. */

import { costs, notes } from "./costs.js";
import { announce, fill, h, newId } from "./dom.js";
import { generate } from "./generation.js";
import { PolicyChoice } from "./policy-choice.js";
import { session } from "./session.js";
import { wordDiff } from "./word-diff.js";

export class Column {
  /** The Generation that is shown; null before there is one. */
  generation = null;
  #state = "idle";
  #title;
  #badge = h("span", { class: "badge", hidden: true });
  #costs = h("div");
  #answer = h("div", { class: "answer", tabindex: "0", role: "region" });
  #summary = h("p", { class: "small muted" });
  #notes = h("div", { class: "notes" });
  #problem = h("div", { class: "problem", hidden: true });
  #remove;
  #compared = null;

  /**
   * @param letter that the column is called by.
   * @param policy the name of the policy that is chosen at first.
   * @param remove called to take the column away.
   */
  constructor(letter, policy, remove) {
    const titleId = newId("column");
    this.choice = new PolicyChoice(`Policy of column ${letter}`, policy);
    this.#title = h("h3", { id: titleId }, letter);
    this.#answer.setAttribute("aria-label", `Answer of column ${letter}`);
    this.#remove = h("button", { class: "quiet", onclick: remove, "aria-label": `Remove column ${letter}` }, "Remove");
    this.letter = letter;
    this.element = h(
      "section",
      { class: "column card", "aria-labelledby": titleId },
      h(
        "div",
        { class: "column-head" },
        this.#title,
        this.choice.element,
        this.#remove,
      ),
      h("div", { class: "row spread" }, this.#badge, this.#summary),
      this.#problem,
      this.#costs,
      this.#notes,
      this.#answer,
    );
  }

  /**
   * Send the prompt. Whatever goes wrong is shown here, and ends this column alone.
   *
   * @param changed called when something has come.
   */
  async run(asked, changed, signal) {
    this.#set("waiting", "waiting");
    let attention;
    try {
      attention = this.choice.attention;
    } catch {
      this.#set("failed", "not sent", "bad");
      return;
    }
    try {
      const request = { ...asked, model: session.model ?? undefined, attention };
      this.generation = await generate(request, (generation) => this.#follow(generation, changed), signal);
      this.#set("done", endInWords(this.generation.finishReason), "good");
    } catch (error) {
      if (error.name === "AbortError") {
        this.#set("stopped", "stopped", "warn");
      } else {
        this.#set("failed", "failed", "bad");
        this.#showProblem(error);
      }
    }
    announce(`Column ${this.letter}, ${this.choice.title}: ${this.#badge.textContent}.`);
    changed();
  }

  /** Forget the last answer. */
  clear() {
    this.generation = null;
    this.#showProblem(null);
    this.#state = "idle";
    this.#badge.hidden = true;
    this.show(null, false);
  }

  /** Let the column be taken away, or not. */
  allowRemoval(may) {
    this.#remove.hidden = !may;
  }

  /** Whether there is an answer to compare others with. */
  get isComparable() {
    return this.#state === "done";
  }

  /** Show the answer, beside that of the column `first` unless it is null. */
  show(first, marks) {
    const { generation } = this;
    if (generation === null) {
      fill(this.#costs);
      fill(this.#answer);
      fill(this.#notes);
      this.#summary.textContent = "";
      return;
    }
    fill(this.#costs, costs(generation, first?.generation ?? null));
    fill(this.#notes, ...notes(generation.attention).map((note) => h("p", { class: "small" }, note)));
    const comparable = first !== null && first.isComparable && this.isComparable;
    const difference = comparable ? this.#difference(first.generation) : null;
    fill(this.#answer, ...(marks && difference ? difference.nodes : [generation.text]));
    this.#summary.textContent = comparable ? (difference?.summary ?? "Too different from the first to compare.") : "";
  }

  // Drawing is frequent as long as another column streams, and comparing is not cheap.
  #difference(first) {
    const { generation } = this;
    if (this.#compared?.first !== first || this.#compared.generation !== generation) {
      this.#compared = { first, generation, difference: wordDiff(first.text, generation.text) };
    }
    return this.#compared.difference;
  }

  #follow(generation, changed) {
    this.generation = generation;
    if (this.#state === "waiting" && generation.ttft !== null) this.#set("streaming", "streaming");
    changed();
  }

  #set(state, words, kind = "") {
    this.#state = state;
    this.#badge.hidden = false;
    this.#badge.className = `badge ${kind}`;
    this.#badge.textContent = words;
    this.element.setAttribute("aria-busy", String(state === "waiting" || state === "streaming"));
  }

  #showProblem(problem) {
    this.#problem.hidden = problem === null;
    if (problem === null) return;
    const facts = [problem.status && `status ${problem.status}`, problem.code, problem.param].filter(Boolean);
    fill(this.#problem, h("p", {}, problem.message), facts.length > 0 && h("p", { class: "small mono" }, facts.join(" · ")));
  }
}

function endInWords(reason) {
  return reason === "length" ? "done: max tokens" : "done";
}
