"""Log-probabilities of named tokens, in batches in which not every request asks for them.

SGLang has tensors of those who ask and empty lists of all others, and ends where it turns the lists into lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from sglang_winnow.hooks import around


def _tensors_of_all(find: Callable[..., tuple[list[Any], list[Any]]], *arguments: Any, **options: Any) -> Any:
    values, tokens = find(*arguments, **options)
    if any(isinstance(value, Tensor) for value in values):
        values = [value if isinstance(value, Tensor) else torch.empty(0) for value in values]
    return values, tokens


HOOKS: Final = around({"sglang.srt.layers.logprob_processor.get_token_ids_logprobs": _tensors_of_all})
