"""Which rows of a decode batch are audited, and in which steps."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_winnow.audit_share import audited_share, promised_share
from sglang_winnow.request_policy import reads_everything
from sglang_winnow.request_state import RequestState
from winnow_kernels.decode.audit import AuditedRow, is_audited


def keep_time(states: Sequence[RequestState | None], lengths: Sequence[int]) -> None:
    """Have requests that begin to decode audited in the steps in which the others of their batch are.

    What an audited step costs once, whichever number of its rows are audited, is then paid once for all of them: its
    graph, and the dense pass that the next token's divergence takes. Shares may differ: of two requests whose shares
    are a hundredth and a tenth, the first is audited in steps in which the second is.

    Args:
        states: of the batch's requests; all of them.
        lengths: of their contexts, in tokens.
    """
    steps = [
        (length - state.prompt_length, state)
        for state, length in zip(states, lengths, strict=True)
        if state is not None and audited_share(state.policy)
    ]
    if not any(step == 1 for step, _ in steps):
        return
    step_of_longest, longest = max(steps, key=lambda each: each[0])
    now = step_of_longest + longest.audit_offset
    for step, state in steps:
        if step == 1:
            state.audit_offset = now - step


def audited_rows(states: Sequence[RequestState | None], lengths: Sequence[int], page_size: int) -> list[AuditedRow]:
    """Return the rows of a decode batch that are audited: of sparse steps alone.

    Args:
        states: of the requests.
        lengths: of their contexts, in tokens.
        page_size: tokens in a page.
    """
    return [
        AuditedRow(row, promised_share(state.decode))
        for row, (state, length) in enumerate(zip(states, lengths, strict=True))
        if state is not None
        and (share := audited_share(state.policy))
        and is_audited(length - state.prompt_length + state.audit_offset, share)
        and not reads_everything(state, length, page_size)
    ]
