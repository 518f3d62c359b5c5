"""Train the needle model on one GPU, in legs that each end in time and resume where the last one stopped.

    python -m needle_training.train --work WORK --export models/needle --seconds 520

First random tokens (copying and recall), at lengths that grow as they are learned; then text, at lengths that grow by
the plan below. The same seed draws the same data whatever the legs.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from needle_training.conversations import Conversations
from needle_training.network import Network, Shape, export
from needle_training.optimizer import Muon
from needle_training.synthetic import Batch, copying, recall
from needle_training.tokenizer import SPECIAL_TOKENS

TOKENIZER = Path(__file__).resolve().parents[1] / "tokenizer.json"


@dataclass(frozen=True)
class SyntheticStage:
    """Copying and recall at one length, until both are right in 90 % of cases or ``most_steps`` are over."""

    length: int
    key_sizes: tuple[int, ...] = (1,)
    link_sizes: tuple[int, ...] = (0,)
    value_sizes: tuple[int, ...] = (1,)
    filler: int = 0
    most_steps: int = 3000


@dataclass(frozen=True)
class TextStage:
    """``steps`` steps whose length is drawn by weight."""

    steps: int
    lengths: dict[int, float]


@dataclass(frozen=True)
class Plan:
    """The whole training. Rates are constant after ``warm_up`` steps and fall to zero over the text's last part."""

    synthetic: tuple[SyntheticStage, ...] = (
        SyntheticStage(64),
        SyntheticStage(64, link_sizes=(1, 2, 3)),
        SyntheticStage(128, (1, 2), (0, 1, 2, 3), (1, 2, 3)),
        SyntheticStage(256, (1, 2), (0, 1, 2, 3), (1, 2, 4), 4),
        SyntheticStage(512, (1, 2, 3), (0, 1, 2, 3), (1, 2, 4), 8),
        SyntheticStage(1024, (2, 3), (0, 1, 2, 3, 4), (1, 2, 4, 8), 12),
        SyntheticStage(2048, (2, 3), (0, 1, 2, 3, 4), (1, 2, 4, 8), 20),
    )
    text: tuple[TextStage, ...] = (
        TextStage(1200, {512: 1.0, 1024: 1.0}),
        TextStage(3000, {512: 0.5, 1024: 1.0, 2048: 1.5}),
        TextStage(4000, {1024: 0.5, 2048: 1.0, 4096: 1.5, 8192: 1.5}),
        TextStage(5000, {2048: 0.3, 4096: 0.6, 8192: 1.2, 16384: 1.2, 32768: 1.2}),
    )
    kinds: dict[str, float] = field(
        default_factory=lambda: {"needles": 0.42, "variables": 0.18, "common": 0.18, "frequent": 0.16, "records": 0.06}
    )
    synthetic_share: float = 0.05
    synthetic_tokens: int = 32_768
    text_tokens: int = 65_536
    learning_rate: float = 2e-3
    embedding_rate: float = 2e-3
    warm_up: int = 100
    decay_share: float = 0.35
    seed: int = 0

    def text_steps(self) -> int:
        """Steps on text, all stages together."""
        return sum(stage.steps for stage in self.text)


@dataclass
class Progress:
    """Where the training stands; saved with the weights."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    text_step: int = 0
    seconds: float = 0.0


def _draw(rng: random.Random, weights: dict[Any, float]) -> Any:
    return rng.choices(list(weights), weights=list(weights.values()))[0]


# --- text batches, made by worker processes -------------------------------------------------------------------------


@cache
def _conversations() -> Conversations:
    return Conversations(Tokenizer.from_file(str(TOKENIZER)))


@dataclass(frozen=True)
class TextBatch:
    """Rows of one length as arrays.

    Attributes:
        tokens: int32 [rows, length], padded with 0.
        weights: float32 [rows, length]; an answer token of a row with n of them weighs 1/√n.
        first_answers: for each row its kind and the range of its first answer, if it has one.
    """

    tokens: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    first_answers: list[tuple[str, int, int] | None]

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``."""
        return Batch(torch.from_numpy(self.tokens).to(device).long(), torch.from_numpy(self.weights).to(device))


def _text_batch(seed: int, step: int, length: int, rows: int, kinds: dict[str, float]) -> TextBatch:
    rng = random.Random(f"{seed}/{step}")
    batch = TextBatch(np.zeros((rows, length), np.int32), np.zeros((rows, length), np.float32), [])
    for i in range(rows):
        row = _conversations().row(rng, _draw(rng, kinds), length)
        batch.tokens[i, : len(row.tokens)] = row.tokens
        answered = sum(end - start for start, end in row.answers)
        for start, end in row.answers:
            batch.weights[i, start:end] = answered**-0.5
        batch.first_answers.append((row.kind, *row.answers[0]) if row.answers else None)
    return batch


def _stage_at(plan: Plan, step: int) -> TextStage:
    for stage in plan.text:
        if step < stage.steps:
            return stage
        step -= stage.steps
    raise ValueError(f"step {step} lies beyond the plan")


def _length_at(plan: Plan, step: int) -> int:
    length: int = _draw(random.Random(f"{plan.seed}/length/{step}"), _stage_at(plan, step).lengths)
    return length


def text_batches(plan: Plan, first_step: int, workers: int) -> Iterator[TextBatch]:
    """The batch of each text step from ``first_step`` on, made ahead by ``workers`` processes."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers) as pool:
        waiting: collections.deque[Any] = collections.deque()
        step = first_step
        while True:
            while len(waiting) < 3 * workers and step < plan.text_steps():
                length = _length_at(plan, step)
                rows = plan.text_tokens // length
                waiting.append(pool.apply_async(_text_batch, (plan.seed, step, length, rows, plan.kinds)))
                step += 1
            if not waiting:
                return
            yield waiting.popleft().get()


# --- steps ----------------------------------------------------------------------------------------------------------


class Trainer:
    """Network, optimizers and progress."""

    def __init__(self, plan: Plan, shape: Shape, device: torch.device) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.device = plan, device
        self.network = Network(shape).to(device)
        matrices = self.network.matrices()
        others = [p for p in self.network.parameters() if all(p is not matrix for matrix in matrices)]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=plan.learning_rate),
            torch.optim.AdamW(others, lr=plan.embedding_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]
        self.rates = [plan.learning_rate, plan.embedding_rate]
        self.progress = Progress()
        self.generator = torch.Generator(device)

    def save(self, path: Path) -> None:
        """Write everything that resuming needs."""
        state = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        torch.save(state, path)

    def load(self, path: Path) -> None:
        """Resume from what ``save`` wrote."""
        state = torch.load(path, map_location=self.device)
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])

    def update(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One optimizer step. Returns the mean loss and, for each token of the batch, whether it was predicted."""
        progress, plan = self.progress, self.plan
        left = 1 - progress.text_step / max(1, plan.text_steps())
        scale = min(1.0, (progress.step + 1) / plan.warm_up, left / plan.decay_share)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        hidden = self.network(batch.tokens).view(*batch.tokens.shape, -1)
        rows, places = batch.weights[:, 1:].nonzero(as_tuple=True)
        logits = self.network.logits(hidden[rows, places])
        targets = batch.tokens[rows, places + 1]
        weights = batch.weights[rows, places + 1]
        loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        right = torch.zeros_like(batch.tokens, dtype=torch.bool)
        right[rows, places + 1] = logits.argmax(-1) == targets
        return loss.detach(), right

    def synthetic_batch(self, stage: SyntheticStage, copy: bool, tokens: int) -> Batch:
        """Random tokens for the present step."""
        seed = self.plan.seed * 1_000_003 + self.progress.step
        self.generator.manual_seed(seed)
        rng = random.Random(seed)
        rows, first, vocabulary = tokens // stage.length, len(SPECIAL_TOKENS), self.network.shape.vocabulary
        if copy:
            return copying(rows, stage.length, first, vocabulary, self.generator)
        return recall(
            rows,
            stage.length,
            first,
            vocabulary,
            self.generator,
            rng.choice(stage.key_sizes),
            rng.choice(stage.link_sizes),
            rng.choice(stage.value_sizes),
            rng.randint(0, stage.filler),
        )


class Log:
    """Prints running figures and keeps them as JSON lines."""

    def __init__(self, path: Path, every: int) -> None:
        self._file, self._every = path.open("a"), every
        self._values: dict[str, list[float]] = collections.defaultdict(list)

    def add(self, name: str, value: float) -> None:
        """Count ``value`` towards the mean called ``name``."""
        self._values[name].append(value)

    def write(self, progress: Progress) -> None:
        """Every so many steps: one line, then forget."""
        if progress.step % self._every:
            return
        means = {name: round(fmean(values), 4) for name, values in sorted(self._values.items())}
        line = {**asdict(progress), "seconds": round(progress.seconds, 1), **means}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        print(" ".join(f"{name}={value}" for name, value in line.items()), flush=True)
        self._values.clear()


def train_synthetic(trainer: Trainer, log: Log, deadline: float) -> None:
    """The synthetic stages, as far as time goes."""
    plan, progress = trainer.plan, trainer.progress
    recent: dict[bool, collections.deque[float]] = {copy: collections.deque(maxlen=3) for copy in (False, True)}
    while progress.stage < len(plan.synthetic) and time.monotonic() < deadline:
        stage = plan.synthetic[progress.stage]
        started = time.monotonic()
        copy = progress.step % 2 == 0
        batch = trainer.synthetic_batch(stage, copy, plan.synthetic_tokens)
        loss, right = trainer.update(batch)
        progress.stage_step += 1
        if progress.stage_step % 10 < 2:
            accuracy = (right.sum() / (batch.weights > 0).sum()).item()
            recent[copy].append(accuracy)
            log.add("copying" if copy else "recall", accuracy)
            log.add("loss", loss.item())
        progress.seconds += time.monotonic() - started
        learned = all(len(window) == 3 and fmean(window) > 0.9 for window in recent.values())
        if learned or progress.stage_step >= stage.most_steps:
            print(f"stage {progress.stage} ({stage.length} tokens) {'learned' if learned else 'given up'}: {progress}")
            progress.stage += 1
            progress.stage_step = 0
            for window in recent.values():
                window.clear()
        log.write(progress)


def train_text(trainer: Trainer, log: Log, deadline: float, workers: int) -> None:
    """The text stages, as far as time goes."""
    plan, progress, device = trainer.plan, trainer.progress, trainer.device
    broad = plan.synthetic[-1]
    for made in text_batches(plan, progress.text_step, workers):
        if time.monotonic() >= deadline:
            return
        started = time.monotonic()
        if random.Random(f"{plan.seed}/synthetic/{progress.text_step}").random() < plan.synthetic_share:
            length = made.tokens.shape[1]
            stage = SyntheticStage(length, broad.key_sizes, broad.link_sizes, broad.value_sizes, broad.filler)
            batch = trainer.synthetic_batch(stage, progress.step % 2 == 0, plan.text_tokens)
            loss, _ = trainer.update(batch)
        else:
            loss, right = trainer.update(made.to(device))
            if progress.text_step % 4 == 0:
                log.add("loss", loss.item())
                _count_answers(log, made, right.cpu())
        progress.text_step += 1
        progress.seconds += time.monotonic() - started
        log.write(progress)


def _count_answers(log: Log, batch: TextBatch, right: Tensor) -> None:
    for answer, correct in zip(batch.first_answers, right, strict=True):
        if answer is not None:
            kind, start, end = answer
            log.add(f"{kind}@{batch.tokens.shape[1]}", float(correct[start:end].all()))


def main() -> None:
    """Run one leg."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint and the log")
    parser.add_argument("--export", type=Path, required=True, help="folder for the model as others load it")
    parser.add_argument("--seconds", type=float, default=520, help="when this leg stops (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=14, help="processes that make text (default: %(default)s)")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    torch.set_float32_matmul_precision("high")
    plan = Plan()
    trainer = Trainer(plan, Shape(), torch.device("cuda"))
    arguments.work.mkdir(parents=True, exist_ok=True)
    checkpoint = arguments.work / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    log = Log(arguments.work / "log.jsonl", every=200)
    train_synthetic(trainer, log, deadline)
    if trainer.progress.stage == len(plan.synthetic):
        train_text(trainer, log, deadline, arguments.workers)
    trainer.save(checkpoint)
    export(trainer.network, arguments.export)
    done = trainer.progress.text_step >= plan.text_steps()
    print(f"{'finished' if done else 'to be resumed'}: {trainer.progress}")


if __name__ == "__main__":
    main()
