"""The policy contract: what a request may ask of its attention, and the one form in which that travels.

A request asks with an ``AttentionPolicy``: how it decodes, how it prefills, and whether reading may stop early.
Every field has a default and bounds. All lengths, budgets and windows are in tokens. A budget is a number of KV tokens
for each KV head and step and holds what a policy always keeps; a budget ratio is of the tokens cached before that step
or block.

The service and the runtime both read policies with ``parse_policy``: this module imports neither torch nor SGLang.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

PAGE_TOKENS: Final = 16
# As many tokens as the longest context that is served anywhere.
MAX_TOKENS: Final = 1_048_576
MAX_WINDOW: Final = 4096
MAX_LAYERS: Final = 1024
MAX_DELTA_LAYERS: Final = 64
MAX_KERNEL_SIZE: Final = 63
# As many tiles of 64 tokens as the longest context has.
MAX_PATIENCE: Final = 16_384

DEFAULT_BUDGET: Final = 1024
DEFAULT_SINKS: Final = 16
DEFAULT_TERMINATION_SCALE: Final = 0.03
DEFAULT_TERMINATION_DIRECTION: Final = 0.01
DEFAULT_TERMINATION_PATIENCE: Final = 4

DENSE_TERMINATION_WARNING: Final = (
    "early_termination over a full cache reads the newest tokens first and loses retrieval: 99.3 -> 78.7 at 32K in"
    " ART's Table 2. Combine it with a sparse decode policy."
)
TACTIC_TAIL_TOKENS: Final = 2048
"""At most so many tokens at the end of a context are in no cluster yet; ``tactic`` reads them and sinks first."""
TACTIC_CAP_WARNING: Final = (
    f"decode.max_tokens is less than the sinks and the {TACTIC_TAIL_TOKENS} newest tokens that tactic may have to read"
    " before anything else: steps that have so many read nothing in between."
)

MAX_POLICY_BYTES: Final = 64 * 1024
MAX_MESSAGE_CHARACTERS: Final = 400
_MAX_QUOTED_CHARACTERS: Final = 40

# What stands where a policy should, when a client believes that policies have names.
_NAME: Final = re.compile(r'"?[A-Za-z0-9_.-]{1,128}"?')
_ROOT: Final = "attention"


class PolicyError(ValueError):
    """A policy that cannot be served. The message is short ASCII: the field's path and what it must be.

    Attributes:
        path: the field, such as ``attention.decode.budget``.
        problem: what is wrong with it, such as ``must be greater than or equal to 16``.
    """

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}"[:MAX_MESSAGE_CHARACTERS])


class _Contract(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True, hide_input_in_errors=True
    )


def _tuple_of_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _default_budget(data: dict[str, Any]) -> int | None:
    return DEFAULT_BUDGET if data.get("budget_ratio") is None else None


def _default_queries(data: dict[str, Any]) -> int:
    return data.get("block", 0) // 2


def _refuse(problem: str) -> NoReturn:
    raise PydanticCustomError("policy", "{problem}", {"problem": problem})


Tokens = Annotated[int, Field(ge=PAGE_TOKENS, le=MAX_TOKENS)]
Ratio = Annotated[float, Field(gt=0, le=1)]
LayerCount = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
Layer = Annotated[int, Field(ge=0, lt=MAX_LAYERS)]


class _Sparse(_Contract):
    """What every sparse policy has.

    Attributes:
        sinks: first tokens of the context, always attended to, inside the budget. A real model's first token may hold
            most of a head's attention (an attention sink); the papers, with 0, leave it to the selection.
    """

    sinks: Annotated[int, Field(ge=0, le=MAX_WINDOW)] = DEFAULT_SINKS


def _beside_sinks(budget: int | None, info: ValidationInfo) -> int | None:
    sinks = info.data.get("sinks")
    if budget is not None and sinks is not None and budget < sinks + PAGE_TOKENS:
        _refuse(f"must be at least {sinks + PAGE_TOKENS}: it holds {sinks} sinks and the newest page; it is {budget}")
    return budget


class _Budgeted(_Sparse):
    """Either ``budget`` tokens or a ``budget_ratio`` of those cached; a ratio takes the place of the default budget."""

    budget_ratio: Ratio | None = None
    budget: Tokens | None = Field(default_factory=_default_budget)

    @field_validator("budget")
    @classmethod
    def _exactly_one(cls, budget: int | None, info: ValidationInfo) -> int | None:
        ratio = info.data.get("budget_ratio")
        if budget is not None and ratio is not None:
            _refuse("must not be given together with budget_ratio")
        if budget is None and ratio is None and "budget_ratio" in info.data:
            _refuse("must be given when budget_ratio is not")
        return _beside_sinks(budget, info)


class _Voted(_Budgeted):
    """What SnapKV and PyramidKV share: the votes of an observation window, max-pooled over neighbouring tokens."""

    kernel_size: Annotated[int, Field(ge=1, le=MAX_KERNEL_SIZE)] = 5

    @field_validator("kernel_size")
    @classmethod
    def _odd(cls, size: int) -> int:
        if size % 2 == 0:
            _refuse("must be odd")
        return size


def _below_budget(window: int, info: ValidationInfo) -> int:
    budget, sinks = info.data.get("budget"), info.data.get("sinks", 0)
    if budget is not None and window + sinks >= budget:
        _refuse(f"must be less than {budget - sinks}: the budget ({budget}) also holds {sinks} sinks; it is {window}")
    return window


class Dense(_Contract):
    """Attend to every token."""

    policy: Literal["dense"] = "dense"


class StreamingLLM(_Sparse):
    """Attend to the first ``sinks`` tokens and the ``window`` newest."""

    policy: Literal["streaming_llm"] = "streaming_llm"
    sinks: Annotated[int, Field(ge=0, le=MAX_WINDOW)] = 4
    window: Tokens = 1024


class Quest(_Sparse):
    """Attend to the pages whose key bounds promise the highest scores; the first ``full_layers`` layers are dense."""

    policy: Literal["quest"] = "quest"
    budget: Tokens = 2048
    full_layers: LayerCount = 2

    _holds_sinks = field_validator("budget")(_beside_sinks)


class SnapKV(_Voted):
    """Attend to the prompt tokens that the last ``observation_window`` of them voted for, and to what is decoded."""

    policy: Literal["snapkv"] = "snapkv"
    observation_window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] = 32

    _fits = field_validator("observation_window")(_below_budget)


class PyramidKV(_Voted):
    """SnapKV with budgets that shrink from layer to layer; ``budget`` and ``budget_ratio`` are the mean over layers.

    The window is SnapKV's. One of 128 tokens reaches far beyond a question: most of its votes are the haystack's.
    """

    policy: Literal["pyramidkv"] = "pyramidkv"
    observation_window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] = 32

    _fits = field_validator("observation_window")(_below_budget)


class Delta(_Sparse):
    """Attend in full at the Δ-layers, and in the layers after each to the pages it found salient.

    Attributes:
        recency: newest tokens that are always kept.
        full_layers: first layers, which are dense.
        delta_layers: numbers of the Δ-layers, ascending; None takes the served model's calibrated profile.
    """

    policy: Literal["delta"] = "delta"
    budget: Tokens = 1024
    recency: Tokens = 128
    full_layers: LayerCount = 2
    delta_layers: (
        Annotated[tuple[Layer, ...], Field(min_length=1, max_length=MAX_DELTA_LAYERS), BeforeValidator(_tuple_of_list)]
        | None
    ) = None

    @field_validator("recency")
    @classmethod
    def _within_budget(cls, recency: int, info: ValidationInfo) -> int:
        budget, sinks = info.data.get("budget"), info.data.get("sinks", 0)
        if budget is not None and recency + sinks > budget:
            most = budget - sinks
            _refuse(f"must be at most {most}: the budget ({budget}) also holds {sinks} sinks; it is {recency}")
        return recency

    @field_validator("delta_layers")
    @classmethod
    def _ascend(cls, layers: tuple[int, ...] | None, info: ValidationInfo) -> tuple[int, ...] | None:
        if layers is None:
            return None
        if any(after <= before for before, after in pairwise(layers)):
            _refuse("must be strictly increasing")
        full_layers = info.data.get("full_layers", 0)
        if layers[0] < full_layers:
            _refuse(f"must be at least full_layers ({full_layers}); the first is {layers[0]}")
        return layers


class Tactic(_Sparse):
    """Attend to the clusters of tokens that together hold the share ``p`` of each query head's attention.

    Sinks, like the newest tokens, are in no cluster: their share of the attention is known exactly.

    Attributes:
        p: share of the attention mass.
        max_tokens: most tokens for each KV head, after the union over its query heads; None for no cap.
        full_layers: first layers, which are dense.
    """

    policy: Literal["tactic"] = "tactic"
    p: Ratio = 0.9
    max_tokens: Tokens | None = None
    full_layers: LayerCount = 2

    _holds_sinks = field_validator("max_tokens")(_beside_sinks)


class QuokaDecode(_Budgeted):
    """Attend to the tokens whose keys score highest for the normalised queries of the step."""

    policy: Literal["quoka"] = "quoka"


class DensePrefill(_Contract):
    """Attend to every token before each query."""

    policy: Literal["dense"] = "dense"


class QuokaPrefill(_Budgeted):
    """Prefill in blocks of queries that share one selection of the tokens before them.

    Attributes:
        block: queries that share a selection.
        queries: how many of a block's queries choose for it; half of the block when not given.
        dense_prefix: leading tokens of the prompt that are prefilled densely.
        recency_ratio: the share of the budget that the tokens right before a block take; 0 as in the paper.
    """

    policy: Literal["quoka"] = "quoka"
    block: Annotated[int, Field(ge=64, le=512, multiple_of=PAGE_TOKENS)] = 128
    queries: Annotated[int, Field(ge=1, le=512)] = Field(default_factory=_default_queries)
    dense_prefix: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    recency_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5

    @field_validator("queries")
    @classmethod
    def _within_block(cls, queries: int, info: ValidationInfo) -> int:
        block = info.data.get("block")
        if block is not None and queries > block:
            _refuse(f"must be at most the block ({block})")
        return queries


class EarlyTermination(_Contract):
    """Stop reading a selection once the running output has been settled for ``patience`` tiles of 64 tokens in a row.

    Attributes:
        scale: most relative change of the output's norm in a settled tile.
        direction: most change of the output's direction in a settled tile, as 1 - cosine.
    """

    scale: Annotated[float, Field(gt=0, le=1)] = DEFAULT_TERMINATION_SCALE
    direction: Annotated[float, Field(gt=0, le=2)] = DEFAULT_TERMINATION_DIRECTION
    patience: Annotated[int, Field(ge=1, le=MAX_PATIENCE)] = DEFAULT_TERMINATION_PATIENCE


DecodePolicy = Annotated[
    Dense | StreamingLLM | Quest | SnapKV | PyramidKV | Delta | Tactic | QuokaDecode, Field(discriminator="policy")
]
PrefillPolicy = Annotated[DensePrefill | QuokaPrefill, Field(discriminator="policy")]

_DECODE_MODELS: Final = (Dense, StreamingLLM, Quest, SnapKV, PyramidKV, Delta, Tactic, QuokaDecode)
_PREFILL_MODELS: Final = (DensePrefill, QuokaPrefill)
_MODELS: Final[Mapping[str, Mapping[str, type[_Contract]]]] = {
    phase: {model.model_fields["policy"].default: model for model in models}
    for phase, models in (("decode", _DECODE_MODELS), ("prefill", _PREFILL_MODELS))
}
DECODE_POLICIES: Final = tuple(_MODELS["decode"])
PREFILL_POLICIES: Final = tuple(_MODELS["prefill"])


class AttentionPolicy(_Contract):
    """How one request's attention is computed."""

    decode: DecodePolicy = Dense()
    prefill: PrefillPolicy = DensePrefill()
    early_termination: EarlyTermination | None = None

    @property
    def is_dense(self) -> bool:
        """Whether the request is served as SGLang itself would serve it."""
        return isinstance(self.decode, Dense) and self.has_dense_prefill and self.early_termination is None

    @property
    def has_dense_prefill(self) -> bool:
        return isinstance(self.prefill, DensePrefill)

    def canonical(self) -> str:
        """Return compact JSON with defaults filled in and keys sorted: equal policies, equal text."""
        return _canonical(self)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that tell policies apart."""
        return _digest(self)

    def prefill_namespace(self) -> str | None:
        """Return the namespace of the KV cache that this prefill policy writes; None for that of dense attention."""
        return None if self.has_dense_prefill else f"winnow-{_digest(self.prefill)}"

    def warnings(self) -> list[str]:
        """Return what the client should know about a policy that is served all the same."""
        if isinstance(self.decode, Dense) and self.early_termination is not None:
            return [DENSE_TERMINATION_WARNING]
        if isinstance(self.decode, Tactic) and self.decode.max_tokens is not None:
            read_first = self.decode.sinks + TACTIC_TAIL_TOKENS
            return [TACTIC_CAP_WARNING] if self.decode.max_tokens < read_first else []
        return []


def parse_policy(policy: str | Mapping[str, Any]) -> AttentionPolicy:
    """Read a policy from JSON text, or from an object that was read from JSON.

    Raises:
        PolicyError: it cannot be served, whatever the model.
    """
    if isinstance(policy, str) and _NAME.fullmatch(policy):
        raise PolicyError(_ROOT, 'must be an object such as {"decode": {"policy": "dense"}}, not the name of a policy')
    value = _read_json(policy) if isinstance(policy, str) else policy
    if not isinstance(value, Mapping):
        raise PolicyError(_ROOT, "must be an object")
    try:
        return AttentionPolicy.model_validate(dict(value))
    except ValidationError as error:
        raise _policy_error(error) from None


def check_against_model(
    policy: AttentionPolicy, layers: int, context_length: int, delta_profile: Sequence[int] | None
) -> AttentionPolicy:
    """Return ``policy`` as the served model runs it: with its Δ-layers named.

    Args:
        layers: how many layers the model has.
        context_length: the model's, in tokens.
        delta_profile: the Δ-layers calibrated for this model; None if it has not been calibrated.

    Raises:
        PolicyError: the model cannot serve it.
    """
    decode, prefill = policy.decode, policy.prefill
    if isinstance(decode, SnapKV | PyramidKV) and decode.observation_window > context_length:
        _beyond_context("decode.observation_window", context_length)
    if isinstance(prefill, QuokaPrefill) and prefill.dense_prefix > context_length:
        _beyond_context("prefill.dense_prefix", context_length)
    if isinstance(decode, Delta):
        return policy.model_copy(update={"decode": _with_delta_layers(decode, layers, delta_profile)})
    return policy


def json_schema() -> dict[str, Any]:
    """Return the contract as a JSON Schema. Bounds between fields, such as recency and budget, are not in it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **AttentionPolicy.model_json_schema()}


def _canonical(model: BaseModel) -> str:
    return json.dumps(
        model.model_dump(mode="json", exclude_none=True), sort_keys=True, separators=(",", ":"), allow_nan=False
    )


def _digest(model: BaseModel) -> str:
    return hashlib.sha256(_canonical(model).encode()).hexdigest()[:16]


def _with_delta_layers(decode: Delta, layers: int, profile: Sequence[int] | None) -> Delta:
    path = f"{_ROOT}.decode.delta_layers"
    if decode.delta_layers is not None:
        if decode.delta_layers[-1] >= layers:
            raise PolicyError(path, f"must be at most {layers - 1}: the model has {layers} layers, counted from 0")
        return decode
    if not profile:
        raise PolicyError(
            path,
            "must be given: this model has no calibrated profile; name the layers, or run `winnow calibrate delta`",
        )
    if profile[0] < decode.full_layers:
        raise PolicyError(
            f"{_ROOT}.decode.full_layers",
            f"must be at most {profile[0]}, the first layer of the model's profile, when delta_layers is not given",
        )
    return decode.model_copy(update={"delta_layers": tuple(profile)})


def _beyond_context(field: str, context_length: int) -> NoReturn:
    raise PolicyError(f"{_ROOT}.{field}", f"must be at most {context_length}, the model's context length")


def _read_json(text: str) -> object:
    if len(text) > MAX_POLICY_BYTES or len(text.encode(errors="surrogatepass")) > MAX_POLICY_BYTES:
        raise PolicyError(_ROOT, f"must be at most {MAX_POLICY_BYTES} bytes of JSON")
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except PolicyError:
        raise
    except RecursionError:
        raise PolicyError(_ROOT, "is nested too deeply") from None
    except ValueError as error:
        where = f" (character {error.pos + 1})" if isinstance(error, json.JSONDecodeError) else ""
        raise PolicyError(_ROOT, f"must be a JSON object; this is not valid JSON{where}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise PolicyError(_ROOT, f"has the field {_quoted(next(n for n in names if names.count(n) > 1))} twice")
    return members


def _refuse_constant(_: str) -> NoReturn:
    raise PolicyError(_ROOT, "must be JSON, which has neither NaN nor Infinity")


def _policy_error(error: ValidationError) -> PolicyError:
    # What else is wrong shows when this is put right.
    first = error.errors(include_url=False, include_input=False)[0]
    location = first["loc"]
    models = _MODELS.get(str(location[0]), {})
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return PolicyError(_path([*location, "policy"]), f"must be one of {', '.join(models)}")
    model: type[_Contract] = AttentionPolicy
    if len(location) > 1 and models:
        # The name of the policy is pydantic's part of the path, not the client's.
        model = models[str(location[1])]
        location = (location[0], *location[2:])
    elif len(location) > 1:
        model = EarlyTermination
    if first["type"] == "extra_forbidden" and len(location) > 1 and location[-1] in AttentionPolicy.model_fields:
        return PolicyError(_path(location), f"unknown field; it belongs beside '{location[0]}', not into it")
    return PolicyError(_path(location), _problem(first["type"], first["msg"], model))


def _problem(kind: str, message: str, model: type[_Contract]) -> str:
    match kind:
        case "extra_forbidden":
            # What tells the kind comes first, wherever it is inherited from.
            names = sorted(model.model_fields, key=lambda name: name != "policy")
            return f"unknown field; there are {', '.join(names)}"
        case "model_type" | "model_attributes_type":
            return "must be an object"
        case "tuple_type":
            return "must be a list"
        case "too_short":
            return "must have at least 1 item"
        case "too_long":
            return f"must have at most {MAX_DELTA_LAYERS} items"
        case _:
            return message.replace("Input should be", "must be", 1)


def _path(location: Sequence[str | int]) -> str:
    return ".".join([_ROOT, *(_quoted(str(part)) for part in location)])


def _quoted(text: str) -> str:
    """Return what a client named, as short printable ASCII."""
    return text[:_MAX_QUOTED_CHARACTERS].encode("unicode_escape").decode()[:_MAX_QUOTED_CHARACTERS]
