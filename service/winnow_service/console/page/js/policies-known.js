/** The policies that can be asked for by name, as the service last listed them. */

import { askJson } from "./api.js";
import { session } from "./session.js";

class KnownPolicies extends EventTarget {
  /** Presets first. */
  all = [];
  /** Why they are not known. */
  problem = null;

  /** List them anew. Dispatches "change". */
  async load() {
    try {
      this.all = (await askJson("v1/policies")).policies;
      this.problem = null;
    } catch (error) {
      this.all = [];
      this.problem = error;
    }
    this.dispatchEvent(new Event("change"));
  }
}

export const knownPolicies = new KnownPolicies();

session.addEventListener("change", () => knownPolicies.load());
