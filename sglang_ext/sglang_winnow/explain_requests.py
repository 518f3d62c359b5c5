"""Which requests ask to have their decode steps explained, and which of them may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from winnow_kernels.contract.explanation import PARAMETER, Explain, parse_explain
from winnow_kernels.contract.fields import PolicyError

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

    from sglang_winnow.server_information import ServedModel
    from winnow_kernels.policies.attention_policy import AttentionPolicy


def explanation_of(
    custom_params: Mapping[str, Any] | None, model: ServedModel, policy: AttentionPolicy
) -> Explain | None:
    """Return what a request's ``custom_params`` ask to have explained; None if that is nothing.

    Raises:
        PolicyError: it cannot be served.
    """
    text = (custom_params or {}).get(PARAMETER)
    if text is None:
        return None
    if model.explains_not is not None:
        raise PolicyError(PARAMETER, f"is not served {model.explains_not}")
    asked = parse_explain(text)
    asked.check_model(model.layers, model.sliding_layers, model.kv_heads, model.linear_layers)
    if policy.verify is not None:
        raise PolicyError(
            PARAMETER, "must not be given together with attention.verify: its answer is dense attention's"
        )
    if policy.decode.releases_prompt:
        raise PolicyError(PARAMETER, "must not be given together with attention.decode.release: the prompt is gone")
    return asked


def note_explained_prompt(
    request: GenerateReqInput | EmbeddingReqInput, ids: Sequence[int], custom_params: Mapping[str, Any] | None
) -> None:
    """Note the prompt of a request that is explained, as ``winnow_prompt``: its tokens, and its text if it has one.

    Raises:
        PolicyError: the explanation would be too long.
    """
    if (text := (custom_params or {}).get(PARAMETER)) is None:
        return
    parse_explain(text).check_size(len(ids))
    request.winnow_prompt = (list(ids), request.text)
