"""The radix cache stays truthful: a prefix is shared only among requests that would have computed the same KV.

- What a sparse prefill wrote lives in a namespace of its policy. There prefixes are compared, kept and split in whole
  blocks, because the KV of a token depends on all queries of its block, and chunks end between blocks: the KV depends
  neither on load nor on who came before.
- What was generated after or by anything but dense attention is freed when its request ends.
- A policy that observes the end of the prompt gets to compute it, whatever was cached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.backend_name import NAME
from sglang_winnow.hooks import Hook
from sglang_winnow.metrics import METRICS, UNCACHED_TOKENS
from sglang_winnow.server_information import block_of
from sglang_winnow.sglang_versions.arguments import attention_backends
from sglang_winnow.sglang_versions.releases import CACHE_CHECKPOINTS, runs
from winnow_kernels.policies.attention_policy import AttentionPolicy
from winnow_kernels.policies.quoka.parameters import QuokaPrefill

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_winnow.request_state import RequestState

# Subclasses and other implementations insert and free in ways of their own.
SERVED_CACHES: Final = ("RadixCache", "ChunkCache")
# Its requests do not enter by the methods that hooks are on: it is served where prefixes are not kept at all.
SERVED_WHILE_DISABLED: Final = ("UnifiedRadixCache",)
# No key that a client sends may begin like this: it could name another's namespace.
NAMESPACE_PREFIX: Final = "winnow-"


class BlockNamespace(str):
    """A radix cache's key (``extra_key``) whose prefixes come in whole blocks.

    Attributes:
        block: tokens, whole pages.
    """

    __slots__ = ("block",)
    block: int

    def __new__(cls, name: str, block: int) -> Self:
        namespace = super().__new__(cls, name)
        namespace.block = block
        return namespace


def namespace_of(policy: AttentionPolicy, extra_key: str | None, page_size: int) -> str | None:
    """Return the radix cache's key for a request whose client chose ``extra_key``."""
    name = policy.prefill_namespace()
    return extra_key if name is None else BlockNamespace(f"{name}|{extra_key or ''}", block_of(policy, page_size))


def align(page_aligned: Callable[..., RadixKey], key: RadixKey, page_size: int) -> RadixKey:
    """Cut a key to whole pages, or blocks."""
    return page_aligned(key, _step(key, page_size))


def match(match_key: Callable[..., int], key: RadixKey, other: RadixKey, page_size: int = 1) -> int:
    """Return how many tokens two keys share, in whole pages, or blocks."""
    return match_key(key, other, _step(key, page_size))


def child_key(first_page: Callable[..., Any], key: RadixKey, page_size: int = 1) -> Any:
    """Return what tells a node from its siblings: its first page, or block."""
    return first_page(key, _step(key, page_size))


def _step(key: RadixKey, page_size: int) -> int:
    return key.extra_key.block if isinstance(key.extra_key, BlockNamespace) else page_size


def insertable_length(req: Req, length: int, page_size: int) -> int:
    """Return how many of the first ``length`` tokens of ``req`` others may share, beside those it shares already."""
    state = _state(req)
    if state is None or state.policy.is_dense:
        return length
    block = block_of(state.policy, page_size)
    return min(length, max(min(length, state.prompt_length) // block * block, req.cache_protected_len))


def limit_prefix(longest: int, req: Req, _input_length: int) -> int:
    """Leave the observation window to be computed; ``longest`` is how much SGLang would take from the cache."""
    state = _state(req)
    if state is None or state.policy.decode.observed == 0:
        return longest
    return max(0, min(longest, state.prompt_length - state.policy.decode.observed))


def cache_unfinished(
    cache_unfinished_req: Callable[..., None], cache: RadixCache, req: Req, chunked: bool = False
) -> None:
    """Insert what may be shared of the tokens computed so far; the request keeps the rest for itself."""
    computed = req.extend_range
    insertable = insertable_length(req, computed.end, cache.page_size)
    if cache.disable or insertable >= _whole(computed.end, cache.page_size):
        cache_unfinished_req(cache, req, chunked=chunked)
        return
    own = cache.req_to_token_pool.req_to_token[req.req_pool_idx, insertable : computed.end]
    own = own.to(torch.int64, copy=True)
    req.set_extend_range(min(computed.start, insertable), insertable)
    try:
        cache_unfinished_req(cache, req, chunked=chunked)
    finally:
        req.set_extend_range(computed.start, computed.end)
    req.prefix_indices = torch.cat([req.prefix_indices, own])


def cache_finished(
    cache_finished_req: Callable[..., None],
    cache: RadixCache,
    req: Req,
    is_insert: bool = True,
    *,
    kv_len_to_handle: int,
) -> None:
    """Insert what may be shared of a request that ends, and free the rest."""
    insertable = insertable_length(req, kv_len_to_handle, cache.page_size)
    inserts = is_insert and not (cache.disable or cache.disable_finished_insert)
    if inserts and insertable < _whole(kv_len_to_handle, cache.page_size):
        slots = cache.req_to_token_pool.req_to_token[req.req_pool_idx, insertable:kv_len_to_handle]
        cache.token_to_kv_pool_allocator.free(slots)
        METRICS.add(UNCACHED_TOKENS, max(0, kv_len_to_handle - max(insertable, req.winnow_state.prompt_length)))
        kv_len_to_handle = insertable
    cache_finished_req(cache, req, is_insert, kv_len_to_handle=kv_len_to_handle)


def add_request(
    add_one_req: Callable[..., AddReqResult],
    adder: PrefillAdder,
    req: Req,
    has_chunked_req: bool,
    truncation_align_size: int | None,
) -> AddReqResult:
    """Add a request to a prefill batch; its first chunk ends between blocks."""
    if (block := _prefill_block(req, adder.page_size)) is not None:
        truncation_align_size = math.lcm(block, truncation_align_size or 1)
    result = add_one_req(adder, req, has_chunked_req, truncation_align_size)
    if block is not None and adder.new_chunked_req is req:
        # SGLang goes on with one unfinished prompt only, and takes it that there is no room behind one.
        adder.rem_chunk_tokens = 0
        return adder.budget_state()
    return result


def add_request_without_cache(
    add_one_req_ignore_eos: Callable[..., AddReqResult], adder: PrefillAdder, req: Req
) -> AddReqResult:
    """Add a request to a prefill batch of a server without radix cache; its first chunk ends between blocks."""
    block, room = _prefill_block(req, adder.page_size), adder.rem_chunk_tokens
    if block is None or room is None or len(req.full_untruncated_fill_ids) - len(req.prefix_indices) <= room:
        return add_one_req_ignore_eos(adder, req)
    adder.rem_chunk_tokens = _whole(room, block)
    result = add_one_req_ignore_eos(adder, req)
    if adder.new_chunked_req is not req:
        adder.rem_chunk_tokens = room
    return result


def add_next_chunk(add_chunked_req: Callable[..., Req | None], adder: PrefillAdder, req: Req) -> Req | None:
    """Add a request's next chunk to a prefill batch, ending between blocks; return it if there is more to come."""
    remaining = add_chunked_req(adder, req)
    block = _prefill_block(req, adder.page_size)
    if remaining is None or block is None:
        return remaining
    start, end = req.extend_range
    # The chunk must go on: SGLang too takes more than the room that it reckons with.
    whole = max(_whole(end, block), _whole(start, block) + block)
    total = len(req.full_untruncated_fill_ids)
    if whole != end:
        req.set_extend_range(start, min(whole, total))
        adder._update_prefill_budget(0, req.extend_range.end - end, 0, req.retracted_stain)  # noqa: SLF001
    if whole >= total:
        return None
    # As in ``add_request``.
    adder.rem_chunk_tokens = 0
    return remaining


def require_served_cache(cache: BasePrefixCache, context: TreeCacheBuildContext) -> None:
    """Raise SystemExit if SGLang has chosen a cache that would share what must not be shared."""
    chosen = type(cache).__name__
    served = chosen in SERVED_CACHES or (chosen in SERVED_WHILE_DISABLED and cache.disable)
    if NAME in attention_backends(context.server_args) and not served:
        raise SystemExit(
            f"Winnow: the server does not start, because --attention-backend {NAME}"
            f" does not serve the prefix cache {chosen}."
        )


def _state(req: Req) -> RequestState | None:
    return getattr(req, "winnow_state", None)


def _prefill_block(req: Req, page_size: int) -> int | None:
    """Return the grid of a request's sparse prefill, in tokens; None if it is dense."""
    state = _state(req)
    if state is None or not isinstance(state.policy.prefill, QuokaPrefill):
        return None
    return block_of(state.policy, page_size)


def _whole(length: int, step: int) -> int:
    return length // step * step


_RADIX_CACHE: Final = "sglang.srt.mem_cache.radix_cache.RadixCache"
_RADIX_KEY: Final = "sglang.srt.mem_cache.radix_cache.RadixKey"
_ADDER: Final = "sglang.srt.managers.schedule_policy.PrefillAdder"


def _hooks_on_insertion() -> tuple[Hook, ...]:
    if runs(CACHE_CHECKPOINTS):
        return ()
    return (
        Hook(f"{_RADIX_CACHE}.cache_unfinished_req", cache_unfinished, HookType.AROUND),
        Hook(f"{_RADIX_CACHE}.cache_finished_req", cache_finished, HookType.AROUND),
    )


HOOKS: Final[tuple[Any, ...]] = (
    Hook("sglang.srt.mem_cache.registry.create_tree_cache", require_served_cache, HookType.AFTER),
    Hook("sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len", limit_prefix, HookType.AFTER),
    Hook(f"{_RADIX_KEY}.page_aligned", align, HookType.AROUND),
    Hook(f"{_RADIX_KEY}.match", match, HookType.AROUND),
    Hook(f"{_RADIX_KEY}.child_key", child_key, HookType.AROUND),
    *_hooks_on_insertion(),
    Hook(f"{_ADDER}.add_one_req", add_request, HookType.AROUND),
    Hook(f"{_ADDER}.add_one_req_ignore_eos", add_request_without_cache, HookType.AROUND),
    Hook(f"{_ADDER}.add_chunked_req", add_next_chunk, HookType.AROUND),
)
