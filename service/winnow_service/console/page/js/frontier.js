/** What policies lose, read and take on the served model, by its profile: each point can become a policy with a name. */

import { askJson } from "./api.js";
import { announce, fill, h, newId } from "./dom.js";
import { moment, nats, number, percent } from "./format.js";
import { KL, READ, TIME, TOP1, whyNoTimes } from "./frontier-axes.js";
import { frontOf, groupsOf, kindOf, labelOf, lengthsOf, linesOf, measuredAt, nameFor } from "./profile.js";
import { Scatter, markerOf } from "./scatter.js";
import { session } from "./session.js";
import { table } from "./table.js";

const NO_PROFILE = "no_profile";
// A logarithmic axis has no zero: what is below this is drawn at its foot.
const MIN_KL = 1e-6;

class Frontier {
  #app;
  #root;
  #profile = null;
  #costs = [READ];
  #wanted = { group: null, length: null, cost: "read" };
  #message = h("div", { hidden: true });
  #about = h("p", { class: "muted" });
  #group = h("select", { id: newId("group"), onchange: () => this.#chosen() });
  #length = h("select", { id: newId("length"), onchange: () => this.#chosen() });
  #accuracy = h(
    "select",
    { id: newId("accuracy"), onchange: () => this.#draw() },
    h("option", { value: "kl" }, KL.title),
    h("option", { value: "top1" }, TOP1.title),
  );
  #whyNoTimes = h("p", { class: "muted small why", id: newId("why"), role: "status" });
  #cost = h(
    "select",
    { id: newId("cost"), "aria-describedby": this.#whyNoTimes.id, onchange: () => this.#chosen() },
    h("option", { value: "read" }, READ.title),
    h("option", { value: "time" }, TIME.title),
  );
  #scatter = new Scatter((each) => this.#make(each));
  #legend = h("ul", { class: "legend" });
  #title = h("h3", {});
  #table = h("div", { class: "card" });
  #body;

  constructor(root, app) {
    this.#app = app;
    this.#root = root;
    const choice = (words, control) => h("label", { class: "choice", for: control.id }, words, control);
    this.#body = h(
      "div",
      { class: "frontier", hidden: true },
      h(
        "div",
        { class: "card" },
        h(
          "div",
          { class: "row" },
          choice("Policies", this.#group),
          choice("Prompts of", this.#length),
          choice("Accuracy", this.#accuracy),
          choice("Cost", this.#cost),
        ),
        this.#whyNoTimes,
      ),
      h("figure", { class: "card" }, h("figcaption", {}, this.#title, this.#legend), this.#scatter.element),
      this.#table,
    );
    root.append(this.#about, this.#message, this.#body);
    session.addEventListener("change", () => this.shown());
  }

  /** Ask for the profile: the runtime may have been started with another. */
  async shown() {
    if (this.#root.hidden) return;
    try {
      this.#profile = await askJson("v1/profile");
      this.#message.hidden = true;
    } catch (error) {
      this.#profile = null;
      // That there is none is no fault.
      this.#message.className = error.code === NO_PROFILE ? "card" : "problem";
      this.#message.textContent = error.message;
      this.#message.hidden = false;
    }
    const groups = this.#profile === null ? [] : groupsOf(this.#profile);
    this.#body.hidden = groups.length === 0;
    this.#about.textContent = this.#profile === null ? "" : aboutInWords(this.#profile, groups.length > 0);
    if (groups.length > 0) this.#list(groups);
  }

  #chosen() {
    // Where there is no choice of the cost, the one that was made holds until there is.
    const cost = this.#cost.disabled ? this.#wanted.cost : this.#cost.value;
    this.#wanted = { group: this.#group.value, length: Number(this.#length.value), cost };
    this.#list(groupsOf(this.#profile));
  }

  #list(groups) {
    const group = groups.find(({ title }) => title === this.#wanted.group) ?? groups[0];
    const lengths = lengthsOf(group);
    const length = lengths.includes(this.#wanted.length) ? this.#wanted.length : lengths.at(-1);
    fill(this.#group, ...groups.map(({ title }) => h("option", { value: title }, title)));
    fill(this.#length, ...lengths.map((each) => h("option", { value: each }, `${number(each)} tokens`)));
    this.#group.value = group.title;
    this.#length.value = length;
    this.#draw();
  }

  #draw() {
    const group = groupsOf(this.#profile).find(({ title }) => title === this.#group.value);
    const length = Number(this.#length.value);
    const accuracy = this.#accuracy.value === "kl" ? KL : TOP1;
    const measured = measuredAt(group, length);
    const cost = this.#offerCosts(measured);
    const front = frontOf(measured.filter(({ served }) => served), cost.value, accuracy.loss);
    this.#title.textContent = `${group.title}, prompts of ${number(length)} tokens: ${accuracy.title} against ${cost.name}`;
    this.#plot(measured, front, { accuracy, cost, length });
    this.#tabulate(measured, front, { cost, length });
  }

  /** Let costs be chosen as far as there are figures of them, and return the one that is shown. */
  #offerCosts(measured) {
    const why = whyNoTimes(this.#profile, measured);
    this.#costs = why === "" ? [READ, TIME] : [READ];
    this.#cost.disabled = why !== "";
    this.#cost.value = why === "" ? this.#wanted.cost : "read";
    // A text that is set again is read out again.
    if (this.#whyNoTimes.textContent !== why) this.#whyNoTimes.textContent = why;
    return this.#cost.value === "time" ? TIME : READ;
  }

  #plot(all, front, { accuracy, cost, length }) {
    const measured = all.filter(({ point }) => Number.isFinite(cost.value(point)));
    // A policy keeps its marker whatever it is set against.
    const lines = linesOf(all).map((line) => line.filter((each) => measured.includes(each)));
    const bound = this.#profile.kl;
    const floor = this.#profile.floor.find((point) => point.length === length)?.kl ?? 0;
    const isKl = accuracy === KL;
    const rules = isKl ? [bound, floor].filter((value) => value > MIN_KL) : [];
    const values = measured.flatMap(({ point }) => [accuracy.value(point), accuracy.worse(point)]);
    const range = isKl ? decades([...values, ...rules]) : shares(values);
    const xRange = cost.range(measured.map(({ point }) => cost.value(point)));
    const drawn = (value) => Math.max(value, range[0]);
    this.#scatter.show({
      x: { ...cost, range: xRange, labelled: cost.labelled?.(xRange) },
      y: { label: accuracy.label, range, format: isKl ? nats : percent, isLog: isKl, rules },
      lines: lines.map((line) =>
        line.map((each) => ({
          x: cost.value(each.point),
          y: drawn(accuracy.value(each.point)),
          worse: drawn(accuracy.worse(each.point)),
          words: this.#inWords(each),
          isOnFront: front.includes(each),
          item: this.#mayMake(each) ? each : null,
        })),
      ),
    });
    fill(
      this.#legend,
      ...lines.map(([first], line) => first && h("li", {}, h("span", { class: markerOf(line), "aria-hidden": "true" }), kindOf(first.attention))),
      front.length > 0 && h("li", {}, h("span", { class: "swatch front", "aria-hidden": "true" }), `the front: nothing that is served ${cost.less} and loses less`),
      front.length === 0 && h("li", {}, `no front: nothing that is served ${cost.less} than dense attention`),
      cost === TIME && h("li", {}, h("span", { class: "swatch upright", "aria-hidden": "true" }), "dense attention's time"),
      isKl && h("li", {}, h("span", { class: "swatch dashed", "aria-hidden": "true" }), rulesInWords(bound, floor)),
    );
  }

  #tabulate(measured, front, { cost, length }) {
    const byCost = [...measured].sort((one, other) => sortable(cost.value(one.point)) - sortable(cost.value(other.point)));
    const rows = byCost.map((each) => {
      const { attention, served, point } = each;
      const label = labelOf(attention);
      const badges = [
        front.includes(each) && h("span", { class: "badge good" }, "front"),
        !served && h("span", { class: "badge warn" }, "not served here"),
      ].filter(Boolean);
      const make = h("button", { class: "quiet", onclick: () => this.#make(each), "aria-label": `Make a policy of ${label}` }, "Make a policy");
      return [
        [label, ...badges.flatMap((badge) => [" ", badge])],
        this.#mayMake(each) ? make : "",
        ...this.#costs.map(({ cell }) => withAside(...cell(point))),
        [nats(point.kl), h("span", { class: "muted" }, ` to ${nats(point.kl_high)}`)],
        [percent(point.top1), h("span", { class: "muted" }, ` from ${percent(point.top1_low)}`)],
        percent(point.true_share ?? NaN),
        point.kl_high <= this.#profile.kl ? "yes" : "no",
      ];
    });
    const heads = ["Policy", "Use", ...this.#costs.map(({ head }) => head), "KL, nats", "Equal first tokens", "True share", `KL within ${nats(this.#profile.kl)}`];
    fill(this.#table, table(`${this.#group.value}, prompts of ${number(length)} tokens`, heads, rows, "Nothing was measured."));
  }

  #mayMake({ served }) {
    return served && session.may("admin");
  }

  #inWords({ attention, point }) {
    return `${labelOf(attention)}: ${this.#costsInWords(point)}, ${KL.words(point)}, ${TOP1.words(point)}`;
  }

  #costsInWords(point) {
    return this.#costs.filter(({ value }) => Number.isFinite(value(point))).map(({ words }) => words(point)).join(", ");
  }

  #make(each) {
    const { attention, point } = each;
    const measured = `${this.#costsInWords(point)}, ${KL.words(point)}, at ${number(point.length)} tokens`;
    this.#app.makePolicy({ name: nameFor(attention), description: `By the profile of ${this.#profile.model}: ${measured}.`, attention });
    announce(`${labelOf(attention)} is filled in as a new policy.`);
  }
}

function aboutInWords({ model, device, dtype, date, data }, isUseful) {
  const measured = `${model} on ${device} in ${dtype}, ${moment(date)}. Text: ${data.source}; ${number(data.prompts)} prompts of each length, ${number(data.tokens)} tokens predicted behind each.`;
  const rest = isUseful
    ? "A point is the mean over prompts. The line from it goes to the worse end of the 95 % interval, which the server chooses by."
    : "The profile has no policies.";
  return `${measured} ${rest}`;
}

/** What was not measured comes last. */
function sortable(cost) {
  return Number.isFinite(cost) ? cost : Number.MAX_VALUE;
}

function withAside(figure, aside) {
  return [figure, aside && h("span", { class: "muted" }, aside)].filter(Boolean);
}

function rulesInWords(bound, floor) {
  return `KL ${nats(bound)}, which “auto” keeps` + (floor > MIN_KL ? `; ${nats(floor)}, dense attention beside itself` : "");
}

/** The whole powers of ten around what is positive of `values`. */
function decades(values) {
  const positive = values.filter((value) => value > MIN_KL);
  const [low, high] = positive.length > 0 ? [Math.min(...positive), Math.max(...positive)] : [MIN_KL, 1];
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  return [10 ** from, 10 ** Math.max(to, from + 1)];
}

function shares(values) {
  const lowest = Math.min(...values);
  return [Math.max(0, lowest - (1 - lowest) * 0.1 - 0.005), 1 + (1 - lowest) * 0.03];
}

export const frontier = {
  id: "frontier",
  title: "Frontier",
  mount: (root, app) => new Frontier(root, app),
};
