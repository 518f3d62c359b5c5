/** The tokens of a heat strip as a table, a page at a time: for those who do not see colours, or want the figures. */

import { fill, h, newId } from "./dom.js";
import { number } from "./format.js";
import { table } from "./table.js";

const PAGE = 12;
const DIGITS = 6;
const ORDERS = { weight: "the heaviest first", position: "as they stand in the text" };

export class TokenTable {
  element = h("div", { class: "token-table" });
  #title;
  #tokens;
  #heads;
  #order = h("select", { id: newId("order") }, ...Object.entries(ORDERS).map(([value, words]) => h("option", { value }, words)));
  #page = 0;
  #rows = h("div");
  #where = h("span", { class: "small muted", role: "status" });
  #back;
  #on;

  /**
   * @param tokens as `tokensOf` returns them.
   * @param heads how many heads of layers could have read each.
   */
  constructor(title, tokens, heads) {
    this.#title = title;
    this.#tokens = tokens;
    this.#heads = heads;
    this.#order.addEventListener("change", () => this.#turn(0));
    const turn = (words, by) => h("button", { onclick: () => this.#turn(this.#page + by), "aria-label": `${words} tokens, ${title}` }, words);
    this.#back = turn("Previous", -1);
    this.#on = turn("Next", 1);
    fill(
      this.element,
      this.#rows,
      h("div", { class: "row" }, h("label", { class: "choice small", for: this.#order.id }, "Order", this.#order), this.#back, this.#on, this.#where),
    );
    this.#turn(0);
  }

  #turn(page) {
    this.#page = page;
    const ordered = this.#order.value === "weight" ? [...this.#tokens].sort((one, other) => other.weight - one.weight) : this.#tokens;
    const first = page * PAGE;
    const shown = ordered.slice(first, first + PAGE);
    const rows = shown.map(({ position, text, weight, readers }) => [
      [`${position} `, h("code", {}, JSON.stringify(text))],
      weight.toFixed(DIGITS),
      `${readers} of ${this.#heads}`,
    ]);
    fill(this.#rows, table(this.#title, ["Token", "Dense weight", "Read by"], rows, "There are no tokens."));
    this.#where.textContent = `${number(first + 1)} to ${number(first + shown.length)} of ${number(ordered.length)}`;
    this.#back.disabled = page === 0;
    this.#on.disabled = first + PAGE >= ordered.length;
  }
}
