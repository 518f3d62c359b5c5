/** What an answer says of its time and its attention, as a list of terms and figures. */

import { h } from "./dom.js";
import { nats, number, percent, seconds } from "./format.js";

/**
 * The figures of a generation.
 *
 * @param first that of the first column, which the times are set beside; null if this is the first.
 */
export function costs(generation, first) {
  const { attention, usage } = generation;
  const { decode = {}, prefill = {}, verify, audit } = attention ?? {};
  return h(
    "dl",
    { class: "costs" },
    figure("TTFT", seconds(generation.ttft), beside(generation.ttft, first?.ttft)),
    figure("TPOT", seconds(generation.tpot), beside(generation.tpot, first?.tpot)),
    figure("Tokens", number(usage?.completion_tokens), usage && `of a prompt of ${number(usage.prompt_tokens)}`),
    attention && ratio("Attended", decode.attended_ratio, "of the context's tokens"),
    attention && ratio("KV read", decode.kv_read_ratio, "of dense attention's bytes"),
    attention && figure("Decode", decode.policy, stepsInWords(decode)),
    prefill.policy && prefill.policy !== "dense" && ratio("Prefill KV read", prefill.kv_read_ratio, prefill.policy),
    prefill.cached_tokens > 0 && figure("Cached", number(prefill.cached_tokens), "tokens of the prompt"),
    verify && figure("Tokens a check", number(verify.tokens_per_verification), drafts(verify)),
    audit && figure("True share", percent(audit.true_share), promise(audit)),
    audit && figure("Output error", percent(audit.output_error), `in ${number(audit.steps)} audited steps`),
    Number.isFinite(audit?.next_token_kl) && figure("Next-token KL", nats(audit.next_token_kl), `nats; top-1 ${percent(audit.top1)}`),
  );
}

/** What a reader of the figures must know: warnings, and a policy that did not act. */
export function notes(attention) {
  const { decode = {}, warnings = [] } = attention ?? {};
  const idle = decode.policy !== undefined && decode.policy !== "dense" && decode.steps > 0 && decode.dense_steps === decode.steps;
  return [
    idle && `${decode.policy} did not act: all steps ran dense, because the context is shorter than it acts from.`,
    ...(Array.isArray(warnings) ? warnings : []),
  ].filter((note) => typeof note === "string");
}

function figure(term, value, more = null) {
  return h("div", {}, h("dt", {}, term), h("dd", {}, value ?? "–", more && h("span", { class: "more" }, more)));
}

function ratio(term, share, more) {
  const bar = h("span", { class: "bar", "aria-hidden": "true" });
  bar.style.setProperty("--share", Math.min(1, Number.isFinite(share) ? share : 0));
  return h("div", {}, h("dt", {}, term), h("dd", {}, percent(share), h("span", { class: "more" }, more), bar));
}

function beside(value, first) {
  return value > 0 && first > 0 ? `${(value / first).toFixed(2)} × the first` : null;
}

function stepsInWords({ steps, dense_steps: dense }) {
  if (!Number.isFinite(steps)) return null;
  return dense > 0 ? `${number(steps)} steps, ${number(dense)} of them dense` : `${number(steps)} steps`;
}

function drafts({ accepted, drafted }) {
  return `${number(accepted)} of ${number(drafted)} drafted tokens stood`;
}

function promise({ p, reached }) {
  if (!Number.isFinite(p)) return "of the attention, audited";
  return `of the attention; p ${p}` + (Number.isFinite(reached) ? ` reached by ${percent(reached)}` : "");
}
