"""What a CUDA server is made of: which dense backend, which families, how large their memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

import torch

from sglang_winnow.backend_name import NAME
from sglang_winnow.device.decode import DeviceDecode
from sglang_winnow.device.parameters import FAMILIES
from sglang_winnow.device.selectors import (
    DeltaSelector,
    QuestSelector,
    QuokaSelector,
    Selector,
    StoredSelector,
    StreamingLLMSelector,
    TacticSelector,
)
from sglang_winnow.device.step import Step, StepBuffers
from sglang_winnow.indexes import Indexes
from sglang_winnow.ranks import ALONE, Ranks
from sglang_winnow.served_policies import served_policies
from sglang_winnow.server_information import served_model
from sglang_winnow.statistics import Statistics
from winnow_kernels.attend.gpu import AttendBuffers
from winnow_kernels.cache import LayerCache
from winnow_kernels.decode.gpu_rows import Family
from winnow_kernels.policies.tactic.gpu.selection import selection_width

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner

DENSE_ENVIRONMENT: Final = "WINNOW_DENSE_BACKEND"


def enabled_families() -> frozenset[Family]:
    """Return the families of the decode policies that the server serves (``served_policies``), besides dense."""
    return frozenset(FAMILIES[name] for name in served_policies()) - {Family.DENSE}


def dense_backend(runner: ModelRunner) -> str:
    """Return the name of the backend for dense batches: ``WINNOW_DENSE_BACKEND``, or SGLang's own choice."""
    if name := os.environ.get(DENSE_ENVIRONMENT):
        return name
    choice: str = runner.server_args._get_default_attn_backend(False, runner.model_config)  # noqa: SLF001
    # Winnow's own platform for CPUs knows no other: there, Triton's interpreter is tested.
    return "torch_native" if choice == NAME else choice


def profiled_layers(runner: ModelRunner) -> Collection[int]:
    """Return the Δ-layers of the served model's profile; none without one."""
    return served_model(runner.server_args, runner.model_config).delta_layers or ()


def build_decode(
    runner: ModelRunner,
    caches: Sequence[LayerCache],
    layer: RadixAttention,
    indexes: Indexes,
    statistics: Statistics,
    families: Collection[Family],
    ranks: Ranks,
) -> DeviceDecode:
    """Return the decode steps of a server, or of one rank of it, with the selectors of ``families``."""
    table = runner.req_to_token_pool.req_to_token
    requests, longest = table.shape[0], runner.model_config.context_len
    page_size = runner.page_size
    longest = -(-longest // page_size) * page_size
    scale, query_heads = layer.scaling, layer.tp_q_head_num
    buffers = StepBuffers(
        requests,
        longest,
        page_size,
        len(caches),
        caches[0].kv_heads,
        selection_width(longest),
        torch.device(runner.device),
    )
    attend_buffers = AttendBuffers.empty(requests, query_heads, caches[0])
    selectors = selectors_of(
        families, caches, scale, query_heads, indexes, attend_buffers, requests, buffers.largest, ranks
    )
    return DeviceDecode(caches, scale, table, buffers, attend_buffers, selectors, statistics)


def selectors_of(
    families: Collection[Family],
    caches: Sequence[LayerCache],
    scale: float,
    query_heads: int,
    indexes: Indexes,
    attend_buffers: AttendBuffers,
    requests: int,
    step: Step,
    ranks: Ranks = ALONE,
) -> dict[Family, Selector]:
    """Return the selectors of ``families``, for ``requests`` request slots and batches of up to ``step``'s rows.

    ``caches`` and ``query_heads`` are those of this one of the ``ranks``.
    """
    layers = len(caches)
    makers: dict[Family, Callable[[], Selector]] = {
        Family.STREAMING_LLM: StreamingLLMSelector,
        Family.QUEST: lambda: QuestSelector(indexes.page_bounds, step),
        Family.STORED: lambda: StoredSelector(caches, scale, requests, step),
        Family.DELTA: lambda: DeltaSelector(layers, scale, query_heads, attend_buffers, requests, step, ranks),
        Family.TACTIC: lambda: TacticSelector(indexes.clusters, scale, query_heads, requests, step, ranks),
        Family.QUOKA: lambda: QuokaSelector(indexes.key_norms, step),
    }
    return {family: makers[family]() for family in sorted(families)}
