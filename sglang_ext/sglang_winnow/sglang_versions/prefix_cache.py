"""SGLang's prefix cache: its class, what a match says, and when it is told to insert what a request has computed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from packaging.version import Version

from sglang_winnow.sglang_versions.prefill import computed_range
from sglang_winnow.sglang_versions.releases import (
    CACHE_CHECKPOINTS,
    INSERTED_AT_END,
    KV_OF_REQUEST,
    LINEAR_ATTENTION_ON_CUDA,
    OLDEST,
    RUNNING,
    UNIFIED_CACHE,
    runs,
)
from sglang_winnow.sglang_versions.requests import slot_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, InsertResult, MatchResult

_MODULES: Final = "sglang.srt.mem_cache"
CACHES: Final[dict[Version, tuple[str, ...]]] = {
    OLDEST: (f"{_MODULES}.radix_cache.RadixCache", f"{_MODULES}.chunk_cache.ChunkCache"),
    UNIFIED_CACHE: (f"{_MODULES}.unified_radix_cache.UnifiedRadixCache", f"{_MODULES}.chunk_cache.ChunkCache"),
    CACHE_CHECKPOINTS: (f"{_MODULES}.unified_radix_cache.UnifiedRadixCache",),
}
"""The classes that SGLang chooses by itself, from a release on: with a prefix cache, and without (the last)."""


def default_caches(running: Version = RUNNING) -> tuple[str, ...]:
    """Return the dotted names of the classes that a release chooses by itself: with a prefix cache, and without."""
    return next(names for release, names in reversed(CACHES.items()) if release <= running)


WITH_STATES: Final = (f"{_MODULES}.unified_radix_cache.UnifiedRadixCache",) if LINEAR_ATTENTION_ON_CUDA else ()
"""The class that it chooses for models with linear attention: a node may have the state behind its last token."""


def _classes() -> tuple[str, ...]:
    """Return the dotted names of the classes with a prefix cache that the running SGLang may choose."""
    return default_caches()[0], *WITH_STATES


# What looks a key up in the tree; ``checkpoint`` too calls it, past ``match_prefix``.
_MATCH: Final = "_match_tree" if runs(CACHE_CHECKPOINTS) else "match_prefix"


def functions_on_keys(
    match: Callable[..., MatchResult], insert: Callable[..., InsertResult]
) -> Mapping[str, Callable[..., Any]]:
    """Return what is to run around the functions that look keys up and insert them, by their dotted names."""
    by_name = {_MATCH: match, "insert": insert}
    return {f"{cache}.{name}": function for cache in _classes() for name, function in by_name.items()}


def matched_length(result: MatchResult) -> int:
    """Return how many tokens of a key are in the cache."""
    return int(result.device_prefix_len) if runs(CACHE_CHECKPOINTS) else len(result.device_indices)


def cached_length_of(cache: BasePrefixCache, req: Req, namespace: str | None) -> int:
    """Return how many of a request's first tokens are in the cache, in a part of it that may not be the request's own.

    Args:
        cache: the scheduler's.
        req: the request, before it is queued.
        namespace: the part, as ``extra_key`` of its requests.
    """
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams  # noqa: PLC0415
    from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: PLC0415

    # Later releases have it in the key, earlier ones in ``extra_key``.
    salt = {"cache_salt": req.cache_salt} if hasattr(RadixKey, "cache_salt") else {}
    key = RadixKey(array("q", req.origin_input_ids), extra_key=namespace, **salt)
    return matched_length(cache.match_prefix(MatchPrefixParams(key=key)))


def shared_length(req: Req) -> int:
    """Return how many of a request's first tokens lie in pages of the cache."""
    return int(req.kv.cache_protected_len if runs(KV_OF_REQUEST) else req.cache_protected_len)


def state_position(req: Req) -> int | None:
    """Return of how many first tokens a request has a state that the cache could keep; None if it has none.

    SGLang copies the state at some positions while it runs, and inserts a request up to the last of them.
    """
    position: int | None = getattr(req, "mamba_last_track_seqlen", None)
    return position


@dataclass(frozen=True)
class Insertion:
    """Lets the cache insert no more of a request than others may share.

    Attributes:
        insertable: of a request's first tokens that are computed, how many others may share: whole pages.
        count: told of a request that ends how many of its tokens are computed, and how many of these are inserted.
        keeps_state: whether others may go on from a request's state behind so many first tokens.
    """

    insertable: Callable[[Req, int, int], int]
    count: Callable[[Req, int, int], None]
    keeps_state: Callable[[Req, int, int], bool]

    def functions(self) -> Mapping[str, Callable[..., None]]:
        """Return what is to run around which functions of the running SGLang's cache, by their dotted names."""
        by_release: dict[Version, dict[str, Callable[..., None]]] = {
            OLDEST: {"cache_unfinished_req": self.insert_running, "cache_finished_req": self.insert_or_free},
            INSERTED_AT_END: {"cache_unfinished_req": self.insert_running, "insert_req": self.insert_ended},
            CACHE_CHECKPOINTS: {"checkpoint": self.insert_any},
        }
        own = next(functions for release, functions in reversed(by_release.items()) if release <= RUNNING)
        return {f"{cache}.{name}": function for cache in _classes() for name, function in own.items()}

    def insert_any(
        self, checkpoint: Callable[..., None], cache: BasePrefixCache, req: Req, *, up_to: int, **others: Any
    ) -> None:
        """Insert of a request that runs or ends; it keeps, or SGLang frees, the rest."""
        insertable = self.insertable(req, up_to, cache.page_size)
        if req.finished() and not cache.disable:
            self.count(req, up_to, _whole_pages(insertable, cache))
        checkpoint(cache, req, up_to=insertable, **others)

    def insert_ended(
        self, insert_req: Callable[..., None], cache: BasePrefixCache, req: Req, *, up_to: int, **others: Any
    ) -> None:
        """Insert of a request that ends; SGLang frees the rest."""
        insertable = self.insertable(req, up_to, cache.page_size)
        if not cache.disable:
            self.count(req, up_to, _whole_pages(insertable, cache))
        insert_req(cache, req, up_to=insertable, **others)

    def insert_or_free(
        self,
        cache_finished_req: Callable[..., None],
        cache: BasePrefixCache,
        req: Req,
        is_insert: bool = True,
        *,
        kv_len_to_handle: int,
        **others: Any,
    ) -> None:
        """Insert of a request that ends, and free the rest."""
        self._drop_state(req, cache)
        insertable = self.insertable(req, kv_len_to_handle, cache.page_size)
        if is_insert and not (cache.disable or getattr(cache, "disable_finished_insert", False)):
            has_states = bool(WITH_STATES) and cache.supports_mamba()
            inserted = min(insertable, state_position(req) or 0) if has_states else insertable
            self.count(req, kv_len_to_handle, _whole_pages(inserted, cache))
            if insertable < _whole_pages(kv_len_to_handle, cache):
                cache.token_to_kv_pool_allocator.free(_slots(cache, req, insertable, kv_len_to_handle))
                kv_len_to_handle = insertable
        cache_finished_req(cache, req, is_insert, kv_len_to_handle=kv_len_to_handle, **others)

    def insert_running(
        self, cache_unfinished_req: Callable[..., None], cache: BasePrefixCache, req: Req, **others: Any
    ) -> None:
        """Insert of a request that goes on; it keeps the rest."""
        self._drop_state(req, cache)
        start, end = computed_range(req)
        insertable = self.insertable(req, end, cache.page_size)
        if cache.disable or insertable >= _whole_pages(end, cache):
            cache_unfinished_req(cache, req, **others)
            return
        own = _slots(cache, req, insertable, end).to(torch.int64, copy=True)
        req.set_extend_range(min(start, insertable), insertable)
        try:
            cache_unfinished_req(cache, req, **others)
        finally:
            req.set_extend_range(start, end)
        req.prefix_indices = torch.cat([req.prefix_indices, own])

    def _drop_state(self, req: Req, cache: BasePrefixCache) -> None:
        """Have SGLang insert nothing of a request whose state others may not go on from.

        Cut short, its tokens would be inserted with a state of more of them than there are.
        """
        position = state_position(req)
        if position is not None and not self.keeps_state(req, position, cache.page_size):
            req.mamba_last_track_seqlen = None


def _slots(cache: BasePrefixCache, req: Req, start: int, end: int) -> torch.Tensor:
    return cache.req_to_token_pool.req_to_token[slot_of(req), start:end]


def _whole_pages(length: int, cache: BasePrefixCache) -> int:
    return length // cache.page_size * cache.page_size
