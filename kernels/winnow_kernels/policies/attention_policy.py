"""The policy of a request: what it may ask of its attention, and the one form in which that travels.

A request asks with an ``AttentionPolicy``: how it decodes, how it prefills, whether reading may stop early, and whether
what it decodes is verified; or how near to dense attention its answer must be, and the runtime chooses.
Every field has a default and bounds.

The service and the runtime both read policies with ``parse_policy``: this module imports neither torch nor SGLang.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NoReturn

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator

from winnow_kernels.contract.audit import Audit, AuditedSteps
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.contract.fields import Contract, ModelFacts, PolicyError, refuse
from winnow_kernels.contract.verification import ALGORITHM, Verification
from winnow_kernels.policies.bounds import PolicyBounds
from winnow_kernels.policies.delta.parameters import MAX_DELTA_LAYERS
from winnow_kernels.policies.dense.parameters import Dense, DensePrefill
from winnow_kernels.policies.quality import Quality, UnderLoad
from winnow_kernels.policies.registry import (
    DECODE_POLICIES,
    PARAMETERS,
    POLICIES_SETTING,
    DecodePolicy,
    PrefillPolicy,
)

DENSE_TERMINATION_WARNING: Final = (
    "early_termination over a full cache reads the newest tokens first and loses retrieval: 99.3 -> 78.7 at 32K in"
    " ART's Table 2. Combine it with a sparse decode policy."
)

MAX_POLICY_BYTES: Final = 64 * 1024
_MAX_QUOTED_CHARACTERS: Final = 40

# What stands where a policy should, when a client believes that policies have names.
_NAME: Final = re.compile(r'"?[A-Za-z0-9_.-]{1,128}"?')
_ROOT: Final = "attention"
_NO_PROFILE: Final = (
    "no policy can be chosen: the server has no profile of its model; run `winnow calibrate profile --model MODEL`"
    " and start the server with WINNOW_PROFILE=MODEL-profile.json"
)
_PARTS: Final[Mapping[str, type[BaseModel]]] = {
    "early_termination": EarlyTermination,
    "verify": Verification,
    "quality": Quality,
    "audit": Audit,
}
_PROBLEMS: Final = {
    "missing": "must be given",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "tuple_type": "must be a list",
    "too_short": "must have at least 1 item",
    "too_long": f"must have at most {MAX_DELTA_LAYERS} items",
}
"""What is wrong, in Winnow's words, by pydantic's type of the error."""
_PARTS_OF_QUALITY: Final[Mapping[str, type[BaseModel]]] = {"under_load": UnderLoad, "within": PolicyBounds}


class AttentionPolicy(Contract):
    """How one request's attention is computed.

    Attributes:
        verify: whether what is decoded is a draft that a dense step checks. The answer, and the KV that is kept of it,
            are then dense attention's.
        keep: whether the KV of the answer, which is not dense, is kept for later turns with the same policy, which
            then need not compute it. Such requests share prefixes, prompts too, among themselves alone. A dense answer
            is kept for everybody, whatever this says.
        audit: the share of decode steps that are computed densely, too, to tell what they lost; None for the server's.
            An object says of them whether the next token is compared, too.
        quality: what the answer must keep; the runtime chooses ``decode``, ``prefill`` and ``early_termination`` by it.
    """

    decode: DecodePolicy = Dense()
    prefill: PrefillPolicy = DensePrefill()
    early_termination: EarlyTermination | None = None
    verify: Verification | None = None
    # Left out where it is false: runtimes that do not know it serve all other policies.
    keep: bool = Field(default=False, exclude_if=operator.not_)
    audit: AuditedSteps | None = Field(default=None, exclude_if=lambda audit: audit is None)
    quality: Quality | None = Field(default=None, exclude_if=lambda quality: quality is None)

    @field_validator("verify")
    @classmethod
    def _of_sparse_drafts(cls, verify: Verification | None, info: ValidationInfo) -> Verification | None:
        if verify is not None and isinstance(info.data.get("decode"), Dense):
            refuse("needs a sparse decode policy to draft with; decode.policy is dense")
        if verify is not None and not isinstance(info.data.get("prefill", DensePrefill()), DensePrefill):
            refuse("needs a dense prefill: after a sparse one the answer would not be dense attention's")
        if verify is not None and (decode := info.data.get("decode")) is not None and decode.releases_prompt:
            refuse("must not be given together with decode.release: a check reads the whole prompt")
        if verify is None and (decode := info.data.get("decode")) is not None and decode.drafts_only:
            refuse(f"must be given: decode.policy is {decode.policy}, which drafts from what checks have read")
        return verify

    @field_validator("keep")
    @classmethod
    def _not_of_verified(cls, keep: bool, info: ValidationInfo) -> bool:
        if keep and info.data.get("verify") is not None:
            refuse("must not be given together with verify, whose answer is kept for everybody")
        if keep and (decode := info.data.get("decode")) is not None and decode.releases_prompt:
            refuse("must not be given together with decode.release: nothing of the prompt is kept")
        return keep

    @field_validator("audit")
    @classmethod
    def _not_of_dense_answers(cls, audit: float | Audit | None, info: ValidationInfo) -> float | Audit | None:
        share = _share_of(audit)
        if share and info.data.get("verify") is not None:
            refuse("must not be given together with verify, which checks every token")
        if share and (decode := info.data.get("decode")) is not None and decode.releases_prompt:
            refuse("must not be given together with decode.release: the rest of the prompt is gone")
        return audit

    @field_validator("quality")
    @classmethod
    def _alone(cls, quality: Quality | None, info: ValidationInfo) -> Quality | None:
        chosen = {"decode": Dense(), "prefill": DensePrefill(), "early_termination": None, "verify": None}
        for name, unless in chosen.items() if quality is not None else ():
            if info.data.get(name, unless) != unless:
                refuse(f"must not be given together with {name}: the server chooses how to keep it")
        if quality is not None and info.data.get("keep"):
            refuse("must not be given together with keep: the next turn may have another policy")
        return quality

    @property
    def is_dense(self) -> bool:
        """Whether the request is served as SGLang itself would serve it."""
        is_chosen = self.quality is not None
        has_dense_phases = isinstance(self.decode, Dense) and self.has_dense_prefill
        return has_dense_phases and self.early_termination is None and not is_chosen

    @property
    def answers_densely(self) -> bool:
        """Whether the KV of what the request generates is dense attention's."""
        return self.is_dense or self.verify is not None

    @property
    def has_dense_prefill(self) -> bool:
        return isinstance(self.prefill, DensePrefill)

    @property
    def audit_share(self) -> float | None:
        """The share of decode steps that is audited; None for the server's."""
        return _share_of(self.audit)

    @property
    def audits_next_token(self) -> bool:
        """Whether audited steps tell how far the distribution of the next token is from dense attention's."""
        return isinstance(self.audit, Audit)

    def canonical(self) -> str:
        """Return compact JSON with defaults filled in and keys sorted: equal policies, equal text."""
        return _canonical(self)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that tell policies apart."""
        return _digest(self)

    @property
    def keeps_sparse_answer(self) -> bool:
        """Whether KV that is not dense attention's is kept of what the request generates."""
        return self.keep and not self.is_dense

    def namespace(self) -> str | None:
        """Return the namespace of the KV cache that the request reads and writes; None for that of dense attention.

        It is of all that decides the KV which is kept: of the prompt, and of an answer that is to be kept.
        """
        if self.keeps_sparse_answer:
            return f"winnow-kept-{_digest(self.model_copy(update={'audit': None}))}"
        return None if self.has_dense_prefill else f"winnow-{_digest(self.prefill)}"

    def warnings(self) -> list[str]:
        """Return what the client should know about a policy that is served all the same."""
        if isinstance(self.decode, Dense) and self.early_termination is not None:
            return [DENSE_TERMINATION_WARNING]
        return [*self.decode.warnings(), *self.prefill.warnings()]


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


def check_served(policy: AttentionPolicy, served: Collection[str], *, verifies: bool, calibrated: bool) -> None:
    """Refuse what a server was not started to serve: a decode policy, verification, or choosing policies.

    Args:
        policy: of a request.
        served: the server's decode policies.
        verifies: whether it checks drafts.
        calibrated: whether it has a profile of its model.

    Raises:
        PolicyError: it names the setting, or the flag, that would serve it too.
    """
    if policy.quality is not None and not calibrated:
        raise PolicyError(f"{_ROOT}.quality", _NO_PROFILE)
    if policy.verify is not None and not verifies:
        flag = f"--speculative-algorithm {ALGORITHM}"
        raise PolicyError(f"{_ROOT}.verify", f"is not served here; start the server with {flag}")
    name = policy.decode.policy
    if name not in {"dense", *served}:
        raise PolicyError(f"{_ROOT}.decode.policy", f"{name} is not served here; set {setting_for([*served, name])}")


def setting_for(policies: Collection[str]) -> str:
    """Return the setting, as ``NAME=value``, with which a server serves these decode policies."""
    return f"{POLICIES_SETTING}={','.join(name for name in DECODE_POLICIES if name in policies and name != 'dense')}"


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
    model = ModelFacts(layers, context_length, delta_profile)
    of_phases = {}
    for phase in PARAMETERS:
        try:
            of_phases[phase] = getattr(policy, phase).for_model(model)
        except PolicyError as error:
            raise PolicyError(f"{_ROOT}.{phase}.{error.path}", error.problem) from None
    return policy.model_copy(update=of_phases)


def json_schema() -> dict[str, Any]:
    """Return the contract as a JSON Schema. Bounds between fields, such as recency and budget, are not in it."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **AttentionPolicy.model_json_schema()}


def _share_of(audit: float | Audit | None) -> float | None:
    return audit.share if isinstance(audit, Audit) else audit


def _canonical(model: BaseModel) -> str:
    return json.dumps(
        model.model_dump(mode="json", exclude_none=True), sort_keys=True, separators=(",", ":"), allow_nan=False
    )


def _digest(model: BaseModel) -> str:
    return hashlib.sha256(_canonical(model).encode()).hexdigest()[:16]


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
    if location[:1] == ("audit",):
        # Which of its two forms it has is pydantic's part of the path, not the client's.
        location = (location[0], *location[2:])
    models = PARAMETERS.get(str(location[0]), {})
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return PolicyError(_path([*location, "policy"]), f"must be one of {', '.join(models)}")
    model: type[BaseModel] = AttentionPolicy
    if len(location) > 1 and models:
        # The name of the policy is pydantic's part of the path, not the client's.
        model = models[str(location[1])]
        location = (location[0], *location[2:])
    elif len(location) > 1:
        parts = _PARTS_OF_QUALITY if len(location) > 2 else {}
        model = parts.get(str(location[1]), _PARTS[str(location[0])])
    if first["type"] == "extra_forbidden" and len(location) > 1 and location[-1] in AttentionPolicy.model_fields:
        return PolicyError(_path(location), f"unknown field; it belongs beside '{location[0]}', not into it")
    return PolicyError(_path(location), _problem(first["type"], first["msg"], model))


def _problem(kind: str, message: str, model: type[BaseModel]) -> str:
    if kind == "extra_forbidden":
        # What tells the kind comes first, wherever it is inherited from.
        names = sorted(model.model_fields, key=lambda name: name != "policy")
        return f"unknown field; there are {', '.join(names)}"
    return _PROBLEMS.get(kind) or message.removeprefix("Value error, ").replace("Input should be", "must be", 1)


def _path(location: Sequence[str | int]) -> str:
    return ".".join([_ROOT, *(_quoted(str(part)) for part in location)])


def _quoted(text: str) -> str:
    """Return what a client named, as short printable ASCII."""
    return text[:_MAX_QUOTED_CHARACTERS].encode("unicode_escape").decode()[:_MAX_QUOTED_CHARACTERS]
