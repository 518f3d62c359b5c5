/** Whose requests these are: nobody's while the service is open, else those of a key, kept as long as the tab. */

const STORED = "winnow.key";

class Session extends EventTarget {
  key = sessionStorage.getItem(STORED);
  /** "unknown" before the service has answered; "open" needs no key; "key" has one; "locked" needs another. */
  mode = "unknown";
  /** Why it is locked. */
  problem = null;
  /** What a route of each scope answered: true, or the problem. */
  scopes = {};
  /** The name by which requests ask for the served model; null if it is not known. */
  model = null;

  /** Keep `key` for requests from now on; null to forget the one in use. Then dispatches "forgotten". */
  keep(key) {
    this.key = key;
    if (key === null) {
      sessionStorage.removeItem(STORED);
      this.dispatchEvent(new Event("forgotten"));
    } else {
      sessionStorage.setItem(STORED, key);
    }
  }

  /** Note what the service lets this session do. Dispatches "change". */
  learn(facts) {
    Object.assign(this, facts);
    this.dispatchEvent(new Event("change"));
  }

  /** The service has refused the key, or that there is none. */
  refused(problem) {
    if (this.mode === "open" || this.mode === "key") {
      this.learn({ mode: "locked", problem, scopes: { infer: problem, read: problem, admin: problem } });
    }
  }

  /** Whether requests of `scope` are let in; whatever else may come of them. */
  may(scope) {
    const answer = this.scopes[scope];
    return answer === true || (answer !== undefined && ![401, 403].includes(answer.status));
  }

  /** The part of the key that names it and is no secret. */
  get keyId() {
    return /^winnow_([0-9a-f]{16})_/.exec(this.key ?? "")?.[1] ?? null;
  }
}

export const session = new Session();
