"""Grammars along drafts: which tokens may follow each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from torch import Tensor

from sglang_winnow.sglang_versions.sampling import set_grammar_mask

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_BITS: Final = 32


class GrammarWalk:
    """One row's grammar, walked along its drafts and back.

    Only for backends that take tokens back, and whose masks have a bit for each token: xgrammar and llguidance.
    """

    def __init__(self, grammar: BaseGrammarObject, vocab_size: int, drafts: int) -> None:
        """
        Args:
            grammar: has accepted the answer up to its newest token, which does not end it.
            vocab_size: of the model.
            drafts: how many the row drafts at most.
        """
        self._grammar = grammar
        self._masks = grammar.allocate_vocab_mask(vocab_size=vocab_size, batch_size=drafts + 1, device="cpu")
        self._accepted = 0
        self._ended = False
        grammar.fill_vocab_mask(self._masks, 0)

    def masks(self, drafts: Sequence[int]) -> Tensor:
        """Return the masks of the newest token and ``drafts``, int32 [drafts + 1, words].

        Behind a draft that the grammar does not allow, or ends with, everything is allowed: nothing there stands.

        Args:
            drafts: begin with those of the last call.
        """
        for draft in drafts[self._accepted :]:
            self._ended = self._ended or not self._allows(draft)
            if self._ended:
                break
            self._grammar.accept_token(draft)
            self._accepted += 1
            self._ended = self._grammar.is_terminated()
            if not self._ended:
                self._grammar.fill_vocab_mask(self._masks, self._accepted)
        return self._masks[: len(drafts) + 1]

    def go_back(self) -> None:
        """Leave the grammar as it was found."""
        if self._accepted:
            self._grammar.rollback(self._accepted)
            self._accepted = 0

    def _allows(self, token: int) -> bool:
        word = int(self._masks[self._accepted, token // _BITS])
        return bool(word >> token % _BITS & 1)


def begin_walk(grammar: BaseGrammarObject | None, vocab_size: int, drafts: int) -> GrammarWalk | None:
    """Return the walk of a row's grammar; None for a row without, or whose answer has ended."""
    if grammar is None or grammar.finished or grammar.is_terminated():
        return None
    return GrammarWalk(grammar, vocab_size, drafts)


def allow(info: SamplingBatchInfo, grammar: BaseGrammarObject, masks: Mapping[int, Tensor], count: int) -> None:
    """Let sampling parameters allow only what the masks of some of their rows do.

    Args:
        info: SGLang's sampling parameters, of ``count`` tokens a row.
        grammar: any of the batch.
        masks: by place among the rows, int32 [``count`` or fewer, words]; any token may follow all others.
        count: tokens of each row.
    """
    mask = grammar.allocate_vocab_mask(vocab_size=info.vocab_size, batch_size=len(info), device="cpu")
    for place, own in masks.items():
        mask[place * count : place * count + len(own)] = own
    set_grammar_mask(info, grammar, grammar.move_vocab_mask(mask, info.device))
