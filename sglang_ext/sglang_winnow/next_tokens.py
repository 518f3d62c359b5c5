"""What passes of SGLang's speculative algorithm ``WINNOW`` hand on."""

from __future__ import annotations

import torch
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor


class NextTokens(SpecInput):
    """What a round hands to the next: the newest token of each row, whose key and value are not written yet.

    Attributes:
        bonus_tokens: int64 [rows].
        future_indices: int64 [rows], request slots; set by SGLang under overlap.
    """

    topk_p = topk_index = hidden_states = None

    def __init__(self, bonus_tokens: Tensor) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.bonus_tokens = bonus_tokens
        self.future_indices: Tensor | None = None

    def filter_batch(self, new_indices: Tensor, **_: object) -> None:
        self.bonus_tokens = self.bonus_tokens[new_indices]
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]

    def merge_batch(self, other: NextTokens) -> None:
        self.bonus_tokens = torch.cat((self.bonus_tokens, other.bonus_tokens))
        if self.future_indices is not None and other.future_indices is not None:
            self.future_indices = torch.cat((self.future_indices, other.future_indices))


class CheckedTokens(SpecInput):
    """The tokens of a pass that checks.

    Attributes:
        positions: int64 [tokens].
        own_tokens: int32 [rows]; how many of a row's tokens, the first ones, are its own: the others fill it up.
        num_tokens_per_req: how many each row has.
        draft_token_num: how many of these lie past the lengths of the rows, as SGLang asks: these count them already.
    """

    draft_token_num = 0

    def __init__(self, positions: Tensor, own_tokens: Tensor, width: int) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.positions = positions
        self.own_tokens = own_tokens
        self.num_tokens_per_req = width
