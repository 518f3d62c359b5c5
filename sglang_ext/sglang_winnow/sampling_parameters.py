"""What ``sampling_params`` of a request may hold.

SGLang checks part of it, and some values that it lets through end the scheduler: they overflow a tensor's type, index
past the vocabulary or divide by zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 128
# Finite as 32-bit floats through every step of sampling.
MAX_TEMPERATURE = 1e6
MIN_REPETITION_PENALTY = 1e-6
MAX_LOGIT_BIAS = 1e9
# What SGLang takes for "the whole vocabulary".
MAX_TOP_K = 2**30


@dataclass(frozen=True)
class Vocabulary:
    """The context that ``SamplingParameters`` is validated with."""

    size: int


def token_id(value: int | str, info: ValidationInfo) -> int:
    """Return the token id; one outside the vocabulary, the validation context, is a ValueError."""
    size = info.context.size  # type: ignore[union-attr]
    number = int(value)
    if not 0 <= number < size:
        raise ValueError(f"token ids must be from 0 to {size - 1}")
    return number


def _refuse_regex(value: object) -> None:
    # Python's ``re`` runs on the scheduler's thread: an expression that backtracks stalls every request.
    if value:
        raise ValueError("not supported; use stop or stop_token_ids")


TokenId = Annotated[int, AfterValidator(token_id)]
# An id as a key of a JSON object. Leading zeros, signs and so on are no token id.
TokenIdKey = Annotated[str, Field(pattern="^[0-9]{1,10}$"), AfterValidator(token_id)]
Scalar = bool | int | float | str | None
StopString = Annotated[str, Field(max_length=4096)]


class SamplingParameters(BaseModel):
    """Every parameter that a client may set; ``None`` is SGLang's default. Validate with a ``Vocabulary`` context."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    max_new_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    min_new_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    temperature: float | None = Field(None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=2)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[TokenId | None] | set[TokenId] | None = None
    stop_regex: Annotated[None, BeforeValidator(_refuse_regex)] = None
    logit_bias: dict[TokenIdKey, Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    stream_interval: int | None = Field(None, ge=1, le=INT32_MAX)
    sampling_seed: int | None = Field(None, ge=-INT64_MAX - 1, le=INT64_MAX)
    custom_params: dict[str, Scalar | list[Scalar] | dict[str, Scalar]] | None = None

    @field_validator("min_new_tokens")
    @classmethod
    def _at_most_max_new_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        most = info.data.get("max_new_tokens")
        if value is not None and most is not None and value > most:
            raise ValueError(f"at most max_new_tokens, which is {most}")
        return value
