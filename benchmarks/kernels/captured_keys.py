"""A real model's keys, and the queries of consecutive tokens, of some layers: to time a layer's attention on.

    python -m benchmarks.kernels.captured_keys MODEL --context 32768 --layers 4,12,20,28 --output captured.pt
    python -m benchmarks.kernels.layer on-captured captured.pt --cases 131072x8

The model reads a piece of the text that ``winnow fidelity`` measures on, densely. What lies in the file are the keys of
the prompt, rotated, and the queries of the true tokens behind it. Contexts longer than the prompt repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Self

import torch
import typer
from torch import Tensor

from benchmarks.command_line import numbers
from benchmarks.dense_pass import run_densely
from winnow_evaluation.fidelity.prompts import from_documents
from winnow_evaluation.offline_model import OfflineModel
from winnow_evaluation.text import Kind, load_text

STEPS: Final = 48
_DTYPE: Final = torch.bfloat16


@dataclass(frozen=True, eq=False)
class CapturedKeys:
    """What a model's attention has met.

    Attributes:
        model: its name.
        keys: [layers, tokens, KV heads, head dim], of a prompt.
        queries: [layers, steps, query heads, head dim], of the tokens behind it.
    """

    model: str
    keys: Tensor
    queries: Tensor

    def tiled(self, length: int) -> Tensor:
        """Return the keys of contexts of ``length`` tokens, [layers, length, KV heads, head dim].

        The prompt is repeated, and the first time cut off: contexts begin and end as it does.

        Raises:
            ValueError: the prompt is longer.
        """
        tokens = self.keys.shape[1]
        if length < tokens:
            raise ValueError(f"contexts must have at least the {tokens:,} tokens that were captured, not {length:,}")
        return torch.cat((self.keys[:, : length % tokens], self.keys.repeat(1, length // tokens, 1, 1)), dim=1)

    def queries_of_rows(self, rows: int) -> Tensor:
        """Return queries, [layers, steps, rows, query heads, head dim]: each row is one step ahead of the last.

        Raises:
            ValueError: there are too few steps.
        """
        steps = self.queries.shape[1] - rows + 1
        if steps < 2:
            raise ValueError(f"{self.queries.shape[1]} steps were captured; {rows} rows need at least {rows + 1}")
        return self.queries.unfold(1, steps, 1).movedim(-1, 1)

    def write(self, path: Path) -> None:
        """Write a file that ``read`` reads."""
        torch.save({"model": self.model, "keys": self.keys, "queries": self.queries}, path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what ``write`` wrote.

        Raises:
            ValueError: it is something else.
        """
        content = torch.load(path, weights_only=True)
        if not isinstance(content, dict) or set(content) != {"model", "keys", "queries"}:
            raise ValueError(f"{path}: holds no captured keys")
        return cls(**content)


def capture(model: OfflineModel, tokens: list[int], context: int, layers: list[int]) -> CapturedKeys:
    """Run a model over ``tokens``; the first ``context`` are the prompt.

    Args:
        model: that reads.
        tokens: of the prompt, and behind it.
        context: tokens of the prompt.
        layers: whose keys are kept.
    """
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def note(layer: int, queries: Tensor, keys: Tensor, _values: Tensor, _scale: float) -> None:
        if layer in layers:
            kept[layer] = keys[:context].to(_DTYPE).cpu(), queries[context:].to(_DTYPE).cpu()

    run_densely(model, tokens, note)
    keys, queries = (torch.stack(found) for found in zip(*(kept[layer] for layer in layers), strict=True))
    return CapturedKeys(model.name, keys, queries)


def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.")],
    output: Annotated[Path, typer.Option(help="Where to write the keys.")],
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 32_768,
    layers: Annotated[str, typer.Option(help="Whose keys are kept, with commas between.")] = "4,12,20,28",
    steps: Annotated[int, typer.Option(min=2, help="Tokens behind the prompt.")] = STEPS,
    kind: Annotated[Kind, typer.Option(help="Of text.")] = "prose",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Capture keys and queries."""
    network = OfflineModel(model, torch.device(device))
    wanted = numbers(layers)
    if not wanted or not 0 <= min(wanted) <= max(wanted) < network.layers:
        raise typer.BadParameter(f"the model has layers 0 to {network.layers - 1}", param_hint="--layers")
    documents = [document.text for document in load_text("validation", kind)]
    [prompt] = from_documents(network, documents, context, steps, 1)
    captured = capture(network, [*prompt.tokens, *prompt.following[:steps]], context, wanted)
    captured.write(output)
    typer.echo(f"{output}: keys {tuple(captured.keys.shape)}, queries {tuple(captured.queries.shape)}")


if __name__ == "__main__":
    typer.run(main)
