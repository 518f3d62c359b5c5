"""What a CUDA server is made of: which kinds of policies, how large their memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from sglang_winnow.audit_share import audits_on
from sglang_winnow.device.decode import DeviceDecode
from sglang_winnow.served_policies import served_policies
from sglang_winnow.server_information import served_model
from sglang_winnow.sglang_versions.arguments import resolved, verifies_drafts
from winnow_kernels.attend.gpu import AttendBuffers
from winnow_kernels.cache import LayerCache
from winnow_kernels.contract.verification import MAX_DRAFT_TOKENS
from winnow_kernels.decode.gpu_audit import StepAudit
from winnow_kernels.decode.gpu_selector import Server
from winnow_kernels.decode.gpu_step import StepBuffers
from winnow_kernels.decode.ranks import Ranks
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.indexes.pool_indexes import Indexes
from winnow_kernels.policies.declarations import DECLARATIONS, LAYOUT, kinds_of, selectors_of
from winnow_kernels.policies.tactic.gpu.selection import selection_width

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner


def enabled_kinds(*, verifies: bool) -> frozenset[str]:
    """Return the kinds of the decode policies that the server serves (``served_policies``), besides dense."""
    return kinds_of(served_policies(verifies=verifies))


def width_of(kinds: Collection[str], longest: int) -> int:
    """Return how many tokens a KV head can select on a server of ``kinds`` with contexts of ``longest`` tokens.

    Where it would select more, it attends to the whole context: not if that may have been released.
    """
    return longest if any(DECLARATIONS[kind].releases for kind in kinds) else selection_width(longest)


def profiled_layers(runner: ModelRunner) -> Collection[int]:
    """Return the Δ-layers of the served model's profile; none without one."""
    return served_model(runner.server_args, runner.model_config).delta_layers or ()


def build_decode(
    runner: ModelRunner,
    caches: Sequence[LayerCache],
    layer: RadixAttention,
    indexes: Indexes,
    statistics: Statistics,
    kinds: Collection[str],
    ranks: Ranks,
) -> DeviceDecode:
    """Return the decode steps of a server, or of one rank of it, with the selectors of ``kinds``."""
    table = runner.req_to_token_pool.req_to_token
    requests, longest = table.shape[0], runner.model_config.context_len
    if verifies_drafts(resolved(runner.server_args)):
        # A pass that checks fills up rows that have drafted less than others.
        longest += MAX_DRAFT_TOKENS
    page_size = runner.page_size
    longest = -(-longest // page_size) * page_size
    scale, query_heads = layer.scaling, layer.tp_q_head_num
    buffers = StepBuffers(
        LAYOUT,
        requests,
        longest,
        page_size,
        len(caches),
        query_heads,
        caches[0].kv_heads,
        width_of(kinds, longest),
        torch.device(runner.device),
    )
    attend_buffers = AttendBuffers.empty(requests, query_heads, caches[0])
    server = Server(caches, scale, query_heads, indexes, attend_buffers, requests, buffers.largest, ranks)
    has_audits = audits_on(torch.device(runner.device).type)
    audit = StepAudit(requests, query_heads, caches[0], attend_buffers) if has_audits else None
    return DeviceDecode(caches, scale, table, buffers, attend_buffers, selectors_of(kinds, server), statistics, audit)
