"""Evaluate an adapter, or the base model without one, offline on a GPU: RULER, loss by position, divergence, sinks.

python -m smollm2_training.evaluate --base BASE --adapter ADAPTER --text test.xz --work WORK --json REPORT.json
"""

from __future__ import annotations

import argparse
import collections
import math
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from smollm2_training.adapter import read_adapter, write_json
from smollm2_training.generate import Decoder
from smollm2_training.losses import cross_entropy, divergence
from smollm2_training.network import Network, Shape, Weights, load
from smollm2_training.packed import PackedText
from smollm2_training.rows import Rows
from winnow_evaluation.tasks.ruler import RULER_TASKS

TASKS = tuple(name for name in RULER_TASKS if name not in {"cwe", "fwe"})
LENGTHS = (4096, 8192, 16384, 32768)
BUCKETS = ((0, 2048), (2048, 8192), (8192, 16384), (16384, 32768))
SEED = 1_000_000_007
"""Evaluation draws from here on; training's seeds are small numbers with a step."""
_SINK_ROW = 4096
_SINK_QUERIES = 256


@dataclass(frozen=True)
class Question:
    """One prompt in tokens, and the strings its answer should contain."""

    tokens: list[int]
    references: tuple[str, ...]


@cache
def _maker(base: Path, text: Path) -> tuple[PackedText, Rows, Tokenizer]:
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    packed = PackedText.mapped(text)
    return packed, Rows(tokenizer, lambda rng, words: packed.sentences(rng, words, tokenizer)), tokenizer


def make_question(base: Path, text: Path, task: str, length: int, number: int) -> Question:
    """Question ``number`` of ``task``, as long as fits ``length`` tokens with its answer."""
    packed, rows, tokenizer = _maker(base, text)
    chosen = RULER_TASKS[task]
    room = length - chosen.answer_tokens
    words, best = int(length * 0.75), None
    low, high = 16, 4 * length
    while high - low > max(4, low // 100):
        rng = random.Random(f"{SEED}/{task}/{length}/{number}")
        sample = chosen.make(rng, words, lambda rng, size: packed.sentences(rng, size, tokenizer))
        asked = sample.questions[0]
        tokens = rows.prompt(sample.prompt, asked.given)
        if len(tokens) <= room:
            best, low = Question(tokens, asked.references), words
        else:
            high = words
        guess = int(words * room / len(tokens))
        words = min(max(guess, low + (high - low) // 16), high - (high - low) // 16)
        if best is not None and len(best.tokens) >= 0.985 * room:
            break
    if best is None:
        raise ValueError(f"{task} does not fit {length} tokens")
    return best


def found(answer: str, references: tuple[str, ...]) -> float:
    """The share of the references that the answer contains (RULER's string match)."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def wilson(mean: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    spread = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count))
    return max(0.0, centre - spread), min(1.0, centre + spread)


def ruler(
    decoder: Decoder, base: Path, text: Path, tasks: list[str], lengths: list[int], samples: int, workers: int
) -> Iterator[dict[str, Any]]:
    """One row for each task and length, shortest first; prompts are made ahead by worker processes."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    cells = [(task, length) for length in lengths for task in tasks]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        waiting = {
            cell: [pool.apply_async(make_question, (base, text, *cell, number)) for number in range(samples)]
            for cell in cells
        }
        for task, length in cells:
            questions = [made.get() for made in waiting.pop((task, length))]
            started = time.monotonic()
            answers = decoder.answers([q.tokens for q in questions], RULER_TASKS[task].answer_tokens, end)
            texts = [tokenizer.decode(answer, skip_special_tokens=False) for answer in answers]
            scores = [found(text, q.references) for text, q in zip(texts, questions, strict=True)]
            mean = sum(scores) / len(scores)
            low, high = wilson(mean, samples)
            yield {
                "task": task,
                "length": length,
                "samples": samples,
                "accuracy": round(100 * mean, 2),
                "accuracy_low": round(100 * low, 2),
                "accuracy_high": round(100 * high, 2),
                "mean_prompt_tokens": round(sum(len(q.tokens) for q in questions) / samples),
                "seconds": round(time.monotonic() - started, 2),
                "example": {"answer": texts[0], "references": list(questions[0].references)},
            }


def prose_rows(text: PackedText, length: int, count: int) -> Tensor:
    """``count`` rows of held-out prose, int64 [count, length]: pieces of long documents where there are any."""
    prose = text.prose()
    rng = random.Random(f"{SEED}/prose/{length}")
    rows = [torch.from_numpy(prose.row(rng, length).astype("int64")) for _ in range(count)]
    return torch.stack(rows)


@torch.inference_mode()
def loss_by_position(
    network: Network, weights: Weights, rope_base: float, rows: Tensor, buckets: tuple[tuple[int, int], ...] = BUCKETS
) -> list[dict[str, float]]:
    """Mean loss of the tokens whose position is in each bucket, over the same rows.

    The last bucket's standard error is over rows, paired with the bucket before.
    """
    device = weights.embedding.device
    sums: dict[tuple[int, int], list[float]] = collections.defaultdict(list)
    for row in rows:
        tokens = row.to(device)
        hidden = network.rows(weights, tokens[None], rope_base)
        for start, end in buckets:
            places = torch.arange(start, min(end, len(tokens) - 1), device=device)
            if len(places):
                ones = torch.ones(len(places), device=device)
                total, _ = cross_entropy(hidden[places], weights.embedding, tokens[places + 1], ones)
                sums[start, end].append(total.item() / len(places))
    return [
        {"from": start, "to": end, "rows": len(values), "loss": round(sum(values) / len(values), 4)}
        for (start, end), values in sums.items()
    ]


@torch.inference_mode()
def divergence_from_base(
    network: Network, base: Weights, weights: Weights, rope_base: float, rows: Tensor
) -> dict[str, float]:
    """Mean KL(base ‖ model) and share of equal first choices over all positions of ``rows``."""
    device = weights.embedding.device
    total, same, count = 0.0, 0, 0
    for row in rows:
        tokens = row[None].to(device)
        teacher = network.rows(base, tokens, network.shape.rope_base)
        student = network.rows(weights, tokens, rope_base)
        divergent, equal = divergence(student, base.embedding, teacher, torch.ones(len(student), device=device))
        total += divergent.item()
        same += int(equal.sum())
        count += len(student)
    return {"tokens": count, "kl": round(total / count, 5), "top1_equal": round(same / count, 4)}


@torch.inference_mode()
def sink_shares(network: Network, weights: Weights, rope_base: float, row: Tensor) -> list[dict[str, float]]:
    """How much attention token 0 holds in each layer: mean, least and most over heads, means over late queries."""
    shape = network.shape
    device = weights.embedding.device
    causal = network.causal(1)
    length = len(row)
    late = torch.arange(length // 2, length, max(1, length // 2 // _SINK_QUERIES), device=device)
    shares: list[dict[str, float]] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = k.repeat_interleave(shape.group, dim=1).permute(1, 2, 0).float()
        scores = q[late].transpose(0, 1).float() @ keys * shape.head_dim**-0.5
        scores.masked_fill_(torch.arange(length, device=device) > late[:, None], float("-inf"))
        held = scores.softmax(-1)[..., 0].mean(-1)
        values = {"mean": held.mean(), "least": held.min(), "most": held.max()}
        shares.append({"layer": layer, **{name: round(value.item(), 4) for name, value in values.items()}})
        return causal(layer, q, k, v)

    network.hidden(weights, row.to(device), torch.arange(length, device=device), rope_base, attend)
    return shares


def table(report: dict[str, Any]) -> str:
    """The report as a few lines of plain text."""
    cells = {(row["task"], row["length"]): row for row in report["ruler"]}
    lengths = sorted({length for _, length in cells})
    lines = [f"{'task':18}" + "".join(f"{length:>9,}" for length in lengths)]
    for task in dict.fromkeys(task for task, _ in cells):
        values = [cells.get((task, length)) for length in lengths]
        lines.append(f"{task:18}" + "".join(f"{row['accuracy']:9.1f}" if row else f"{'–':>9}" for row in values))
    buckets = ", ".join(f"{b['from']:,} to {b['to']:,}: {b['loss']}" for b in report["loss"])
    lines.append(f"loss on prose at {buckets}")
    lines.append(f"KL to the base, prose to 2,048: {report['divergence']}")
    late = [share for share in report["sinks"] if share["layer"] >= 12] or report["sinks"]
    lines.append(
        f"token 0 holds, layers 12 and later: {min(s['least'] for s in late):.2f} to "
        f"{max(s['most'] for s in late):.2f} of a head's attention, mean {sum(s['mean'] for s in late) / len(late):.2f}"
    )
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--adapter", type=Path, help="folder of the adapter; the base model itself without it")
    parser.add_argument("--text", type=Path, required=True, help="packed held-out text")
    parser.add_argument("--json", type=Path, required=True, help="the report")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(RULER_TASKS), help="of RULER's")
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS), help="in tokens")
    parser.add_argument("--samples", type=int, default=50, help="prompts a cell (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=24, help="rows of 32,768 tokens of prose (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=14, help="processes that make prompts (default: %(default)s)")
    return parser.parse_args()


def _model(options: argparse.Namespace, device: torch.device) -> tuple[Shape, Weights, Weights, float, int]:
    shape, base = load(options.base, device)
    if options.adapter is None:
        return shape, base, base, shape.rope_base, 0
    adapter = read_adapter(options.adapter, base)
    with torch.no_grad():
        return shape, base, adapter.merged(), adapter.rope_base, adapter.rank


def main() -> None:
    """Evaluate and print."""
    started = time.monotonic()
    options = _parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    shape, base, weights, rope_base, rank = _model(options, device)
    network = Network(shape)
    text = PackedText.load(options.text)
    text.unpack(options.work / "held-out")
    report: dict[str, Any] = {
        "header": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "torch": torch.__version__,
            "rope_base": rope_base,
            "rank": rank,
            "seed": SEED,
        },
        "divergence": divergence_from_base(network, base, weights, rope_base, prose_rows(text, 2048, 48)),
        "sinks": sink_shares(network, weights, rope_base, prose_rows(text, _SINK_ROW, 1)[0]),
        "loss": loss_by_position(network, weights, rope_base, prose_rows(text, max(LENGTHS), options.rows)),
        "ruler": [],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    print(f"{time.monotonic() - started:.0f} s: prose done", report["divergence"], report["loss"], flush=True)
    decoder = Decoder(network, weights, rope_base)
    for row in ruler(
        decoder,
        options.base,
        options.work / "held-out",
        options.tasks,
        options.lengths,
        options.samples,
        options.workers,
    ):
        report["ruler"].append(row)
        print(f"{row['task']} {row['length']}: {row['accuracy']} ({row['seconds']} s) {row['example']}", flush=True)
        write_json(options.json, report)
    report["header"]["seconds"] = round(time.monotonic() - started, 1)
    write_json(options.json, report)
    print(table(report), flush=True)


if __name__ == "__main__":
    main()
