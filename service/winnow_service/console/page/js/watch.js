/** Asking the service how it is, every two seconds as long as somebody can see the page. */

import { ask } from "./api.js";
import { Reading } from "./metrics.js";
import { session } from "./session.js";

const EVERY_MS = 2000;
const WINDOW_SECONDS = 60;
const MAX_READINGS = 450;

class Watch extends EventTarget {
  /** What /readyz says; null if the service does not answer. */
  ready = null;
  /** Readings of /metrics, the oldest first. */
  readings = [];
  /** Why there are none: this session may not read them, or the service does not answer. */
  problem = null;
  #timer = null;
  #asking = false;

  /** Begin. Dispatches "change" after each look. */
  start() {
    document.addEventListener("visibilitychange", () => this.#look());
    session.addEventListener("change", () => {
      // Another key may read what the last one could not, and the other way round.
      this.problem = null;
      if (!session.may("read")) this.readings = [];
      this.#look();
    });
    this.#look();
  }

  get latest() {
    return this.readings.at(-1) ?? null;
  }

  /** The reading of a minute before the one at `index`, or the oldest; null if that is the only one. */
  before(index) {
    const { time } = this.readings[index];
    const first = this.readings.findIndex((reading) => time - reading.time <= WINDOW_SECONDS);
    return first < index ? this.readings[first] : null;
  }

  async #look() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#asking) return;
    this.#asking = true;
    await Promise.all([this.#askReady(), this.#askMetrics()]);
    this.#asking = false;
    this.dispatchEvent(new Event("change"));
    this.#timer = setTimeout(() => this.#look(), EVERY_MS);
  }

  async #askReady() {
    try {
      this.ready = await readyState();
    } catch {
      this.ready = null;
    }
  }

  async #askMetrics() {
    // Who was refused is not let in by asking again.
    if ([401, 403].includes(this.problem?.status)) return;
    try {
      const text = await (await ask("metrics")).text();
      this.readings.push(new Reading(text, Date.now() / 1000));
      if (this.readings.length > MAX_READINGS) this.readings.shift();
      this.problem = null;
    } catch (error) {
      this.problem = error;
    }
  }
}

/** What /readyz answers, with 200 or with 503. */
async function readyState() {
  const answer = await fetch(new URL("../../readyz", import.meta.url), { cache: "no-store", credentials: "omit" });
  return answer.json();
}

export const watch = new Watch();
