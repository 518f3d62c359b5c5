"""Rows that do not draft in a round: they decode a token in every pass in which others draft, or beside their check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_winnow.token_penalties import is_penalized

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


def decoded_tokens(
    batch: ScheduleBatch, limits: Sequence[int], lengths: Sequence[int], context_length: int
) -> list[int]:
    """Return how many tokens each row decodes in a round, one in each of its first passes; 0 where a row drafts.

    Rows whose sampling depends on the tokens before, and those that ask for more than tokens, decode one.

    Args:
        batch: before its round.
        limits: how many tokens each row drafts.
        lengths: of the rows, tokens whose keys are written.
        context_length: of the model.
    """
    passes = max(1, *limits)
    if batch.return_hidden_states or batch.sampling_info.has_custom_logit_processor:
        passes = 1
    counts = []
    for req, limit, length in zip(batch.reqs, limits, lengths, strict=True):
        wanted = req.sampling_params.max_new_tokens - len(req.output_ids)
        most = passes if asks_for_tokens_alone(req) else 1
        counts.append(0 if limit else max(1, min(most, wanted, context_length - length)))
    return counts


def asks_for_tokens_alone(req: Req) -> bool:
    """Return whether a request's tokens depend on nothing that the host learns of those before, nor tell more."""
    # Of SGLang's releases only the later ones have masks of what could be drawn.
    masks = getattr(req, "return_sampling_mask", False)
    return not (req.return_logprob or req.grammar is not None or masks or is_penalized(req))


def joins_check(req: Req) -> bool:
    """Return whether a request that does not draft can decode its next token in the pass that checks those of others.

    That pass attends densely, and explains nothing.
    """
    state = req.winnow_state
    return state.policy.answers_densely and state.explanation is None and asks_for_tokens_alone(req)
