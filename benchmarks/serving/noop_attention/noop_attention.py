"""An SGLang plugin for benchmarks: attention that costs nothing, and so bounds what any attention can reach.

With this folder on ``PYTHONPATH``, every ``--attention-backend`` that SGLang has itself writes keys and values to the
cache, plans its passes and is captured in graphs as ever, and answers zeros. The backends keep their names, by which
SGLang knows what else goes with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

if TYPE_CHECKING:
    from torch import Tensor

IN_PLACE: Final = "attention does nothing"

logger = logging.getLogger(__name__)


def register() -> None:
    """Take the place of all backends; SGLang calls this in each of its processes."""
    for name, create in list(ATTENTION_BACKENDS.items()):
        ATTENTION_BACKENDS[name] = partial(_create, create)


def answer_zeros(
    pool: Any,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **_: Any,
) -> Tensor:
    """Write keys and values unless SGLang has. Returns zeros, [tokens, query heads × head dim]."""
    if save_kv_cache and k is not None:
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
    return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)


def _create(create: Callable[[Any], Any], runner: Any) -> Any:
    backend = create(runner)
    backend.forward_extend = backend.forward_decode = partial(answer_zeros, backend.token_to_kv_pool)
    logger.warning(IN_PLACE)
    return backend
