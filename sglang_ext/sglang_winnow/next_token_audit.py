"""Audited steps whose next token is compared with dense attention's.

Behind the pass of such a step, and before a token is drawn from it, the newest tokens of the rows that ask run through
the whole model once more, with dense attention in every layer. They attend to the keys and values of earlier tokens as
they lie in the cache, and to their own of the dense pass. That leaves no trace but the comparison: the cache, counters
and logits of the step stay as they are. On a GPU no CUDA graph serves that pass: its batches have any number of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.plugins.hook_registry import HookType
from torch import Tensor

from sglang_winnow.hooks import Hook
from winnow_kernels.decode.audit import next_token_divergence
from winnow_kernels.decode.statistics import Field, Statistics
from winnow_kernels.host_tensors import to_device

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput


def compare_next_tokens(
    output: ModelRunnerOutput, runner: ModelRunner, forward_batch: ForwardBatch, *_: object, **__: object
) -> None:
    """After a forward pass, compare the next token of the rows that ask, before one is drawn."""
    backend: Any = runner.attn_backend
    # SGLang's own backends compare nothing.
    if not (compared := getattr(backend, "compared", ())):
        return
    rows = torch.tensor(compared)
    index = to_device(rows, forward_batch.input_ids.device)
    batch = _newest_tokens(forward_batch, rows, index)
    with backend.attending_densely(batch.out_cache_loc):
        # ``forward`` would number one more pass, and record its experts.
        dense = runner._forward_raw(batch, None).logits_output.next_token_logits  # noqa: SLF001
    sparse = output.logits_output.next_token_logits[index]
    _count(backend.statistics, batch.req_pool_indices, dense, sparse)


def _newest_tokens(forward_batch: ForwardBatch, on_host: Tensor, rows: Tensor) -> ForwardBatch:
    """Return a decode batch of the newest tokens of some rows that decode; others are prefilled before them, if any.

    ``on_host`` and ``rows`` are their numbers, int64 [rows], on the host and on the device.
    """
    tokens = rows + len(forward_batch.input_ids) - forward_batch.batch_size
    lengths = forward_batch.seq_lens_cpu[on_host]
    rotated = forward_batch.mrope_positions
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(rows),
        input_ids=forward_batch.input_ids[tokens],
        req_pool_indices=forward_batch.req_pool_indices[rows],
        seq_lens=forward_batch.seq_lens[rows],
        out_cache_loc=forward_batch.out_cache_loc[tokens],
        seq_lens_sum=int(lengths.sum()),
        seq_lens_cpu=lengths,
        orig_seq_lens=_part(forward_batch.orig_seq_lens, rows),
        positions=forward_batch.positions[tokens],
        mrope_positions=None if rotated is None else rotated[:, tokens],
        spec_algorithm=forward_batch.spec_algorithm,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )


def _count(statistics: Statistics, slots: Tensor, dense: Tensor, sparse: Tensor) -> None:
    divergence, is_same = next_token_divergence(dense, sparse)
    statistics.add(slots, Field.AUDITED_NEXT_TOKENS, 1.0)
    statistics.add(slots, Field.AUDITED_KL, divergence)
    statistics.add(slots, Field.AUDITED_TOP1, is_same.double())


def _part(values: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if values is None else values[rows]


HOOKS: Final = (
    Hook("sglang.srt.model_executor.model_runner.ModelRunner.forward", compare_next_tokens, HookType.AFTER),
)
