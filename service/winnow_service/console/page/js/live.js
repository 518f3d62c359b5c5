/** What this server does, from its /metrics, as long as somebody looks. */

import { Chart } from "./chart.js";
import { fill, h } from "./dom.js";
import { number, percent, seconds } from "./format.js";
import { NOTHING } from "./metrics.js";
import { table } from "./table.js";
import { watch } from "./watch.js";

const TTFT = "winnow_time_to_first_token_seconds";
const TPOT = "winnow_time_per_output_token_seconds";
const CONTEXT = "winnow_context_tokens_total";
const ATTENDED = "winnow_attended_tokens_total";
const READ = "winnow_kv_read_tokens_total";
const NO_ANSWERS = "No answer has been reported yet.";
const QUANTILES = { p50: 0.5, p95: 0.95 };

class Live {
  #charts = {
    requests: new Chart("Requests", number),
    tokens: new Chart("Tokens a second", number),
    ttft: new Chart("Time to first token", seconds),
    tpot: new Chart("Time per output token", seconds),
    attended: new Chart("Attended in decode, by policy", percent),
    read: new Chart("KV read in decode, by policy", percent),
  };
  #tables = h("div", { class: "card tables" });
  #problem = h("div", { class: "problem", hidden: true });
  #figures;
  #root;
  #known = new WeakMap();

  constructor(root) {
    this.#root = root;
    this.#figures = h("div", { class: "charts" }, ...Object.values(this.#charts).map((chart) => chart.element));
    root.append(
      h("p", { class: "muted" }, "Rates and quantiles are of the last minute. Tokens count when their answer has ended. Nothing is asked while the page is hidden."),
      this.#problem,
      this.#figures,
      this.#tables,
    );
    watch.addEventListener("change", () => this.shown());
  }

  shown() {
    if (this.#root.hidden) return;
    const { latest, problem } = watch;
    this.#problem.hidden = problem === null;
    this.#problem.textContent = problem?.message ?? "";
    this.#figures.hidden = latest === null;
    this.#tables.hidden = latest === null;
    if (latest === null) return;
    this.#draw();
    fill(this.#tables, attentionTable(latest), latencyTable(latest));
  }

  #draw() {
    const { readings } = watch;
    const times = readings.map(({ time }) => time);
    const rows = readings.map((reading, index) => this.#derived(reading, index));
    const names = (figure) => Object.keys(rows.at(-1)[figure]);
    for (const [figure, chart] of Object.entries(this.#charts)) {
      const series = names(figure).map((name) => [name, rows.map((row) => row[figure][name] ?? null)]);
      chart.show(times, Object.fromEntries(series));
    }
  }

  // What a reading came to against the one a minute before does not change, and takes a while to work out.
  #derived(reading, index) {
    if (!this.#known.has(reading)) this.#known.set(reading, derive(reading, watch.before(index)));
    return this.#known.get(reading);
  }
}

/** The figures of each chart, by the names of their series; null where there is none. */
function derive(reading, before) {
  const over = (value) => (before === null ? null : value());
  const rate = (name) => over(() => reading.increase(before, name) / (reading.time - before.time));
  const quantiles = (name) =>
    Object.fromEntries(Object.entries(QUANTILES).map(([words, q]) => [words, over(() => reading.quantile(before, name, q))]));
  const policies = reading.values(CONTEXT, "policy", { phase: "decode" });
  const shares = (part) =>
    Object.fromEntries(
      policies.map((policy) => [policy, over(() => reading.ratio(before, part, CONTEXT, { phase: "decode", policy }))]),
    );
  return {
    requests: { running: reading.sum("winnow_generations_in_flight") ?? 0, queued: reading.sum("winnow_queued_requests") },
    tokens: { output: rate("winnow_output_tokens_total"), prompt: rate("winnow_prompt_tokens_total") },
    ttft: quantiles(TTFT),
    tpot: quantiles(TPOT),
    attended: shares(ATTENDED),
    read: shares(READ),
  };
}

function attentionTable(reading) {
  const rows = ["decode", "prefill"].flatMap((phase) =>
    reading.values(CONTEXT, "policy", { phase }).map((policy) => {
      const which = { phase, policy };
      const ofDecode = (value) => (phase === "decode" ? value({ policy }) : null);
      return [
        [policy, h("span", { class: "muted" }, ` ${phase}`)],
        number(reading.sum("winnow_attended_ratio_count", which)),
        percent(reading.ratio(NOTHING, ATTENDED, CONTEXT, which)),
        percent(reading.ratio(NOTHING, READ, CONTEXT, which)),
        percent(ofDecode((only) => mean(reading, "winnow_audited_share", only))),
        number(ofDecode((only) => mean(reading, "winnow_tokens_per_verification", only))),
      ];
    }),
  );
  const heads = ["Policy", "Answers", "Attended", "KV read", "True share, audited", "Tokens a check"];
  return table("Attention by policy, since the service began", heads, rows, NO_ANSWERS);
}

function latencyTable(reading) {
  const rows = reading.values("winnow_generations_total", "decode_policy").map((policy) => {
    const which = { decode_policy: policy };
    return [
      policy,
      number(reading.sum("winnow_generations_total", { ...which, outcome: "finished" }) ?? 0),
      seconds(reading.quantile(NOTHING, TTFT, QUANTILES.p50, which)),
      seconds(reading.quantile(NOTHING, TTFT, QUANTILES.p95, which)),
      seconds(reading.quantile(NOTHING, TPOT, QUANTILES.p50, which)),
      seconds(reading.quantile(NOTHING, TPOT, QUANTILES.p95, which)),
    ];
  });
  const heads = ["Asked for", "Finished", "TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95"];
  return table("Streams by the policy asked for, since the service began", heads, rows, NO_ANSWERS);
}

function mean(reading, histogram, which) {
  return reading.ratio(NOTHING, `${histogram}_sum`, `${histogram}_count`, which);
}

export const live = {
  id: "live",
  title: "Live",
  mount: (root) => new Live(root),
};
