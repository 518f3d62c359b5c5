"""What a profile may have beside its curves: speed on one machine, early termination, and drafts for ``verify``.

All are of decode steps after a dense prefill, of the same policies and lengths as the curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.policies.attention_policy import AttentionPolicy

FROZEN: Final = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

_Length = Annotated[int, Field(ge=1)]
_Ratio = Annotated[float, Field(ge=0)]
_Seconds = Annotated[float, Field(gt=0)]


class DenseTime(BaseModel):
    """Dense attention at one length.

    Attributes:
        length: tokens of the prompt.
        seconds: that attention took in a decode step, all layers together: the median over steps.
    """

    model_config = FROZEN

    length: _Length
    seconds: _Seconds


class TimedPoint(DenseTime):
    """A policy at one length.

    Attributes:
        ratio: the median over steps of what it took in a step, relative to dense attention in the same step.
    """

    ratio: Annotated[float, Field(gt=0)]


class TimedPolicy(BaseModel):
    """How long a policy's decode steps take, by length."""

    model_config = FROZEN

    attention: AttentionPolicy
    points: Annotated[tuple[TimedPoint, ...], Field(min_length=1)]

    def at(self, length: int) -> TimedPoint | None:
        """Return the point at exactly this length."""
        return next((point for point in self.points if point.length == length), None)

    @property
    def faster_from(self) -> int | None:
        """The shortest measured length from which on it was faster than dense attention; None if it was not at last."""
        found = None
        for point in reversed(self.points):
            if point.ratio >= 1:
                break
            found = point.length
        return found


class Speed(BaseModel):
    """Time of attention in decode steps of one request, measured on the device that the profile names.

    Attributes:
        threads: of torch, by which times on a CPU differ; None where a GPU was measured.
        steps: that were timed at each length.
        dense: dense attention, by length.
        policies: those that were timed beside it.
    """

    model_config = FROZEN

    threads: Annotated[int, Field(ge=1)] | None
    steps: Annotated[int, Field(ge=1)]
    dense: Annotated[tuple[DenseTime, ...], Field(min_length=1)]
    policies: tuple[TimedPolicy, ...]

    def of(self, attention: AttentionPolicy) -> TimedPolicy | None:
        """Return the figures of a policy's decode steps, whatever its prefill."""
        wanted = decoded(attention)
        return next((timed for timed in self.policies if timed.attention == wanted), None)


class StoppedPoint(BaseModel):
    """A policy with early termination at one length.

    Attributes:
        length: tokens of a prompt.
        error: distance of attention's outputs from those without early termination, relative to these: a mean over
            layers, query heads, tokens and prompts.
        worst: the largest of the prompts' means.
        kv_read_ratio: bytes read, of those that dense attention reads.
        kv_read_ratio_to_the_end: the same without early termination.
    """

    model_config = FROZEN

    length: _Length
    error: _Ratio
    worst: _Ratio
    kv_read_ratio: _Ratio
    kv_read_ratio_to_the_end: _Ratio


class StoppedPolicy(BaseModel):
    """A policy with one set of thresholds, by length."""

    model_config = FROZEN

    attention: AttentionPolicy
    early_termination: EarlyTermination
    points: Annotated[tuple[StoppedPoint, ...], Field(min_length=1)]

    def at(self, length: int) -> StoppedPoint | None:
        """Return the point at exactly this length."""
        return next((point for point in self.points if point.length == length), None)


class KeptThresholds(BaseModel):
    """The thresholds to use beside a policy; None where all that were measured lose more than the stated error."""

    model_config = FROZEN

    attention: AttentionPolicy
    early_termination: EarlyTermination | None


class Stopping(BaseModel):
    """What early termination loses and reads, and the thresholds that keep an error.

    Attributes:
        max_error: the error that thresholds are to keep.
        prompts: of each length.
        tokens: behind each.
        policies: each with each set of thresholds.
        kept: of each policy the thresholds that read least of those that keep the error on every prompt.
    """

    model_config = FROZEN

    max_error: Annotated[float, Field(gt=0)]
    prompts: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    policies: tuple[StoppedPolicy, ...]
    kept: tuple[KeptThresholds, ...]


class DraftPoint(BaseModel):
    """Drafts of one number for each check, at one length.

    Attributes:
        length: tokens of a prompt.
        draft_tokens: drafted before a check.
        tokens_per_check: that stand after it, with the one that the check itself says.
        kv_read_ratio: bytes that drafts and checks read, of those that dense decoding of as many tokens reads.
    """

    model_config = FROZEN

    length: _Length
    draft_tokens: Annotated[int, Field(ge=1)]
    tokens_per_check: Annotated[float, Field(ge=1)]
    kv_read_ratio: _Ratio


class DraftingPolicy(BaseModel):
    """A policy that drafts, by length and number of drafts."""

    model_config = FROZEN

    attention: AttentionPolicy
    points: tuple[DraftPoint, ...]

    def at(self, length: int) -> Sequence[DraftPoint]:
        """Return the points of one length, fewest drafts first."""
        return [point for point in self.points if point.length == length]


class Drafts(BaseModel):
    """How many drafts of each policy stand, along the answers that dense attention gives greedily.

    Attributes:
        prompts: of each length.
        tokens: of each answer.
        policies: those that draft.
    """

    model_config = FROZEN

    prompts: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    policies: tuple[DraftingPolicy, ...]


def decoded(attention: AttentionPolicy) -> AttentionPolicy:
    """Return the part of a policy that its decode steps go by."""
    return AttentionPolicy(decode=attention.decode, early_termination=attention.early_termination)


def kept_thresholds(policies: Sequence[StoppedPolicy], max_error: float) -> tuple[KeptThresholds, ...]:
    """Return of each policy the thresholds that read least of those that keep an error on every prompt.

    What is read is a mean over lengths. Thresholds with which a policy reads no less than without are none.
    """
    by_policy: dict[str, list[StoppedPolicy]] = {}
    for each in policies:
        by_policy.setdefault(each.attention.canonical(), []).append(each)
    return tuple(
        KeptThresholds(attention=own[0].attention, early_termination=_best(own, max_error))
        for own in by_policy.values()
    )


def _best(policies: Sequence[StoppedPolicy], max_error: float) -> EarlyTermination | None:
    found: list[tuple[float, Any]] = []
    for each in policies:
        saved = sum(point.kv_read_ratio_to_the_end - point.kv_read_ratio for point in each.points)
        if saved > 0 and all(point.worst <= max_error for point in each.points):
            found.append((saved, each.early_termination))
    return max(found, key=lambda each: each[0], default=(0.0, None))[1]
