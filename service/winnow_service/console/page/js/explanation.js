/** What an explanation says of tokens, layers and heads. */

// Weights differ by powers of ten: colour goes by their logarithm, down to so many of them below the largest.
const DECADES = 4;

/**
 * What each token of a text stands for. Offsets count code points, and a token that shares a character with one before it
 * has no text of its own.
 */
export function textsOf({ text, offsets }) {
  const characters = Array.from(text ?? "");
  let told = 0;
  return (offsets ?? []).map(([begin, end]) => {
    const own = characters.slice(Math.max(begin, told), end).join("");
    told = Math.max(told, end);
    return own;
  });
}

/** The entries of a policy of this step, layer and head; null stands for every layer, or head. */
export function entriesOf({ entries }, { step, layer, head }) {
  return entries.filter((entry) => entry.step === step && (layer ?? entry.layer) === entry.layer && (head ?? entry.head) === entry.head);
}

/**
 * The tokens of the context, with their dense `weight` (the mean of `entries`) and how many of the entries read them.
 *
 * @param texts of the prompt's tokens, and on from there of the answer's.
 * @param entries of one step, at least one.
 */
export function tokensOf(texts, entries) {
  const tokens = entries[0].weights.map((_, position) => ({
    position,
    text: texts[position] ?? "",
    weight: mean(entries.map(({ weights }) => weights[position])),
    readers: 0,
  }));
  for (const { attended } of entries) {
    for (const [begin, end] of attended) {
      for (let position = begin; position < end; position += 1) tokens[position].readers += 1;
    }
  }
  return tokens;
}

/** How strongly a weight is shown, from 0 to 1. */
export function heat(weight, largest) {
  return weight > 0 ? Math.max(0, 1 + Math.log10(weight / largest) / DECADES) : 0;
}

/** The share of dense attention's weights that entries hold. */
export function shareOf(entries) {
  return mean(entries.map(({ share }) => share));
}

/** The share of the context's tokens that entries read. */
export function readOf(entries) {
  return mean(entries.map(({ attended_tokens: attended, weights }) => attended / weights.length));
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}
