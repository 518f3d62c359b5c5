/** Numbers and policies as people read them. */

const NONE = "–";

/** A share from 0 to 1 as a percentage. */
export function percent(share) {
  if (!Number.isFinite(share)) return NONE;
  const value = share * 100;
  if (value === 0) return "0 %";
  return `${value.toFixed(value < 9.95 ? 1 : 0)} %`;
}

/** A time. */
export function seconds(value) {
  if (!Number.isFinite(value)) return NONE;
  if (value === 0) return "0 ms";
  if (value < 0.0995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${(value * 1000).toFixed(0)} ms`;
  const digits = value < 9.995 ? 2 : 1;
  return `${value.toFixed(value < 99.95 ? digits : 0)} s`;
}

/** A number with three figures, or all of its whole ones. */
export function number(value) {
  if (!Number.isFinite(value)) return NONE;
  if (Number.isInteger(value) || Math.abs(value) >= 99.5) return Math.round(value).toLocaleString("en");
  return Number(value.toPrecision(3)).toLocaleString("en");
}

/** How many times as much something is. */
export function times(ratio) {
  return Number.isFinite(ratio) ? `${number(ratio)}×` : NONE;
}

/** A KL, however small. */
export function nats(value) {
  return Number.isFinite(value) ? value.toLocaleString("en", { maximumSignificantDigits: 2, useGrouping: false }) : NONE;
}

/** When something was written, by the reader's clock. */
export function moment(text) {
  const time = new Date(text);
  return Number.isNaN(time.getTime()) ? NONE : time.toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
}

/** A policy in a line, such as "decode lowbit_top_k, budget 512 · prefill dense". */
export function policyInWords(attention) {
  const parts = Object.entries(attention).map(([name, value]) => {
    if (typeof value !== "object" || value === null) return `${name} ${value}`;
    const { policy, ...fields } = value;
    const named = Object.entries(fields).map(([field, set]) => `${field} ${Array.isArray(set) ? set.join(" ") : set}`);
    return [[name, policy].filter(Boolean).join(" "), ...named].join(", ");
  });
  return parts.length ? parts.join(" · ") : "decode dense · prefill dense";
}
