"""What the runtime serves, as far as policies depend on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from winnow_kernels.contract.fields import PolicyError
from winnow_kernels.policies.attention_policy import AttentionPolicy, check_against_model, check_served
from winnow_service.errors import InvalidPolicy, RuntimeFailure, RuntimeRefused
from winnow_service.runtime.client import RuntimeClient
from winnow_service.runtime.monitor import RuntimeMonitor

_PATH = "/server_info"
_FORBIDDEN = (401, 403)
# Behind a balancer, one runtime after the other may be replaced while the address answers all the time.
_KNOWN_SECONDS: Final = 60.0


class ServedModel(BaseModel):
    """What SGLang's plugin tells under ``winnow`` in ``/server_info``.

    Attributes:
        context_length: in tokens.
        delta_layers: the Δ-layers calibrated for this model; None if it has not been calibrated.
        policies: the decode policies that its attention backend serves; all serve ``dense``.
        prefill_policies: likewise for prefill.
        verifies: whether it checks drafts.
        sliding_layers: those with a sliding window, where policies do not act.
        linear_layers: those with linear attention, where they do not, either.
        kv_heads: of a layer; None if the runtime does not tell.
        explains: whether it explains what decode steps attend to.
        profile: what it chooses policies by, as it tells it; None if it chooses none.
    """

    model_config = ConfigDict(frozen=True)

    layers: Annotated[int, Field(ge=1)]
    context_length: Annotated[int, Field(ge=1)]
    delta_layers: tuple[int, ...] | None
    policies: tuple[str, ...]
    prefill_policies: tuple[str, ...]
    verifies: bool = False
    sliding_layers: tuple[int, ...] = ()
    linear_layers: tuple[int, ...] = ()
    kv_heads: Annotated[int, Field(ge=1)] | None = None
    explains: bool = False
    profile: Mapping[str, Any] | None = None

    def check(self, policy: AttentionPolicy) -> AttentionPolicy:
        """Return ``policy`` as this model runs it.

        Raises:
            InvalidPolicy: the model, or the runtime as it was started, cannot serve it.
        """
        if not policy.is_dense and {*self.policies, *self.prefill_policies} <= {"dense"}:
            raise _not_served()
        if policy.prefill.policy not in ("dense", *self.prefill_policies):
            raise InvalidPolicy("attention.prefill.policy", f"must be one of {', '.join(self.prefill_policies)}")
        try:
            check_served(policy, self.policies, verifies=self.verifies, calibrated=self.profile is not None)
            return check_against_model(policy, self.layers, self.context_length, self.delta_layers)
        except PolicyError as error:
            raise InvalidPolicy(error.path, error.problem) from None


def _not_served() -> InvalidPolicy:
    return InvalidPolicy("attention", "must be dense: the runtime was started without --attention-backend winnow")


@dataclass(frozen=True)
class _Known:
    start: int
    until: float
    model: ServedModel | None


class ServedModelLookup:
    """Asks the runtime what it serves, whenever it has become ready, and now and then.

    Args:
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        client: RuntimeClient,
        monitor: RuntimeMonitor,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._client = client
        self._monitor = monitor
        self._timeout_seconds = timeout_seconds
        self._known: _Known | None = None

    async def get(self, authorization: str | None) -> ServedModel:
        """Return what the runtime serves.

        Args:
            authorization: the client's, for a runtime that asks for it.

        Raises:
            RuntimeFailure: it did not tell.
            RuntimeRefused: it wants another authorization.
            InvalidPolicy: its attention backend knows no policies.
        """
        start = self._monitor.starts
        known = self._known
        if known is None or known.start != start or self._clock() >= known.until:
            try:
                model = await ask_what_is_served(self._client, authorization, self._timeout_seconds)
            except RuntimeFailure:
                self._monitor.ask_now()
                raise
            known = self._known = _Known(start, self._clock() + _KNOWN_SECONDS, model)
        if known.model is None:
            raise _not_served()
        return known.model


async def ask_what_is_served(
    client: RuntimeClient, authorization: str | None, timeout_seconds: float
) -> ServedModel | None:
    """Return what the runtime serves; None if its attention backend knows no policies.

    Raises:
        RuntimeFailure: it did not tell.
        RuntimeRefused: it wants another authorization.
    """
    headers = {} if authorization is None else {"authorization": authorization}
    answer = await client.get(_PATH, timeout_seconds, headers)
    if answer.status_code in _FORBIDDEN:
        raise RuntimeRefused(answer.status_code)
    if answer.status_code != 200:
        raise _unusable(f"it answered {_PATH} with status {answer.status_code}")
    try:
        reported: Any = from_json(answer.content)
        facts = reported.get("winnow") if isinstance(reported, dict) else None
        return None if facts is None else ServedModel.model_validate(facts)
    except ValidationError as error:
        raise _unusable(f"'winnow' in its {_PATH} is not as expected ({error.error_count()} errors)") from None
    except ValueError:
        raise _unusable(f"its {_PATH} is not JSON") from None


def _unusable(problem: str) -> RuntimeFailure:
    return RuntimeFailure("runtime_unusable", problem=problem)
