/** The strip below the head: what this server does now, whatever panel is shown. */

import { fill, h } from "./dom.js";
import { number, percent, seconds } from "./format.js";
import { NOTHING } from "./metrics.js";
import { watch } from "./watch.js";

/** Keep `status` (whether it serves, and what) and `figures` as the service last was. */
export function installFigures(status, figures, session) {
  const draw = () => {
    fill(status, ...inWords(session));
    const shown = figuresNow();
    figures.hidden = shown === null;
    if (shown !== null) fill(figures, h("dl", {}, ...shown.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value)))));
  };
  watch.addEventListener("change", draw);
  session.addEventListener("change", draw);
}

function inWords({ model }) {
  const { ready } = watch;
  if (ready === null) return [h("span", { class: "badge bad" }, "not reached"), "The service does not answer."];
  const badge = ready.ready ? (ready.degraded ? ["warn", "degraded"] : ["good", "ready"]) : ["bad", "not ready"];
  const quiet = ready.ready && !ready.degraded;
  const why = ready.degraded ? ready.store.reason : ready.reason;
  return [h("span", { class: `badge ${badge[0]}` }, badge[1]), model && h("strong", {}, model), !quiet && h("span", {}, why)];
}

function figuresNow() {
  const { latest } = watch;
  if (latest === null) return null;
  const before = watch.before(watch.readings.length - 1) ?? latest;
  const elapsed = latest.time - before.time;
  const rate = (name) => (elapsed > 0 ? latest.increase(before, name) / elapsed : null);
  const decode = { phase: "decode" };
  // A quiet minute says nothing of an answer's time: then it is that of all answers so far.
  const quantile = (name, q) => latest.quantile(before, name, q) ?? latest.quantile(NOTHING, name, q);
  return [
    ["Running", number(latest.sum("winnow_generations_in_flight") ?? 0)],
    ["Queued", number(latest.sum("winnow_queued_requests"))],
    ["Tokens/s", number(rate("winnow_output_tokens_total"))],
    ["TTFT p50", seconds(quantile("winnow_time_to_first_token_seconds", 0.5))],
    ["TPOT p50", seconds(quantile("winnow_time_per_output_token_seconds", 0.5))],
    ["KV read", percent(latest.ratio(NOTHING, "winnow_kv_read_tokens_total", "winnow_context_tokens_total", decode))],
    ["Attended", percent(latest.ratio(NOTHING, "winnow_attended_tokens_total", "winnow_context_tokens_total", decode))],
  ];
}
