"""Keys of the radix cache whose prefixes come in whole blocks.

The KV that a sparse prefill writes for a token depends on all tokens of its block. SGLang's tree compares, splits and
keeps prefixes in pages, and a page is shorter than a block: two prompts whose blocks begin alike would share pages in
which they differ. So the tree is given other keys: in place of a page's tokens stands a digest of its whole block. Two
keys agree in a page then if they agree in the block around it, and in none of its pages otherwise, whatever the tree
is written in.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, InsertResult, MatchPrefixParams, MatchResult

from sglang_winnow.sglang_versions.prefix_cache import matched_length

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.radix_cache import RadixKey

_TOKEN_BYTES: Final = 8
_DIGEST_BYTES: Final = 64


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


def match_in_blocks(
    match_prefix: Callable[..., MatchResult], cache: BasePrefixCache, params: MatchPrefixParams
) -> MatchResult:
    """Match a prefix; in a namespace of blocks, whole blocks of it."""
    namespace = params.key.extra_key
    if not isinstance(namespace, BlockNamespace):
        return match_prefix(cache, params)
    key = digested(params.key, namespace)
    result = match_prefix(cache, replace(params, key=key))
    while length := matched_length(result) % namespace.block:
        # Behind a page inside of a block, the rest was evicted.
        key = key[: matched_length(result) - length]
        result = match_prefix(cache, replace(params, key=key))
    return result


def insert_in_blocks(insert: Callable[..., InsertResult], cache: BasePrefixCache, params: InsertParams) -> InsertResult:
    """Insert a prefix; in a namespace of blocks, whole blocks of it."""
    namespace = None if params.key is None else params.key.extra_key
    if not isinstance(namespace, BlockNamespace):
        return insert(cache, params)
    key = digested(params.key, namespace)
    value = None if params.value is None else params.value[: len(key)]
    return insert(cache, replace(params, key=key, value=value))


def digested(key: RadixKey, namespace: BlockNamespace) -> RadixKey:
    """Return a key of the whole blocks of ``key``: in place of a block's tokens, the block's digest, repeated."""
    tokens = key.raw_token_ids()
    length = len(tokens) // namespace.block * namespace.block
    data = memoryview(tokens[:length]).cast("B")
    size = namespace.block * _TOKEN_BYTES
    repeats = -(-size // _DIGEST_BYTES)
    digests = array("q")
    for start in range(0, len(data), size):
        digests.frombytes((hashlib.blake2b(data[start : start + size]).digest() * repeats)[:size])
    whole = key[:0]
    whole.token_ids = digests
    whole.extra_key = str(namespace)
    return whole
