"""The radix cache stays truthful: a prefix is shared only among requests that would have computed the same KV.

- What a sparse prefill wrote lives in a namespace of its policy. There prefixes are compared and kept in whole blocks
  (``block_keys``), and chunks end between blocks (``chunk_ends``): the KV depends neither on load nor on who came
  before.
- What was generated after or by anything but dense attention, and not verified by it, is freed when its request ends,
  unless the request asks to keep it: then all of the request lives in a namespace of its whole policy.
- A request that gives back what it will not read again of its prompt (``released_prompts``) inserts nothing.
- A policy that observes the end of the prompt gets to compute it, whatever was cached.
- The state of layers with linear attention is kept if all tokens before it may be shared and, in a namespace of blocks,
  if it lies between two of them.

All of it is in what the cache is asked, never in how it keeps its tree: SGLang has trees in Python and in Rust.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sglang.srt.plugins.hook_registry import HookType

from sglang_winnow.backend_name import NAME
from sglang_winnow.block_keys import BlockNamespace, insert_in_blocks, match_in_blocks
from sglang_winnow.hooks import Hook, around
from sglang_winnow.metrics import KEPT_TOKENS, METRICS, UNCACHED_TOKENS
from sglang_winnow.server_information import block_of
from sglang_winnow.sglang_versions.arguments import attention_backends
from sglang_winnow.sglang_versions.prefix_cache import (
    WITH_STATES,
    Insertion,
    default_caches,
    functions_on_keys,
    shared_length,
)
from winnow_kernels.policies.attention_policy import AttentionPolicy

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_winnow.request_state import RequestState

# No key that a client sends may begin like this: it could name another's namespace.
NAMESPACE_PREFIX: Final = "winnow-"


def namespace_of(policy: AttentionPolicy, extra_key: str | None, page_size: int) -> str | None:
    """Return the radix cache's key for a request whose client chose ``extra_key``."""
    if (name := policy.namespace()) is None:
        return extra_key
    name = f"{name}|{extra_key or ''}"
    return name if policy.has_dense_prefill else BlockNamespace(name, block_of(policy, page_size))


def insertable_length(req: Req, length: int, page_size: int) -> int:
    """Return how many of the first ``length`` tokens of ``req`` others may share, beside those it shares already."""
    state = _state(req)
    if state is None or state.policy.answers_densely:
        return length
    if state.releases:
        return min(length, shared_length(req))
    shareable = length if state.policy.keeps_sparse_answer else min(length, state.prompt_length)
    block = block_of(state.policy, page_size)
    return min(length, max(shareable // block * block, shared_length(req)))


def keeps_state(req: Req, position: int, page_size: int) -> bool:
    """Return whether others may go on from the state that ``req`` had behind its first ``position`` tokens."""
    state = _state(req)
    if state is None:
        return True
    return position % block_of(state.policy, page_size) == 0 and position <= insertable_length(req, position, page_size)


def count_answer(req: Req, computed: int, inserted: int) -> None:
    """Count the generated tokens of a request that ends: those whose KV is kept for later turns, and the others."""
    state = _state(req)
    if state is None or state.policy.answers_densely:
        return
    state.kept_answer = max(0, inserted - state.prompt_length)
    METRICS.add(KEPT_TOKENS, state.kept_answer)
    METRICS.add(UNCACHED_TOKENS, max(0, computed - max(inserted, state.prompt_length)))


def limit_prefix(longest: int, req: Req, _input_length: int) -> int:
    """Leave the observation window to be computed; ``longest`` is how much SGLang would take from the cache."""
    state = _state(req)
    if state is None or state.policy.decode.observed == 0:
        return longest
    return max(0, min(longest, state.prompt_length - state.policy.decode.observed))


def require_served_cache(cache: BasePrefixCache, context: TreeCacheBuildContext) -> None:
    """Raise SystemExit if SGLang has chosen a cache that would share what must not be shared."""
    chosen = type(cache)
    classes = (*default_caches(), *(WITH_STATES if getattr(context, "is_hybrid_ssm", False) else ()))
    served = f"{chosen.__module__}.{chosen.__qualname__}" in classes
    if NAME in attention_backends(context.server_args) and not served:
        raise SystemExit(
            f"Winnow: the server does not start, because --attention-backend {NAME}"
            f" does not serve the prefix cache {chosen.__name__}."
        )


def _state(req: Req) -> RequestState | None:
    return getattr(req, "winnow_state", None)


HOOKS: Final[tuple[Any, ...]] = (
    Hook("sglang.srt.mem_cache.registry.create_tree_cache", require_served_cache, HookType.AFTER),
    Hook("sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len", limit_prefix, HookType.AFTER),
    *around(functions_on_keys(match_in_blocks, insert_in_blocks)),
    *around(Insertion(insertable_length, count_answer, keeps_state).functions()),
)
