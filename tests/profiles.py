"""Profiles with made-up figures, for servers that choose policies in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_winnow.profile_parts import Speed
from sglang_winnow.quality_profile import Curve, Data, ModelIdentity, Point, Profile
from winnow_kernels.policies.attention_policy import parse_policy

Figures = tuple[float, float, float]
"""KL, equal first tokens, KV read."""


def point(length: int, figures: Figures, true_share: float | None = None) -> Point:
    """Return a point without intervals."""
    kl, top1, read = figures
    return Point(
        length=length, prompts=1, kl=kl, kl_high=kl, top1=top1, top1_low=top1, true_share=true_share, kv_read_ratio=read
    )


def curve(policy: Mapping[str, Any], figures: Mapping[int, Figures], true_share: float | None = None) -> Curve:
    """Return a policy's figures by length."""
    points = tuple(point(length, of_length, true_share) for length, of_length in figures.items())
    return Curve(attention=parse_policy(policy), points=points)


def profile(model: Path, lengths: Sequence[int], curves: Sequence[Curve], speed: Speed | None = None) -> Profile:
    """Return a profile of the model in a folder."""
    return Profile(
        model=ModelIdentity.of(model),
        device="made up",
        dtype="float32",
        key_bits=2,
        versions={},
        commit=None,
        date="2026-11-26T00:00:00+00:00",
        seconds={"quality": 0},
        data=Data(source="made up", sha256="", prompts=1, tokens=1, scored=1),
        delta_layers=None,
        lengths=tuple(lengths),
        floor=tuple(point(length, (0.0, 1.0, 1.0)) for length in lengths),
        curves=tuple(curves),
        speed=speed,
        early_termination=None,
        drafts=None,
    )
