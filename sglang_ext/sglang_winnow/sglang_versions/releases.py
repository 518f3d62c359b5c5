"""Which SGLang is running, and which release brought what the others modules of this package tell apart."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Final

from packaging.version import Version

OLDEST: Final = Version("0.5.16")
NEWEST: Final = Version("0.5.23")
"""The newest on which Winnow was tested."""

RUNNING: Final = Version(version("sglang"))

VERIFIES_ON_CUDA: Final = RUNNING == OLDEST
"""Whether drafts can be verified on CUDA: there that ran on the oldest release alone."""
PASSES_WITHOUT_GRAPH: Final = RUNNING == OLDEST
"""Whether a decode pass on CUDA can be kept from graphs: how other releases choose between them and none was not read.

Explained steps need it, and dense passes that compare next tokens.
"""
WINDOWS_ON_CUDA: Final = RUNNING == OLDEST
"""Whether layers with a sliding window can be left to a dense backend: those of other releases were not read."""
LINEAR_ATTENTION_ON_CUDA: Final = RUNNING == OLDEST
"""Whether layers with linear attention can be left to SGLang: how other releases keep their states was not read."""

CAPS_AND_SINKS_ON_CUDA: Final = RUNNING == OLDEST
"""Whether dense backends bound scores and take sink logits: those of other releases were not read."""

# The worker of a speculative algorithm says which KV cache its draft model has; until then SGLang expected one of all.
DRAFT_POOL_OF_WORKER: Final = Version("0.5.18")
# What a grammar allows is a field of its own (``GrammarMask``), no longer a mask beside a function.
GRAMMAR_MASKS: Final = Version("0.5.17")
# The record of arguments is what the command line says; decisions about those left open are declared beside it.
ARGUMENTS_DECLARED: Final = Version("0.5.19")
# The handlers of arguments are functions in ``arg_groups``, no longer methods of ``ServerArgs``.
ARGUMENT_HANDLERS: Final = Version("0.5.19")
# ``min_new_tokens`` keeps back all tokens with which the model ends, not the tokenizer's alone.
ENDS_OF_MODEL: Final = Version("0.5.19")
# In a mixed batch rows that decode get the positions that they have; until then they may be off by one.
MIXED_POSITIONS: Final = Version("0.5.19")
# On a CPU each rank of data parallelism is given a memory node of its own; until then ranks shared them.
RANKS_BY_MEMORY_NODE: Final = Version("0.5.19")
# A request's slot is a field of its ``kv``.
KV_OF_REQUEST: Final = Version("0.5.19")
# The default prefix cache is ``UnifiedRadixCache``; until then it is ``RadixCache``.
UNIFIED_CACHE: Final = Version("0.5.19")
# A decode batch's CUDA graphs have variants by attention (``attention_graph_variants``).
ATTENTION_GRAPH_VARIANTS: Final = Version("0.5.20")
# The cache inserts of a request that ends, and the caller frees the rest; until then the cache did both.
INSERTED_AT_END: Final = Version("0.5.21")
# The ranks are known from the runtime's context alone, no more from the object that sizes the KV cache.
PARALLELISM_IN_CONTEXT: Final = Version("0.5.21")
# Data-parallel attention is asked for by its size alone.
ATTENTION_DATA_SIZE: Final = Version("0.5.22")
# Finished and unfinished requests enter the prefix cache by ``checkpoint``; a request's tokens are in its row alone.
CACHE_CHECKPOINTS: Final = Version("0.5.22")
# SGLang checks the types in a native body (``api_contract``) before hooks see the request.
NATIVE_CONTRACT: Final = Version("0.5.22")
# SGLang removes the states that it makes of a request's samples and does not use.
UNUSED_STATES_REMOVED: Final = Version("0.5.22")

logger = logging.getLogger(__name__)


def runs(release: Version) -> bool:
    """Return whether the running SGLang is ``release`` or a later one."""
    return release <= RUNNING


def require_supported(running: Version = RUNNING) -> None:
    """Check the release of SGLang; warn about one that is newer than those that were tested.

    Raises:
        ValueError: it is older than the oldest that is supported.
    """
    if running < OLDEST:
        raise ValueError(f"SGLang {running} is older than {OLDEST}, the oldest that Winnow runs on")
    if running > NEWEST:
        logger.warning(
            "Winnow was not tested on SGLang %s, only up to %s. All its hooks must be found, or the server ends.",
            running,
            NEWEST,
        )
