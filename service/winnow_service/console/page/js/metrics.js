/** Reading /metrics: Prometheus's text format, and what is asked of two readings of it. */

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** One reading. */
export class Reading {
  /** @param time in seconds. */
  constructor(text, time) {
    this.time = time;
    this.series = new Map();
    for (const line of text.split("\n")) {
      const match = line.startsWith("#") ? null : LINE.exec(line);
      if (match === null) continue;
      const [, name, labels = "", value] = match;
      if (!this.series.has(name)) this.series.set(name, new Map());
      this.series.get(name).set(labels, { labels: read(labels), value: Number(value.replace("Inf", "Infinity")) });
    }
  }

  /** The sum of a metric's series whose labels are `wanted`; null if there is none. */
  sum(name, wanted = {}) {
    const found = [...this.#matching(name, wanted)];
    return found.length ? found.reduce((total, [, each]) => total + each.value, 0) : null;
  }

  /** How much a counter has grown since `before`, which has begun anew with a restarted service. */
  increase(before, name, wanted = {}) {
    let total = 0;
    for (const [key, { value }] of this.#matching(name, wanted)) {
      const known = before.series.get(name)?.get(key)?.value ?? 0;
      total += value >= known ? value - known : value;
    }
    return total;
  }

  /**
   * The quantile `q` of what a histogram has observed since `before`, as Prometheus estimates it; null if nothing was.
   */
  quantile(before, name, q, wanted = {}) {
    const bucket = `${name}_bucket`;
    const counts = this.values(bucket, "le", wanted)
      .map((le) => [Number(le.replace("Inf", "Infinity")), this.increase(before, bucket, { ...wanted, le })])
      .sort(([one], [other]) => one - other);
    const total = counts.at(-1)?.[1] ?? 0;
    if (total === 0) return null;
    const rank = q * total;
    const index = counts.findIndex(([, count]) => count >= rank);
    const [lower, below] = index === 0 ? [0, 0] : counts[index - 1];
    const [upper, upTo] = counts[index];
    return Number.isFinite(upper) ? lower + ((upper - lower) * (rank - below)) / (upTo - below || 1) : lower;
  }

  /** One counter's growth by another's; null if the other has not grown. */
  ratio(before, over, under, wanted = {}) {
    const below = this.increase(before, under, wanted);
    return below > 0 ? this.increase(before, over, wanted) / below : null;
  }

  /** The values of a label, in order. */
  values(name, label, wanted = {}) {
    return [...new Set([...this.#matching(name, wanted)].map(([, each]) => each.labels[label]))].sort();
  }

  *#matching(name, wanted) {
    for (const entry of this.series.get(name) ?? []) {
      if (Object.entries(wanted).every(([label, value]) => entry[1].labels[label] === value)) yield entry;
    }
  }
}

/** A reading of nothing: what a service had counted when it began. */
export const NOTHING = new Reading("", 0);

function read(labels) {
  const unescaped = (text) => text.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one));
  return Object.fromEntries([...labels.matchAll(LABEL)].map(([, name, value]) => [name, unescaped(value)]));
}
