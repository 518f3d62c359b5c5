"""How many tokens ``tactic`` took of its clusters, as ``benchmarks.kernels.tactic_trace.record`` wrote it down."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class Recorded(BaseModel):
    """What was taken for one share of the attention mass.

    Attributes:
        p: the share.
        tokens: tokens of clusters that each query head takes, [steps][layers][query heads].
        tokens_per_head: their mean.
        union_percent: of the tokens in clusters, what a KV head read for the query heads of its group, on average.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    p: Share
    tokens: list[list[list[Count]]]
    tokens_per_head: float
    union_percent: float


class LengthTrace(BaseModel):
    """A trace of lengths.

    Attributes:
        about: where it comes from: whatever the recorder says.
        clustered: tokens of each context that were in clusters.
        group: query heads of a KV head.
        correlation: of the scores of two query heads of a group, with which heads that take that many tokens of
            random scores have unions as large as those recorded.
        recorded: for each share.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    about: dict[str, Any]
    clustered: PositiveCount
    group: PositiveCount
    correlation: Annotated[float, Field(ge=0, le=1)]
    recorded: Annotated[list[Recorded], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_recorded(self) -> LengthTrace:
        shape = _shape_of(self.recorded[0].tokens)
        if min(shape) < 1:
            raise ValueError(f"recorded.0.tokens: must be [steps][layers][query heads]; it is of the shape {shape}")
        for number, recorded in enumerate(self.recorded):
            field = f"recorded.{number}.tokens"
            if (
                any(_shape_of([step]) != (1, *shape[1:]) for step in recorded.tokens)
                or len(recorded.tokens) != shape[0]
            ):
                raise ValueError(f"{field}: must have {shape[0]} × {shape[1]} × {shape[2]} numbers, all shares as many")
            most = max(tokens for step in recorded.tokens for layer in step for tokens in layer)
            if most > self.clustered:
                raise ValueError(f"{field}: a query head takes {most} of {self.clustered} tokens")
        if len(set(self.shares)) < len(self.shares):
            raise ValueError(f"recorded: each p may be there once; they are {self.shares}")
        return self

    @property
    def shares(self) -> list[float]:
        return [recorded.p for recorded in self.recorded]

    @property
    def tokens(self) -> Tensor:
        """int32 [shares, steps, layers, query heads]."""
        return torch.tensor([recorded.tokens for recorded in self.recorded], dtype=torch.int32)

    @classmethod
    def read(cls, path: Path) -> LengthTrace:
        """Read a trace.

        Raises:
            ValueError: it is no trace; says which file and field.
            OSError: it cannot be read.
        """
        try:
            return cls.model_validate(json.loads(path.read_text()))
        except ValidationError as error:
            told = [
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}" if each["loc"] else each["msg"]
                for each in error.errors()
            ]
            raise ValueError(f"{path}: {'; '.join(told)}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def write(self, path: Path) -> None:
        """Write it as JSON, one line for each step's layer."""
        head = self.model_dump(exclude={"recorded"})
        lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        shares = [_share_lines(recorded) for recorded in self.recorded]
        path.write_text("\n".join(["{", *lines, ' "recorded": [', ",\n".join(shares), " ]", "}"]) + "\n")


def _share_lines(recorded: Recorded) -> str:
    about = recorded.model_dump(exclude={"tokens"})
    steps = [
        "    [\n" + ",\n".join(f"     {json.dumps(layer, separators=(',', ':'))}" for layer in step) + "\n    ]"
        for step in recorded.tokens
    ]
    return "\n".join([f'  {json.dumps(about)[:-1]}, "tokens": [', ",\n".join(steps), "  ]}"])


def _shape_of(tokens: list[list[list[int]]]) -> tuple[int, int, int]:
    """Return steps, layers and query heads; -1 where they differ."""
    layers = {len(step) for step in tokens}
    heads = {len(layer) for step in tokens for layer in step}
    return len(tokens), _only(layers), _only(heads)


def _only(numbers: set[int]) -> int:
    return next(iter(numbers), 0) if len(numbers) <= 1 else -1


@dataclass(frozen=True)
class ServedLengths:
    """A trace for the layers and query heads of a served model, on the device.

    Attributes:
        tokens: int32 [layers, shares, steps, query heads].
        shares: float64 [shares].
        clustered: tokens in clusters that ``tokens`` are of.
    """

    tokens: Tensor
    shares: Tensor
    clustered: int

    @classmethod
    def of(cls, trace: LengthTrace, layers: int, query_heads: int, device: torch.device) -> ServedLengths:
        """Spread the trace's layers evenly over the model's, and go round its query heads."""
        recorded = trace.tokens
        of_layers = torch.arange(layers) * recorded.shape[2] // layers
        of_heads = torch.arange(query_heads) % recorded.shape[3]
        tokens = recorded[:, :, of_layers][..., of_heads].permute(2, 0, 1, 3).contiguous()
        return cls(tokens.to(device), torch.tensor(trace.shares, dtype=torch.float64, device=device), trace.clustered)
