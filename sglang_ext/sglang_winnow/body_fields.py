"""Fields that SGLang's types of requests and answers lack: read from a request's body, added to an answer."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, create_model

from sglang_winnow.admission import check_custom_params, limits_of
from sglang_winnow.reporting import KEY
from winnow_kernels.contract.request_body import CUSTOM

if TYPE_CHECKING:
    from fastapi import Request
    from sglang.srt.managers.tokenizer_manager import TokenizerManager


async def custom_params_of(raw_request: Request | None, manager: TokenizerManager) -> dict[str, Any] | None:
    """Return the ``custom_params`` of a request whose body SGLang has read already.

    Raises:
        ValueError: they are not what SGLang carries, or have a policy that cannot be served.
    """
    if raw_request is None:
        return None
    custom: dict[str, Any] | None = (await raw_request.json()).get(CUSTOM)
    check_custom_params(custom, limits_of(manager))
    return custom


def with_cost(answer: BaseModel, cost: Any) -> Any:
    """Return ``answer`` with ``attention`` at the top."""
    return _with_attention(type(answer)).model_construct(**dict(answer), **{KEY: cost})


@cache
def _with_attention(kind: type[BaseModel]) -> type[BaseModel]:
    return create_model(kind.__name__, __base__=kind, **{KEY: (Any, None)})  # type: ignore[call-overload]
