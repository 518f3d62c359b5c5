"""What policies lose and read on one model, by length: ``winnow calibrate profile`` writes it, a server chooses by it.

A curve is of one policy, a point of it of one length. The figures of a point are means over prompts; ``kl_high`` and
``top1_low`` are the worse ends of their 95 % intervals, and what a choice goes by. What else a profile may have is in
``profile_parts``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from sglang_winnow.delta_profiles import config_hash, layer_count
from sglang_winnow.profile_parts import FROZEN, Drafts, Speed, Stopping, TimedPoint
from winnow_kernels.policies.attention_policy import AttentionPolicy

VERSION: Final = 2
MAX_PREFILLS: Final = 2
"""With more, the turns of a conversation would be spread over more parts of the prefix cache."""
_TAIL_BYTES: Final = 2**20
"""Of each file of weights: enough to tell weights apart, and little to read."""

_Share = Annotated[float, Field(ge=0, le=1)]


class ModelIdentity(BaseModel):
    """Which model it is.

    Attributes:
        name: its folder's.
        layers: how many it has; None if its configuration does not say.
        config_sha256: of its configuration, without what tools add.
        weights_sha256: of the names, the sizes and the last mebibytes of its files of weights.
    """

    model_config = FROZEN

    name: str
    layers: int | None
    config_sha256: str
    weights_sha256: str

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Return the identity of the model in ``folder``.

        Raises:
            OSError: it cannot be read.
        """
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        return cls(
            name=folder.resolve().name,
            layers=layer_count(config),
            config_sha256=config_hash(config),
            weights_sha256=_weights_hash(folder),
        )


class Data(BaseModel):
    """What was measured on.

    Attributes:
        source: where the texts are from.
        sha256: of the tokens of all prompts and of what follows them.
        prompts: of each length.
        tokens: predicted behind each prompt.
        scored: last tokens of a prompt that tell of its prefill.
    """

    model_config = FROZEN

    source: str
    sha256: str
    prompts: int
    tokens: int
    scored: int


class Point(BaseModel):
    """A policy at one length.

    Attributes:
        length: tokens of a prompt.
        prompts: how many.
        kl: KL(dense ‖ policy) of the next token, in nats.
        kl_high: upper end of its interval.
        top1: share of the tokens that both rank first.
        top1_low: lower end of its interval.
        true_share: attention mass of what was read, a mean over layers and query heads; None of a prefill.
        kv_read_ratio: bytes read, indexes included, of those that dense attention reads: in decode, or in prefill if
            the decode is dense.
    """

    model_config = FROZEN

    length: Annotated[int, Field(ge=1)]
    prompts: Annotated[int, Field(ge=1)]
    kl: Annotated[float, Field(ge=0)]
    kl_high: Annotated[float, Field(ge=0)]
    top1: _Share
    top1_low: _Share
    true_share: _Share | None
    kv_read_ratio: Annotated[float, Field(ge=0)]


class Curve(BaseModel):
    """A policy at the lengths that it was measured at. Where its budget holds the whole prompt it was not."""

    model_config = FROZEN

    attention: AttentionPolicy
    points: Annotated[tuple[Point, ...], Field(min_length=1)]

    def at(self, length: int) -> Point | None:
        """Return the point at exactly this length."""
        return next((point for point in self.points if point.length == length), None)

    @model_validator(mode="after")
    def _chooses_and_keeps_nothing(self) -> Self:
        attention = self.attention
        if attention.verify is not None or attention.keep or attention.audit or attention.decode.releases_prompt:
            raise ValueError("a curve is of a policy without verify, keep, audit and release")
        return self


class Profile(BaseModel):
    """Curves of one model, and what they were measured with.

    Attributes:
        dtype: of weights and activations.
        seconds: that each part of the calibration took.
        key_bits: bits of a channel of low-bit keys.
        delta_layers: the Δ-layers calibrated for the model; None if it has not been calibrated.
        lengths: tokens of a prompt, ascending.
        floor: dense attention, computed once more one prompt at a time: no policy can be told from it that is as near.
        curves: of each policy, those with a sparse prefill among them.
        speed: of decode steps on ``device``; None if it was not measured, as the two below.
        early_termination: what it loses beside the policies, and the thresholds to use.
        drafts: how many stand.
    """

    model_config = FROZEN

    version: Literal[2] = VERSION
    model: ModelIdentity
    device: str
    dtype: str
    key_bits: int
    versions: Mapping[str, str]
    commit: str | None
    date: str
    seconds: Mapping[str, float]
    data: Data
    delta_layers: tuple[int, ...] | None
    lengths: Annotated[tuple[int, ...], Field(min_length=1)]
    floor: tuple[Point, ...]
    curves: tuple[Curve, ...]
    speed: Speed | None
    early_termination: Stopping | None
    drafts: Drafts | None

    def time_at(self, attention: AttentionPolicy, length: int) -> TimedPoint | None:
        """Return the time of a policy's decode steps at exactly this length; None where it was not measured.

        Steps after another prefill take as long. A sparse prefill with a dense decode has no such time.
        """
        timed = None if self.speed is None else self.speed.of(attention)
        return None if timed is None else timed.at(length)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError("lengths must ascend")
        for curve in self.curves:
            if not {point.length for point in curve.points} <= set(self.lengths):
                raise ValueError(f"a curve has a length that is none of {list(self.lengths)}")
        prefills = {curve.attention.prefill for curve in self.curves}
        dense = {prefill for prefill in prefills if prefill.policy == "dense"}
        if len(prefills | dense) > MAX_PREFILLS or len(prefills - dense) > MAX_PREFILLS - 1:
            raise ValueError(f"at most {MAX_PREFILLS} prefill policies, dense among them; there are {len(prefills)}")
        alone = {curve.attention.prefill for curve in self.curves if curve.attention.decode.policy == "dense"}
        if missing := prefills - dense - alone:
            raise ValueError(f"there is no curve of the prefill {min(each.policy for each in missing)} alone")
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what ``winnow calibrate profile`` wrote.

        Raises:
            ValueError: it cannot be read, or is something else; the message names the file.
        """
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror})") from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise ValueError(f"{path} is no profile of version {VERSION}: {where}: {first['msg']}") from error
        except ValueError as error:
            raise ValueError(f"{path} is no profile: {error}") from error

    def write(self, path: Path) -> None:
        """Write JSON to ``path``; what was there before is replaced at once."""
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text(self.model_dump_json(indent=1, exclude_none=False) + "\n", encoding="utf-8")
        unfinished.replace(path)

    def check_model(self, folder: Path, key_bits: int) -> None:
        """Refuse another model, or codes of other keys, than were measured.

        Raises:
            ValueError: it is another; the message says what differs.
        """
        try:
            served = ModelIdentity.of(folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"the model's folder {folder} cannot be read ({error})") from error
        again = "run `winnow calibrate profile` on the model that is served"
        if served.config_sha256 != self.model.config_sha256:
            raise ValueError(f"the profile is of another configuration ({self.model.name}): {again}")
        if served.weights_sha256 != self.model.weights_sha256:
            raise ValueError(f"the profile is of other weights ({self.model.name}): {again}")
        if key_bits != self.key_bits:
            raise ValueError(
                f"the profile was measured with low-bit keys of {self.key_bits} bits; the server's have {key_bits}"
            )


def _weights_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in {".safetensors", ".bin", ".gguf"}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            file.seek(max(0, size - _TAIL_BYTES))
            digest.update(file.read())
    return digest.hexdigest()
