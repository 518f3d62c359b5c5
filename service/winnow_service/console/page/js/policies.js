/** Policies by name, and which of them requests get that ask for none. */

import { ask, askJson, part } from "./api.js";
import { announce, fill, h } from "./dom.js";
import { Field, FieldProblem, Form, confirmed, jsonIn } from "./form.js";
import { moment, policyInWords } from "./format.js";
import { knownPolicies } from "./policies-known.js";
import { session } from "./session.js";

const EXAMPLE = { decode: { policy: "lowbit_top_k", budget: 1024 } };
const PRETTY = 2;

class Policies {
  #list = h("ul", { class: "items" });
  #problem = h("div", { class: "problem", hidden: true });
  #name = h("input", { type: "text", autocomplete: "off", spellcheck: "false", maxlength: 64 });
  #description = h("input", { type: "text", autocomplete: "off", maxlength: 500 });
  #attention = h("textarea", { rows: 10, spellcheck: "false", class: "mono" });
  #checked = h("div", { class: "small", role: "status" });
  #title = h("h3", {}, "New policy");
  #create = h("button", { class: "main", type: "button", onclick: () => this.#edit(null) }, "New policy");
  // The policy that is changed; null for a new one.
  #changed = null;
  #editor;
  #form;
  #app;

  constructor(root, app) {
    this.#app = app;
    this.#form = new Form(
      [
        new Field("name", "Name", this.#name, "Lower-case letters, digits, dots, hyphens and underscores."),
        new Field("description", "Description", this.#description),
        new Field("attention", "Policy", this.#attention, "As a request's field attention. The service fills in defaults."),
      ],
      [
        h("button", { class: "main", type: "submit" }, "Save"),
        h("button", { type: "button", onclick: () => this.#form.attempt(() => this.#check()) }, "Check"),
        h("button", { type: "button", onclick: () => this.#close() }, "Cancel"),
      ],
      () => this.#save(),
    );
    this.#editor = h("section", { class: "card editor", hidden: true }, this.#title, this.#form.element, this.#checked);
    root.append(
      h("div", { class: "row spread" }, h("p", { class: "muted" }, "Presets are there from the start and stay as they are."), this.#create),
      this.#problem,
      this.#editor,
      h("div", { class: "card" }, this.#list),
      new Defaults().element,
    );
    knownPolicies.addEventListener("change", () => this.#show());
    this.#show();
  }

  shown() {
    knownPolicies.load();
  }

  /** Fill in the form of a new policy. */
  make({ name, ...model }) {
    this.#edit(null, model);
    this.#name.value = name;
  }

  #show() {
    const { problem, all } = knownPolicies;
    this.#problem.hidden = problem === null;
    this.#problem.textContent = problem?.message ?? "";
    this.#create.disabled = !session.may("admin");
    this.#create.title = session.may("admin") ? "" : "This needs a key with the scope 'admin'.";
    fill(this.#list, ...all.map((policy) => this.#item(policy)));
  }

  #item(policy) {
    const { name, preset, description, attention, warnings, revision } = policy;
    const button = (words, act, kind = "quiet") =>
      h("button", { class: kind, onclick: act, "aria-label": `${words} ${name}` }, words);
    return h(
      "li",
      {},
      h(
        "div",
        { class: "item-head" },
        h("h3", {}, name),
        h("span", { class: "badge" }, preset ? "preset" : `revision ${revision}`),
        h(
          "span",
          { class: "item-buttons" },
          session.may("infer") && button("Try", () => this.#app.tryPolicy(name)),
          session.may("admin") && !preset && button("Change", () => this.#edit(policy)),
          session.may("admin") && !preset && button("Delete", () => this.#delete(policy), "quiet danger"),
          session.may("admin") && preset && button("Copy", () => this.#edit(null, policy)),
        ),
      ),
      description !== "" && h("p", {}, description),
      h("p", { class: "mono" }, policyInWords(attention)),
      ...warnings.map((warning) => h("p", { class: "small warning" }, warning)),
      !preset && h("p", { class: "small muted" }, `Written ${moment(policy.updated_at)} by ${policy.updated_by}`),
    );
  }

  #edit(policy, model = policy) {
    this.#changed = policy;
    this.#title.textContent = policy === null ? "New policy" : `Change ${policy.name}`;
    this.#name.value = policy?.name ?? "";
    this.#name.readOnly = policy !== null;
    this.#description.value = model?.description ?? "";
    this.#attention.value = JSON.stringify(model?.attention ?? EXAMPLE, null, PRETTY);
    fill(this.#checked);
    this.#form.clear();
    this.#editor.hidden = false;
    (policy === null ? this.#name : this.#attention).focus();
    this.#editor.scrollIntoView({ block: "nearest" });
  }

  #close() {
    this.#editor.hidden = true;
    this.#create.focus();
  }

  async #save() {
    fill(this.#checked);
    const name = this.#name.value.trim();
    if (name === "") throw new FieldProblem("name", "name: must be given");
    await ask(`v1/policies/${part(name)}`, {
      method: "PUT",
      // Nobody overwrites what he has not seen.
      headers: this.#changed === null ? { "if-none-match": "*" } : { "if-match": etag(this.#changed) },
      body: { attention: jsonIn(this.#attention, "attention"), description: this.#description.value },
    }).catch(atTheName);
    announce(`${name} is saved.`);
    this.#close();
    await knownPolicies.load();
  }

  async #check() {
    const attention = jsonIn(this.#attention, "attention");
    const answer = await askJson("v1/policies:validate", { method: "POST", body: { attention } });
    fill(
      this.#checked,
      h("p", {}, answer.checked_against_model ? "The served model takes it as:" : "Valid, as:"),
      h("pre", {}, policyInWords(answer.attention)),
      ...answer.warnings.map((warning) => h("p", { class: "warning" }, warning)),
      !answer.checked_against_model && h("p", { class: "muted" }, "The runtime does not say what it serves: it may still refuse."),
    );
  }

  async #delete(policy) {
    if (!(await confirmed(`Delete the policy ${policy.name}? Requests that name it are refused from then on.`, "Delete"))) return;
    try {
      await ask(`v1/policies/${part(policy.name)}`, { method: "DELETE", headers: { "if-match": etag(policy) } });
      announce(`${policy.name} is deleted.`);
      await knownPolicies.load();
    } catch (error) {
      this.#problem.hidden = false;
      this.#problem.textContent = error.message;
    }
    this.#create.focus();
  }
}

/** The policies of requests that ask for none, by model. */
class Defaults {
  #list = h("ul", { class: "items" });
  #model = h("input", { type: "text", value: "*", autocomplete: "off", spellcheck: "false" });
  #policy = h("select", {});
  #form;

  constructor() {
    this.#form = new Form(
      [
        new Field("model", "Model", this.#model, "As requests name it; * for every other."),
        new Field("policy", "Policy", this.#policy),
      ],
      [h("button", { type: "submit" }, "Set")],
      () => this.#set(),
    );
    this.#form.element.classList.add("inline");
    this.element = h(
      "section",
      { class: "card" },
      h("h3", {}, "Defaults"),
      h("p", { class: "muted small" }, "What a request gets that asks for no policy, and whose key has no default of its own."),
      this.#list,
      this.#form.element,
    );
    knownPolicies.addEventListener("change", () => this.#load());
    this.#load();
  }

  async #load() {
    fill(this.#policy, ...knownPolicies.all.map(({ name }) => h("option", { value: name }, name)));
    this.#form.element.hidden = !session.may("admin");
    const { defaults } = await askJson("v1/policy-defaults").catch(() => ({ defaults: [] }));
    fill(
      this.#list,
      ...defaults.map((each) =>
        h(
          "li",
          { class: "item-head" },
          h("span", {}, h("code", {}, each.model), " gets ", h("strong", {}, each.policy)),
          h(
            "span",
            { class: "item-buttons" },
            session.may("admin") &&
              h(
                "button",
                { class: "quiet danger", onclick: () => this.#form.attempt(() => this.#remove(each)), "aria-label": `Remove the default of ${each.model}` },
                "Remove",
              ),
          ),
        ),
      ),
    );
    this.#known = defaults;
  }

  #known = [];

  async #set() {
    const model = this.#model.value.trim();
    if (model === "") throw new FieldProblem("model", "model: must be given");
    const known = this.#known.find((each) => each.model === model);
    await ask(`v1/policy-defaults/${part(model)}`, {
      method: "PUT",
      headers: known ? { "if-match": etag(known) } : { "if-none-match": "*" },
      body: { policy: this.#policy.value },
    });
    announce(`Requests to ${model} get ${this.#policy.value}.`);
    await this.#load();
  }

  async #remove(known) {
    await ask(`v1/policy-defaults/${part(known.model)}`, { method: "DELETE", headers: { "if-match": etag(known) } });
    await this.#load();
  }
}

function etag({ revision }) {
  return `"${revision}"`;
}

// That there is one already, or that it is a preset, is said of its name.
function atTheName(problem) {
  if (["preset", "precondition_failed", "precondition_required"].includes(problem.code)) problem.param = "name";
  throw problem;
}

export const policies = {
  id: "policies",
  title: "Policies",
  mount: (root, app) => new Policies(root, app),
};
