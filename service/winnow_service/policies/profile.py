"""What policies lose and read on the served model, by length, as clients read it."""

from __future__ import annotations

from pydantic import BaseModel

from winnow_service.policies.resource import Inline


class ProfilePoint(BaseModel):
    """A policy at one length. Figures are means over prompts.

    Attributes:
        length: tokens of a prompt.
        prompts: how many.
        kl: KL(dense ‖ policy) of the next token, in nats.
        kl_high: upper end of its 95 % interval, which the runtime chooses by.
        top1: share of the tokens that both rank first.
        top1_low: lower end of its 95 % interval, which the runtime chooses by.
        true_share: attention mass of what was read; null of a prefill.
        kv_read_ratio: bytes read of those that dense attention reads: in decode, or in prefill if the decode is dense.
    """

    length: int
    prompts: int
    kl: float
    kl_high: float
    top1: float
    top1_low: float
    true_share: float | None
    kv_read_ratio: float


class ProfileTime(BaseModel):
    """Time of attention in a decode step of one request, all layers together.

    Attributes:
        seconds: the median over steps.
        ratio: the median over steps of what it took, relative to dense attention in the same step.
    """

    seconds: float
    ratio: float


class CurvePoint(ProfilePoint):
    """A point of a curve.

    Attributes:
        time: of the policy's decode steps at this length, on the profile's device; null where it was not measured.
    """

    time: ProfileTime | None


class ProfileCurve(BaseModel):
    """A policy at the lengths that it was measured at: those that its budget does not hold.

    Attributes:
        attention: with every default filled in.
        served: whether the runtime serves it; if not, it does not choose it either.
    """

    attention: Inline
    served: bool
    points: list[CurvePoint]


class ProfileData(BaseModel):
    """What was measured on.

    Attributes:
        source: where the texts are from.
        prompts: of each length.
        tokens: predicted behind each prompt.
    """

    source: str
    prompts: int
    tokens: int


class ModelProfile(BaseModel):
    """What ``winnow calibrate profile`` has measured of the model, and the runtime chooses policies by.

    Attributes:
        model: the name of its folder when it was measured.
        kl: the bound, in nats, that the runtime keeps for requests that leave the quality to it.
        under_load_kl: the bound that it keeps for them under load; null if that is ``kl``.
        load_requests: how many others make load; null where nothing does.
        times_are_of_this_machine: whether the profile has times, and they were measured on the runtime's machine. It
            goes by them only then.
        device: that was measured on.
        dtype: of weights and activations there.
        date: when that was.
        lengths: tokens of a prompt, ascending.
        floor: dense attention beside itself, computed once more: nothing can be told from it that is as near.
    """

    model: str
    kl: float
    under_load_kl: float | None
    load_requests: int | None
    times_are_of_this_machine: bool
    device: str
    dtype: str
    date: str
    data: ProfileData
    lengths: list[int]
    floor: list[ProfilePoint]
    curves: list[ProfileCurve]
