"""How much device memory policies take beside the KV cache, which SGLang must leave to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.audit_share import audits_on
from sglang_winnow.backend_name import NAME
from sglang_winnow.device.construction import enabled_kinds, width_of
from sglang_winnow.device.layers import ModelLayers
from sglang_winnow.device.reserved_indexes import reserved_indexes
from sglang_winnow.hooks import Hook
from sglang_winnow.key_bits import index_settings
from sglang_winnow.served_policies import left_out_policies, served_policies
from sglang_winnow.sglang_versions.arguments import resolved, verifies_drafts
from sglang_winnow.sglang_versions.parallelism import attention_ranks_of
from winnow_kernels.attend.gpu import AttendBuffers
from winnow_kernels.attend.gpu_check import CheckPartial
from winnow_kernels.cache import LayerCache
from winnow_kernels.contract.verification import MAX_CHECKED_TOKENS
from winnow_kernels.decode.gpu_audit import StepAudit
from winnow_kernels.decode.gpu_step import StepBuffers
from winnow_kernels.indexes.pool_shape import PoolShape
from winnow_kernels.policies.declarations import DECLARATIONS, LAYOUT
from winnow_kernels.policies.quoka.prefill.selection import QuokaPrefillWorkspace
from winnow_kernels.policies.registry import POLICIES_SETTING

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

logger = logging.getLogger(__name__)


def fixed_bytes(
    kinds: Collection[str], shape: PoolShape, query_heads: int, rows: int, longest: int, page_size: int
) -> int:
    """Return what buffers take at most, however large the KV cache is.

    Args:
        kinds: of the policies that the server serves.
        shape: of the KV cache in the layers with full attention.
        query_heads: of a layer.
        rows: of the largest batch.
        longest: tokens of the longest context.
        page_size: slots in a page.
    """
    nowhere = torch.device("meta")
    width = width_of(kinds, longest)
    steps = StepBuffers(LAYOUT, rows, longest, page_size, shape.layers, query_heads, shape.kv_heads, width, nowhere)
    layer = LayerCache(*torch.empty(2, 1, shape.kv_heads, shape.head_dim, device=nowhere))
    attention = AttendBuffers.empty(rows, query_heads, layer)
    own = sum(DECLARATIONS[kind].buffer_bytes for kind in kinds)
    prefill = QuokaPrefillWorkspace.empty(shape.kv_heads, longest, nowhere)
    return steps.bytes + attention.bytes + own + prefill.scores.nbytes


def audit_bytes(shape: PoolShape, query_heads: int, rows: int) -> int:
    """Return what the buffers of audited steps take; ``rows`` are those of the largest batch."""
    layer = LayerCache(*torch.empty(2, 1, shape.kv_heads, shape.head_dim, device="meta"))
    return StepAudit(rows, query_heads, layer, AttendBuffers.empty(rows, query_heads, layer)).bytes


def check_bytes(shape: PoolShape, query_heads: int) -> int:
    """Return what the buffers of passes that check drafts take."""
    nowhere = torch.device("meta")
    layer = LayerCache(*torch.empty(2, 1, shape.kv_heads, shape.head_dim, device=nowhere))
    return sum(tensor.nbytes for tensor in CheckPartial.empty(MAX_CHECKED_TOKENS, query_heads, layer))


def _leave_room(profile: Callable[..., int], configurator: KVCacheConfigurator, *arguments: Any, **named: Any) -> int:
    available = profile(configurator, *arguments, **named)
    if resolved(configurator.server_args).attention_backend != NAME:
        return available
    # What it imports waits for SGLang to have chosen its platform.
    from sglang_winnow.refusals import attention_layers  # noqa: PLC0415

    model, tp_size = configurator.model_config, attention_ranks_of(configurator)
    verifies = verifies_drafts(resolved(configurator.server_args))
    kinds = enabled_kinds(verifies=verifies)
    layers = ModelLayers.of(attention_layers(configurator))
    if not layers.full:
        # The backend refuses such a model.
        return available
    shape = PoolShape(
        len(layers.full),
        model.get_num_kv_heads(tp_size),
        model.head_dim,
        configurator.kv_cache_dtype.itemsize,
    )
    rows = resolved(configurator.server_args).max_running_requests
    query_heads = model.num_attention_heads // tp_size
    fixed = fixed_bytes(kinds, shape, query_heads, rows, model.context_len, configurator.page_size)
    if verifies:
        fixed += check_bytes(shape, query_heads)
    if audits_on(resolved(configurator.server_args).device):
        fixed += audit_bytes(shape, query_heads, rows)
    policies = served_policies(verifies=verifies)
    reserved = reserved_indexes(policies, shape, configurator.page_size, index_settings(), len(layers.windows))
    share = sum(index.share for index in reserved)
    left = int((available - fixed) / (1 + share))
    logger.info(
        "Winnow serves %s. Of %.2f GB its buffers take %.2f and its indexes %.2f, %.1f %% of the KV cache.",
        ", ".join(policies),
        available / 2**30,
        fixed / 2**30,
        (available - fixed - left) / 2**30,
        100 * share,
    )
    for index in reserved:
        readers = ", ".join(index.policies)
        logger.info("Winnow's %s take %.1f %% of the KV cache, for %s.", index.name, 100 * index.share, readers)
    if others := left_out_policies(verifies=verifies):
        logger.info("Winnow serves only if %s names it: %s.", POLICIES_SETTING, ", ".join(others))
    return left


HOOKS: Final = (
    Hook(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        _leave_room,
        HookType.AROUND,
    ),
)
