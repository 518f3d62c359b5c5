/** An explanation: for each policy the prompt as a heat strip, the share of every layer, and the tokens as a table. */

import { fill, h, newId } from "./dom.js";
import { entriesOf, heat, readOf, shareOf, textsOf, tokensOf } from "./explanation.js";
import { number, percent, policyInWords } from "./format.js";
import { labelOf } from "./profile.js";
import { table } from "./table.js";
import { TokenTable } from "./token-table.js";

const LETTERS = ["A", "B", "C", "D"];
const ALL = "all";

export class ExplanationView {
  #explanation = null;
  #prompt = [];
  #step = h("select", { id: newId("step"), onchange: () => this.#draw() });
  #layer = h("select", { id: newId("layer"), onchange: () => this.#draw() });
  #head = h("select", { id: newId("head"), onchange: () => this.#draw() });
  #policies = h("div", { class: "columns explained" });

  constructor() {
    const choice = (words, control) => h("label", { class: "choice", for: control.id }, words, control);
    const sample = (kind, words) => {
      const token = h("span", { class: kind }, words);
      token.style.setProperty("--heat", 1);
      return token;
    };
    this.element = h(
      "div",
      { class: "explanation", hidden: true },
      h(
        "div",
        { class: "card explanation-choices" },
        h("div", { class: "row" }, choice("Step", this.#step), choice("Layer", this.#layer), choice("KV head", this.#head)),
        h(
          "p",
          { class: "small strip-key" },
          "The stronger the colour, the more weight dense attention gives a token, in powers of ten. ",
          sample("token read", "Read"),
          " by the policy · ",
          sample("token missed", "read by no head"),
          " that is shown · ",
          h("span", { class: "token generated" }, "generated"),
        ),
      ),
      this.#policies,
    );
  }

  /** Show an explanation, as the API answers it; null for none. */
  show(explanation) {
    this.#explanation = explanation;
    this.element.hidden = explanation === null;
    if (explanation === null) {
      fill(this.#policies);
      return;
    }
    this.#prompt = textsOf(explanation.prompt);
    const { steps, layers, heads, policies } = explanation;
    const explained = steps.filter((step) => policies.some(({ entries }) => entries.some((entry) => entry.step === step)));
    list(this.#step, explained, null);
    this.#step.value = explained.at(-1) ?? "";
    list(this.#layer, layers, "mean of all");
    list(this.#head, heads, "mean of all");
    this.#draw();
  }

  #draw() {
    const chosen = { step: Number(this.#step.value), layer: numberOf(this.#layer), head: numberOf(this.#head) };
    fill(this.#policies, ...this.#explanation.policies.map((policy, index) => this.#policy(policy, LETTERS[index], chosen)));
  }

  #policy(policy, letter, chosen) {
    const name = `${letter}, ${policy.policy ?? labelOf(policy.attention)}`;
    const titleId = newId("explained");
    const section = h(
      "section",
      { class: "column card", "aria-labelledby": titleId },
      h("h3", { id: titleId }, name),
      h("p", { class: "small mono" }, policyInWords(policy.attention)),
      ...policy.warnings.map((warning) => h("p", { class: "small warning" }, warning)),
      policy.missing_steps.length > 0 &&
        h("p", { class: "small muted" }, `Not explained: step ${policy.missing_steps.join(", ")}. The answer took ${stepsInWords(policy.decode_steps)}.`),
    );
    const entries = entriesOf(policy, chosen);
    if (entries.length === 0) {
      section.append(h("p", {}, `Step ${chosen.step || "1"} is not explained.`));
      return section;
    }
    const tokens = tokensOf([...this.#prompt, ...textsOf(policy.output)], entries);
    const isDense = entries.every(({ dense }) => dense);
    section.append(
      h(
        "p",
        {},
        `Read ${percent(readOf(entries))} of ${number(tokens.length)} tokens, which hold ${percent(shareOf(entries))} of dense attention's weights.`,
        isDense && " This step was dense: it read everything.",
      ),
      this.#explanation.prompt.offsets === null
        ? h("p", { class: "muted" }, "The server's tokenizer does not tell where tokens are in the text.")
        : strip(`Heat strip of ${name}`, tokens, this.#prompt.length, entries.length),
      ...(policy.output.text === null ? [] : [h("h3", {}, "Answer"), h("pre", {}, policy.output.text)]),
      this.#layers(policy, name, chosen),
      new TokenTable(`Tokens of ${name}`, tokens, entries.length).element,
    );
    return section;
  }

  #layers(policy, name, { head }) {
    const steps = this.#explanation.steps.filter((step) => policy.entries.some((entry) => entry.step === step));
    const rows = this.#explanation.layers.map((layer) => [
      number(layer),
      ...steps.flatMap((step) => {
        const entries = entriesOf(policy, { step, layer, head });
        if (entries.length === 0) return ["–", "–"];
        const bar = h("span", { class: "bar", "aria-hidden": "true" });
        bar.style.setProperty("--share", shareOf(entries));
        return [[percent(shareOf(entries)), bar], percent(readOf(entries))];
      }),
    ]);
    const heads = ["Layer", ...steps.flatMap((step) => [`Share, step ${step}`, "Tokens read"])];
    return table(`Share per layer of ${name}`, heads, rows, "No layer is explained.");
  }
}

function strip(label, tokens, promptTokens, heads) {
  const largest = tokens.reduce((most, { weight }) => Math.max(most, weight), 0);
  return h(
    "div",
    { class: "strip", tabindex: "0", role: "region", "aria-label": label },
    ...tokens.map(({ position, text, weight, readers }) => {
      const kinds = ["token", readers > 0 ? "read" : "missed", position >= promptTokens && "generated"].filter(Boolean);
      const title = `token ${position}: weight ${weight.toFixed(6)}, read by ${readers} of ${heads}`;
      const token = h("span", { class: kinds.join(" "), title }, text);
      token.style.setProperty("--heat", heat(weight, largest).toFixed(3));
      return token;
    }),
  );
}

function stepsInWords(steps) {
  return steps === 1 ? "1 decode step" : `${number(steps)} decode steps`;
}

function list(select, numbers, all) {
  fill(select, all !== null && h("option", { value: ALL }, all), ...numbers.map((each) => h("option", { value: each }, String(each))));
}

function numberOf(select) {
  return select.value === ALL ? null : Number(select.value);
}
