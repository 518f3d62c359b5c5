"""What SGLang's ``SamplingBatchInfo``, a batch's sampling parameters, has of each row, and of some rows only.

Each release has more of them: each is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch import Tensor

from sglang_winnow.sglang_versions.releases import GRAMMAR_MASKS, runs

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

OF_ROWS: Final = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed", "logit_bias")
"""Tensors with a value for each row."""

OF_SOME: Final = (
    "acc_additive_penalties",
    "acc_scaling_penalties",
    "grammar_mask",
    "grammars",
    "penalizer_orchestrator",
    "return_sampling_masks",
    "return_sampling_support_logprobs",
    "sampling_mask_batch_indices",
    "sampling_mask_top_ks",
    "sampling_support_logprobs_capture_indices",
    "vocab_mask",
)
"""What only some rows ask for: None where nobody does."""

OF_BATCH: Final = frozenset(
    {
        "apply_mask_func",
        "device",
        "is_all_greedy",
        "is_any_greedy",
        "max_top_k",
        "need_min_p_sampling",
        "need_top_k_sampling",
        "need_top_p_sampling",
        "npu_top_k_top_p_eligible",
        "sampling_mask_max_top_k",
        "vocab_size",
        # Read where ``has_custom_logit_processor``.
        "custom_logit_processor",
        "custom_params",
        "has_custom_logit_processor",
        # SGLang's checks of itself.
        "bootstrap_room_ids_int",
        "rids_int",
        # Refused for every request.
        "has_watermark_candidates",
        "watermark_candidates_host",
        "watermark_context_windows",
        "watermark_enabled",
        "watermark_keys",
    }
)
"""Right for every part of a batch as it is for the whole."""


def ask_for_tokens_alone(info: SamplingBatchInfo) -> None:
    """Remove what only some rows of a batch ask for, besides a token."""
    for name in OF_SOME:
        if hasattr(info, name):
            setattr(info, name, None)
    info.has_custom_logit_processor = False


def set_grammar_mask(info: SamplingBatchInfo, grammar: BaseGrammarObject, mask: Tensor) -> None:
    """Let only the tokens be drawn that a mask on the device allows; ``grammar`` is any one of the batch."""
    if not runs(GRAMMAR_MASKS):
        info.vocab_mask, info.apply_mask_func = mask, grammar.apply_vocab_mask
        return
    from sglang.srt.constrained.base_grammar_backend import GrammarMask  # noqa: PLC0415

    info.grammar_mask = GrammarMask(grammar, mask)
