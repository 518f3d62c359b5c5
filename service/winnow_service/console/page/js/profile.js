/** What a profile says of policies: which of them can be compared, how they are called, and which are on the front. */

// Parameters that say how much a policy reads: policies that differ in these alone are one line.
const SWEPT = ["p", "budget", "budget_ratio", "window"];
const PHASES = ["decode", "prefill"];

/**
 * The policies that can be set beside each other: those that read less in the same phase, after the same prefill.
 *
 * @returns groups with a `title` and `curves`; those of dense prefills first.
 */
export function groupsOf({ curves }) {
  const groups = new Map();
  for (const curve of curves) {
    const title = groupTitle(curve.attention);
    if (!groups.has(title)) groups.set(title, { title, curves: [] });
    groups.get(title).curves.push(curve);
  }
  return [...groups.values()];
}

function groupTitle(attention) {
  if (phaseOf(attention) === "prefill") return "Prefill";
  const { policy } = attention.prefill;
  return policy === "dense" ? "Decode" : `Decode after ${policy}`;
}

/** The phase whose reads a point counts. */
function phaseOf({ decode }) {
  return decode.policy === "dense" ? "prefill" : "decode";
}

/** The lengths at which policies of a group were measured. */
export function lengthsOf({ curves }) {
  const lengths = new Set(curves.flatMap(({ points }) => points.map(({ length }) => length)));
  return [...lengths].sort((one, other) => one - other);
}

/** What was measured of a group at a length: `{ attention, served, point }`, the one that reads least first. */
export function measuredAt({ curves }, length) {
  const found = curves.map(({ attention, served, points }) => ({ attention, served, point: points.find((each) => each.length === length) }));
  return found.filter(({ point }) => point).sort((one, other) => one.point.kv_read_ratio - other.point.kv_read_ratio);
}

/**
 * Those that cost less than dense attention, which loses nothing, and that no other of them beats: none loses less and
 * costs no more, or costs less and loses no more.
 *
 * @param cost of a point, relative to dense attention; NaN where it is not known.
 * @param loss of a point.
 */
export function frontOf(measured, cost, loss) {
  const beats = (one, other) => {
    const [spent, lost] = [cost(one.point) - cost(other.point), loss(one.point) - loss(other.point)];
    return spent <= 0 && lost <= 0 && (spent < 0 || lost < 0);
  };
  const cheaper = measured.filter(({ point }) => cost(point) < 1);
  return cheaper.filter((each) => !cheaper.some((other) => beats(other, each)));
}

/** The kind of a policy, that its line is called by. */
export function kindOf(attention) {
  const { policy } = attention[phaseOf(attention)];
  return attention.early_termination ? `${policy}, early termination` : policy;
}

/** A policy among those of its group: its kind, and how much it reads. */
export function labelOf(attention) {
  const parameters = attention[phaseOf(attention)];
  const swept = SWEPT.filter((name) => parameters[name] !== undefined).map((name) => `${name} ${parameters[name]}`);
  return [kindOf(attention), ...swept].join(", ");
}

/** A name under which a policy can be stored. */
export function nameFor(attention) {
  const parts = PHASES.flatMap((phase) => {
    const { policy, ...parameters } = attention[phase];
    return policy === "dense" ? [] : [policy, ...SWEPT.map((name) => parameters[name])];
  });
  return [...parts, attention.early_termination && "early"].filter((part) => part !== undefined && part !== false && part !== null).join("-");
}

/** Policies of a group in lines: alike but for how much they read. */
export function linesOf(measured) {
  const lines = new Map();
  for (const each of measured) {
    const alike = JSON.stringify(each.attention, (name, value) => (SWEPT.includes(name) ? undefined : value));
    if (!lines.has(alike)) lines.set(alike, []);
    lines.get(alike).push(each);
  }
  return [...lines.values()];
}
