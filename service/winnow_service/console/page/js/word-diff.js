/** Where an answer's words differ from another's. */

import { diffWordsWithSpace } from "../vendor/diff/diff/word.js";
import { h } from "./dom.js";

// Answers that have hardly a word in common take long to compare, and nobody reads that comparison.
const MAX_MS = 300;

/**
 * The words of `text`, with those that are not in `first` marked, and those of `first` that are missing between them.
 *
 * @returns `nodes` to show, and `summary` in words; null if they differ too much to be compared.
 */
export function wordDiff(first, text) {
  const changes = diffWordsWithSpace(first, text, { timeout: MAX_MS });
  if (changes === undefined) return null;
  const words = (kind) =>
    changes.filter((change) => change[kind]).reduce((total, { value }) => total + (value.match(/\S+/g)?.length ?? 0), 0);
  const [added, removed] = [words("added"), words("removed")];
  return {
    nodes: changes.map(({ value, added: isNew, removed: isGone }) =>
      isNew || isGone ? h(isNew ? "ins" : "del", {}, value) : document.createTextNode(value),
    ),
    summary: first === text ? "The same as the first." : `Against the first: ${wordsInWords(added)} added, ${wordsInWords(removed)} missing.`,
  };
}

function wordsInWords(count) {
  return count === 1 ? "1 word" : `${count} words`;
}
