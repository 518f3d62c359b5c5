"""Which rows of a decode batch are audited."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_winnow.audit_share import audited_share, promised_share
from sglang_winnow.request_policy import reads_everything
from sglang_winnow.request_state import RequestState
from winnow_kernels.decode.audit import AuditedRow, is_audited


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
        and is_audited(length - state.prompt_length, share, state.audit_phase)
        and not reads_everything(state, length, page_size)
    ]
