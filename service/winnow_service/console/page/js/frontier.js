/** What policies lose and read on the served model, by its profile: each point can become a policy with a name. */

import { askJson } from "./api.js";
import { announce, fill, h, newId } from "./dom.js";
import { moment, nats, number, percent } from "./format.js";
import { frontOf, groupsOf, kindOf, labelOf, lengthsOf, linesOf, measuredAt, nameFor } from "./profile.js";
import { Scatter, markerOf } from "./scatter.js";
import { session } from "./session.js";
import { table } from "./table.js";

const NO_PROFILE = "no_profile";
// A logarithmic axis has no zero: what is below this is drawn at its foot.
const MIN_KL = 1e-6;

const KL = {
  title: "KL",
  label: "KL to dense attention, nats",
  value: ({ kl }) => kl,
  worse: ({ kl_high: high }) => high,
  loss: ({ kl }) => kl,
  words: ({ kl, kl_high: high }) => `KL ${nats(kl)}, at most ${nats(high)}`,
};
const TOP1 = {
  title: "Equal first tokens",
  label: "Tokens that dense attention ranks first, too",
  value: ({ top1 }) => top1,
  worse: ({ top1_low: low }) => low,
  loss: ({ top1 }) => -top1,
  words: ({ top1, top1_low: low }) => `equal first tokens ${percent(top1)}, at least ${percent(low)}`,
};

class Frontier {
  #app;
  #root;
  #profile = null;
  #wanted = { group: null, length: null };
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
      h("div", { class: "card row" }, choice("Policies", this.#group), choice("Prompts of", this.#length), choice("Accuracy", this.#accuracy)),
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
    this.#wanted = { group: this.#group.value, length: Number(this.#length.value) };
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
    const front = frontOf(measured.filter(({ served }) => served), accuracy.loss);
    this.#title.textContent = `${group.title}, prompts of ${number(length)} tokens: ${accuracy.title} against KV read`;
    this.#plot(measured, front, accuracy, length);
    this.#tabulate(measured, front, length);
  }

  #plot(measured, front, accuracy, length) {
    const lines = linesOf(measured);
    const bound = this.#profile.kl;
    const floor = this.#profile.floor.find((point) => point.length === length)?.kl ?? 0;
    const isKl = accuracy === KL;
    const rules = isKl ? [bound, floor].filter((value) => value > MIN_KL) : [];
    const values = measured.flatMap(({ point }) => [accuracy.value(point), accuracy.worse(point)]);
    const range = isKl ? decades([...values, ...rules]) : shares(values);
    const drawn = (value) => Math.max(value, range[0]);
    this.#scatter.show({
      x: { label: "KV read, of what dense attention reads", range: [0, Math.max(1, ...measured.map(({ point }) => point.kv_read_ratio)) * 1.04], format: percent },
      y: { label: accuracy.label, range, format: isKl ? nats : percent, isLog: isKl },
      rules,
      lines: lines.map((line) =>
        line.map((each) => ({
          x: each.point.kv_read_ratio,
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
      ...lines.map(([{ attention }], line) => h("li", {}, h("span", { class: markerOf(line), "aria-hidden": "true" }), kindOf(attention))),
      h("li", {}, h("span", { class: "swatch front", "aria-hidden": "true" }), "the front: nothing that is served reads less and loses less"),
      isKl && h("li", {}, h("span", { class: "swatch dashed", "aria-hidden": "true" }), rulesInWords(bound, floor)),
    );
  }

  #tabulate(measured, front, length) {
    const rows = measured.map((each) => {
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
        percent(point.kv_read_ratio),
        [nats(point.kl), h("span", { class: "muted" }, ` to ${nats(point.kl_high)}`)],
        [percent(point.top1), h("span", { class: "muted" }, ` from ${percent(point.top1_low)}`)],
        percent(point.true_share ?? NaN),
        point.kl_high <= this.#profile.kl ? "yes" : "no",
      ];
    });
    const heads = ["Policy", "Use", "KV read", "KL, nats", "Equal first tokens", "True share", `KL within ${nats(this.#profile.kl)}`];
    fill(this.#table, table(`${this.#group.value}, prompts of ${number(length)} tokens`, heads, rows, "Nothing was measured."));
  }

  #mayMake({ served }) {
    return served && session.may("admin");
  }

  #inWords({ attention, point }) {
    return `${labelOf(attention)}: KV read ${percent(point.kv_read_ratio)}, ${KL.words(point)}, ${TOP1.words(point)}`;
  }

  #make(each) {
    const { attention, point } = each;
    const measured = `KV read ${percent(point.kv_read_ratio)}, ${KL.words(point)}, at ${number(point.length)} tokens`;
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
