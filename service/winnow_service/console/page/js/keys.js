/** API keys. What a client sends is shown once, when its key is made. */

import { SCOPES, useKey } from "./access.js";
import { ask, askJson, part } from "./api.js";
import { announce, fill, h } from "./dom.js";
import { Field, FieldProblem, Form, confirmed, jsonIn } from "./form.js";
import { moment } from "./format.js";
import { knownPolicies } from "./policies-known.js";
import { session } from "./session.js";

const SCOPE_WORDS = { infer: "send requests", read: "read policies and metrics", admin: "write policies and keys" };
const LIMITS = {
  requests_per_minute: "Requests a minute",
  tokens_per_minute: "Tokens a minute",
  concurrent_requests: "Requests at once",
};
const NO_POLICY = "";
const PRETTY = 2;

class Keys {
  #list = h("ul", { class: "items" });
  #problem = h("div", { class: "problem", hidden: true });
  #secret = h("section", { class: "card secret", hidden: true, tabindex: "-1", "aria-label": "The new key" });
  #name = h("input", { type: "text", autocomplete: "off", maxlength: 100 });
  #scopes = Object.keys(SCOPES).map((scope) => h("input", { type: "checkbox", value: scope }));
  #expires = h("input", { type: "datetime-local" });
  #policy = h("select", {});
  #limits = Object.keys(LIMITS).map((limit) => h("input", { type: "number", min: 1, step: 1, name: limit }));
  #bounds = h("textarea", { rows: 4, spellcheck: "false", class: "mono", placeholder: '{"min_p": 0.8, "max_budget": 4096}' });
  #title = h("h3", {}, "New key");
  #create = h("button", { class: "main", type: "button", onclick: () => this.#edit(null) }, "New key");
  #hint = h("p", { class: "muted" });
  // The key that is changed; null for a new one.
  #changed = null;
  #editor;
  #form;

  constructor(root) {
    const scopes = this.#scopes.map((box) =>
      h("label", { class: "choice" }, box, h("span", {}, h("code", {}, box.value), ` ${SCOPE_WORDS[box.value]}`)),
    );
    this.#form = new Form(
      [
        new Field("name", "Name", this.#name, "For people: several keys may share one."),
        new Field("scopes", "Scopes", h("fieldset", { class: "choices" }, ...scopes), "None includes another."),
        new Field("expires_at", "Expires", this.#expires, "By your clock. Empty: never."),
        new Field("default_policy", "Default policy", this.#policy, "For requests that ask for none."),
        ...this.#limits.map((input) => new Field(`limits.${input.name}`, LIMITS[input.name], input, "Empty: no limit.")),
        new Field("bounds", "Bounds on policies", this.#bounds, "As JSON. Empty: none."),
      ],
      [h("button", { class: "main", type: "submit" }, "Save"), h("button", { type: "button", onclick: () => this.#close() }, "Cancel")],
      () => this.#save(),
    );
    this.#editor = h("section", { class: "card editor", hidden: true }, this.#title, this.#form.element);
    root.append(
      h("div", { class: "row spread" }, this.#hint, this.#create),
      this.#problem,
      this.#secret,
      this.#editor,
      h("div", { class: "card" }, this.#list),
    );
    session.addEventListener("change", () => this.#load());
    session.addEventListener("forgotten", () => this.#forgetSecret());
    knownPolicies.addEventListener("change", () => this.#listPolicies());
    this.#listPolicies();
    this.#load();
  }

  shown() {
    this.#load();
  }

  async #load() {
    this.#create.disabled = !session.may("admin");
    this.#hint.textContent =
      session.mode === "open" ? "The first key shuts this open service, for good." : "What a client sends is shown once, when a key is made.";
    if (!session.may("admin")) this.#editor.hidden = true;
    try {
      const { keys, unreadable } = await askJson("v1/keys");
      this.#showProblem(null);
      fill(
        this.#list,
        keys.length + unreadable.length === 0 && h("li", { class: "muted" }, "There are no keys."),
        ...keys.map((key) => this.#item(key)),
        ...unreadable.map((id) =>
          h("li", { class: "item-head" }, h("code", {}, id), "written by another version of Winnow", this.#revoker({ id, name: id })),
        ),
      );
    } catch (error) {
      fill(this.#list);
      this.#showProblem(error);
    }
  }

  #item(key) {
    const expired = key.expires_at !== null && new Date(key.expires_at) <= new Date();
    const limits = Object.entries(key.limits ?? {}).filter(([, limit]) => limit !== null);
    const bounds = Object.entries(key.bounds ?? {}).filter(([, bound]) => bound !== null && bound !== true);
    return h(
      "li",
      {},
      h(
        "div",
        { class: "item-head" },
        h("h3", {}, key.name),
        ...[...key.scopes].sort().map((scope) => h("span", { class: "badge" }, scope)),
        expired && h("span", { class: "badge bad" }, "expired"),
        session.keyId === key.id && h("span", { class: "badge good" }, "in use here"),
        h(
          "span",
          { class: "item-buttons" },
          h("button", { class: "quiet", onclick: () => this.#edit(key), "aria-label": `Change ${key.name}` }, "Change"),
          this.#revoker(key),
        ),
      ),
      h(
        "p",
        { class: "small muted" },
        h("code", {}, key.id),
        ` · made ${moment(key.created_at)} · `,
        key.expires_at === null ? "never expires" : `${expired ? "expired" : "expires"} ${moment(key.expires_at)}`,
        key.default_policy !== null && ` · default policy ${key.default_policy}`,
      ),
      limits.length > 0 && h("p", { class: "small" }, limits.map(([name, limit]) => `${LIMITS[name] ?? name}: ${limit.toLocaleString("en")}`).join(" · ")),
      bounds.length > 0 && h("p", { class: "mono" }, bounds.map(([name, bound]) => `${name} ${bound}`).join(", ")),
    );
  }

  #revoker(key) {
    return h("button", { class: "quiet danger", onclick: () => this.#revoke(key), "aria-label": `Revoke ${key.name}` }, "Revoke");
  }

  #edit(key) {
    this.#forgetSecret();
    this.#changed = key;
    this.#title.textContent = key === null ? "New key" : `Change ${key.name}`;
    this.#name.value = key?.name ?? "";
    for (const box of this.#scopes) box.checked = (key?.scopes ?? (session.mode === "open" ? Object.keys(SCOPES) : ["infer"])).includes(box.value);
    this.#expires.value = key?.expires_at ? local(key.expires_at) : "";
    this.#listPolicies(key?.default_policy ?? NO_POLICY);
    for (const input of this.#limits) input.value = key?.limits?.[input.name] ?? "";
    this.#bounds.value = key?.bounds ? JSON.stringify(key.bounds, null, PRETTY) : "";
    this.#form.clear();
    this.#editor.hidden = false;
    this.#name.focus();
    this.#editor.scrollIntoView({ block: "nearest" });
  }

  #close() {
    this.#editor.hidden = true;
    this.#create.focus();
  }

  #settings() {
    if (this.#name.value.trim() === "") throw new FieldProblem("name", "name: must be given");
    const scopes = this.#scopes.filter((box) => box.checked).map((box) => box.value);
    if (scopes.length === 0) throw new FieldProblem("scopes", "scopes: must have one at least");
    const limits = this.#limits.filter(({ value }) => value !== "").map(({ name, value }) => [name, Number(value)]);
    return {
      name: this.#name.value.trim(),
      scopes,
      expires_at: this.#expiry(),
      default_policy: this.#policy.value === NO_POLICY ? null : this.#policy.value,
      limits: limits.length ? Object.fromEntries(limits) : null,
      bounds: jsonIn(this.#bounds, "bounds"),
    };
  }

  #expiry() {
    const { value } = this.#expires;
    const known = this.#changed?.expires_at;
    // The control has no seconds: a time that nobody has changed keeps its own.
    if (known && value === local(known)) return known;
    return value === "" ? null : new Date(value).toISOString();
  }

  async #save() {
    const body = this.#settings();
    if (this.#changed !== null) {
      const headers = { "if-match": `"${this.#changed.revision}"` };
      await ask(`v1/keys/${part(this.#changed.id)}`, { method: "PUT", headers, body });
      announce(`${body.name} is changed.`);
      this.#close();
    } else {
      const made = await askJson("v1/keys", { method: "POST", body });
      this.#close();
      this.#showSecret(made);
    }
    await this.#load();
  }

  #showSecret({ name, key, scopes }) {
    const shown = h("input", { type: "text", readonly: true, value: key, class: "mono", "aria-label": `The key ${name}` });
    const copied = h("span", { class: "small", role: "status" });
    fill(
      this.#secret,
      h("h3", {}, `The key ${name}`),
      h("p", {}, "It is shown this once: it cannot be read again. Clients send it as their API key."),
      h(
        "div",
        { class: "row" },
        shown,
        h("button", { class: "main", onclick: () => copy(shown, copied) }, "Copy"),
        scopes.includes("admin") && h("button", { onclick: () => useKey(key) }, "Use it in this tab"),
        h("button", { onclick: () => this.#forgetSecret() }, "I have it"),
        copied,
      ),
    );
    this.#secret.hidden = false;
    this.#secret.focus();
    announce(`The key ${name} is made. It is shown once.`);
  }

  #forgetSecret() {
    fill(this.#secret);
    this.#secret.hidden = true;
  }

  async #revoke(key) {
    if (!(await confirmed(`Revoke the key ${key.name} (${key.id})? Whoever uses it is refused within a second, for good.`, "Revoke"))) return;
    try {
      await ask(`v1/keys/${part(key.id)}`, { method: "DELETE" });
      announce(`${key.name} is revoked.`);
      await this.#load();
    } catch (error) {
      this.#showProblem(error);
    }
    this.#create.focus();
  }

  #showProblem(problem) {
    this.#problem.hidden = problem === null;
    this.#problem.textContent = problem?.message ?? "";
  }

  #listPolicies(wanted = this.#policy.value) {
    const options = knownPolicies.all.map(({ name }) => h("option", { value: name }, name));
    // A key without the scope read lists none: what a key has already stays to be chosen.
    if (wanted !== NO_POLICY && !knownPolicies.all.some(({ name }) => name === wanted)) {
      options.push(h("option", { value: wanted }, wanted));
    }
    fill(this.#policy, h("option", { value: NO_POLICY }, "The model's default"), ...options);
    this.#policy.value = wanted;
  }
}

async function copy(input, said) {
  try {
    await navigator.clipboard.writeText(input.value);
    said.textContent = "Copied.";
  } catch {
    // Browsers have no clipboard for pages without TLS on other addresses than loopback.
    input.select();
    said.textContent = "Press Ctrl+C to copy.";
  }
}

/** A time as an input of local time takes it. */
function local(text) {
  const time = new Date(text);
  return new Date(time.getTime() - time.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}

export const keys = {
  id: "keys",
  title: "Keys",
  mount: (root) => new Keys(root),
};
