/** The figures that the frontier sets against each other: accuracies and costs of a point of the profile. */

import { nats, percent, seconds, times } from "./format.js";

// What labels are multiples of, by how many times the low end of an axis goes into its high end: few enough for a phone.
const MANTISSAS = [
  [2, [1, 1.2, 1.5, 2, 3, 4, 5, 6, 7, 8, 9]],
  [10, [1, 1.5, 2, 3, 5, 7]],
  [200, [1, 2, 5]],
  [Infinity, [1]],
];

/** Accuracies. `worse` is the end of the interval that the server chooses by, `loss` is less the better it is. */
export const KL = {
  title: "KL",
  label: "KL to dense attention, nats",
  value: ({ kl }) => kl,
  worse: ({ kl_high: high }) => high,
  loss: ({ kl }) => kl,
  words: ({ kl, kl_high: high }) => `KL ${nats(kl)}, at most ${nats(high)}`,
};
export const TOP1 = {
  title: "Equal first tokens",
  label: "Tokens that dense attention ranks first, too",
  value: ({ top1 }) => top1,
  worse: ({ top1_low: low }) => low,
  loss: ({ top1 }) => -top1,
  words: ({ top1, top1_low: low }) => `equal first tokens ${percent(top1)}, at least ${percent(low)}`,
};

/** Costs. `value` is relative to dense attention, and NaN where it was not measured. */
export const READ = {
  title: "KV read",
  name: "KV read",
  head: "KV read",
  label: "KV read, of what dense attention reads",
  less: "reads less",
  value: ({ kv_read_ratio: ratio }) => ratio,
  words: ({ kv_read_ratio: ratio }) => `KV read ${percent(ratio)}`,
  cell: ({ kv_read_ratio: ratio }) => [percent(ratio), ""],
  format: percent,
  isLog: false,
  range: (values) => [0, Math.max(1, ...values) * 1.04],
  rules: [],
};
export const TIME = {
  title: "Attention time per token",
  name: "attention time per token",
  head: "Attention time",
  label: "Attention time per token, dense attention = 1×",
  less: "takes less time",
  value: ({ time }) => time?.ratio ?? NaN,
  words: ({ time }) => `attention time ${times(time?.ratio)} dense attention's`,
  cell: ({ time }) => [times(time?.ratio), time ? `, ${seconds(time.seconds)}` : ""],
  format: times,
  // Some policies take half the time of dense attention where others take many times it.
  isLog: true,
  range: (values) => [Math.min(1, ...values) / 1.25, Math.max(1, ...values) * 1.25],
  labelled: logarithmicLabels,
  rules: [1],
};

/** The values of a logarithmic axis that are labelled. Of a narrow range, uPlot itself labels powers of ten alone. */
function logarithmicLabels([low, high]) {
  const [, mantissas] = MANTISSAS.find(([max]) => high / low <= max);
  const powers = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) powers.push(10 ** power);
  return powers.flatMap((power) => mantissas.map((mantissa) => mantissa * power)).filter((value) => value >= low && value <= high);
}

/**
 * Why no times can be shown of what was measured of a group at a length; "" if they can.
 *
 * Times of another machine say nothing of this one: the server does not go by them, either.
 */
export function whyNoTimes(profile, measured) {
  const hasTime = ({ time }) => time !== null;
  if (!profile.curves.some(({ points }) => points.some(hasTime))) {
    return "KV read is the only cost: the profile has no times. “winnow calibrate profile” measures them on a CPU.";
  }
  if (!profile.times_are_of_this_machine) {
    return "KV read is the only cost: the profile's times are of another machine, or of another number of threads.";
  }
  if (measured.some(({ point }) => hasTime(point))) return "";
  return "KV read is the only cost: the profile has no times of these policies at this length.";
}
