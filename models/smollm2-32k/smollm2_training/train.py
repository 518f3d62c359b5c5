"""Train the adapter on a GPU, in legs that each end in time and resume where the last one stopped.

    python -m smollm2_training.train --base BASE --text train.xz --state STATE --output OUTPUT \
        --leg-seconds 510 --total-seconds 1020

``--dry`` runs three steps at each length instead and prints what they took.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from smollm2_training.adapter import Adapter, write_json
from smollm2_training.batches import Batch, Source, batches
from smollm2_training.network import Network, fastest_attention, load
from smollm2_training.packed import PackedText
from smollm2_training.schedule import Schedule
from smollm2_training.trainer import Objective, Outcome, Progress, Trainer

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
SAVE_EVERY_SECONDS = 110.0
_DRY_STEPS = 3


class Log:
    """Means of running figures, printed and kept as JSON lines."""

    def __init__(self, path: Path, every: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._every = path.open("a"), every
        self._outcomes: list[tuple[Batch, Outcome]] = []
        self._values: dict[str, list[float]] = collections.defaultdict(list)
        self._since = (time.monotonic(), 0)

    def add(self, batch: Batch, outcome: Outcome, waited: float) -> None:
        """Count one step. Nothing is read from the device before ``write``."""
        self._outcomes.append((batch, outcome))
        self._values["waited"].append(waited)

    def write(self, progress: Progress, rate: float, *, now: bool = False) -> None:
        """Every so many steps, or ``now``: one line, then forget."""
        if not self._outcomes or (progress.step % self._every and not now):
            return
        for batch, outcome in self._outcomes:
            for name, value in outcome.losses.items():
                self._values[name if name == "gradient" else f"{name}@{batch.length}"].append(value.item())
            right = outcome.right.cpu()
            for kind, start, end in batch.first_answers:
                self._values[f"{kind}@{batch.length}"].append(float(right[start:end].all()))
        then, tokens = self._since
        self._since = (time.monotonic(), progress.tokens)
        line: dict[str, Any] = {**asdict(progress), "seconds": round(progress.seconds, 1), "rate": round(rate, 6)}
        if tokens:
            line["tokens_per_second"] = round((progress.tokens - tokens) / (self._since[0] - then))
        line |= {name: round(fmean(values), 4) for name, values in sorted(self._values.items())}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        print(" ".join(f"{name}={value}" for name, value in line.items()), flush=True)
        self._outcomes.clear()
        self._values.clear()


class Leg:
    """The time of one leg: it ends when its seconds are over, the whole training's are, or on SIGTERM.

    Args:
        seconds: of this leg, from ``started`` on.
        before: of the legs before it.
        total: of the whole training.
        started: ``time.monotonic()`` when the process began.
    """

    def __init__(self, seconds: float, before: float, total: float, started: float) -> None:
        self._seconds, self._before, self._total, self._started = seconds, before, total, started
        self._stopped = False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self._stopped = True

    @property
    def elapsed(self) -> float:
        """Seconds of all legs so far."""
        return self._before + time.monotonic() - self._started

    @property
    def over(self) -> bool:
        """Whether no step may begin."""
        elapsed = self.elapsed
        return self._stopped or elapsed >= self._total or elapsed - self._before >= self._seconds


def keep(trainer: Trainer, state: Path, output: Path) -> None:
    """Write the state that resumes exactly, and the adapter with its progress."""
    state.mkdir(parents=True, exist_ok=True)
    trainer.save(state / "state.pt")
    trainer.adapter.save(output / "adapter")
    write_json(output / "adapter" / "progress.json", asdict(trainer.progress))


def resume(trainer: Trainer, state: Path, adapter: Path | None) -> None:
    """Resume from the state, or without one from an adapter, whose optimizer starts anew."""
    if (state / "state.pt").exists():
        trainer.load(state / "state.pt")
        print(f"resumed exactly: {trainer.progress}", flush=True)
    elif adapter is not None and (adapter / "progress.json").exists():
        trainer.adapter.load(adapter)
        saved = json.loads((adapter / "progress.json").read_text())
        trainer.progress = Progress(**{**saved, "warm_steps": 0})
        print(f"resumed from the adapter, with a new optimizer: {trainer.progress}", flush=True)
    else:
        print("started anew", flush=True)


def run_leg(
    trainer: Trainer, schedule: Schedule, leg: Leg, made: Iterator[Batch], log: Log, state: Path, output: Path
) -> None:
    """Train until the leg is over."""
    progress = trainer.progress
    leader = not dist.is_initialized() or dist.get_rank() == 0
    saved = time.monotonic()
    while True:
        elapsed, over = _agreed(leg.elapsed, leg.over, trainer.device)
        progress.seconds = elapsed
        if over:
            break
        asked = time.monotonic()
        batch = next(made)
        waited = time.monotonic() - asked
        rate = schedule.rate_at(elapsed, progress.warm_steps)
        log.add(batch, trainer.update(batch, rate), waited)
        log.write(progress, rate)
        if leader and time.monotonic() - saved > SAVE_EVERY_SECONDS:
            keep(trainer, state, output)
            saved = time.monotonic()
    log.write(progress, schedule.rate_at(progress.seconds, progress.warm_steps), now=True)
    if leader:
        keep(trainer, state, output)
        done = schedule.share(progress.seconds) >= 1
        print(f"{'finished' if done else 'leg over, run it again'}: {progress}", flush=True)


def _agreed(elapsed: float, over: bool, device: torch.device) -> tuple[float, bool]:
    """What the first process says of the time: all must take the same steps at the same rate."""
    if not dist.is_initialized():
        return elapsed, over
    told = torch.tensor([elapsed, float(over)], dtype=torch.float64, device=device)
    dist.broadcast(told, 0)
    return told[0].item(), bool(told[1].item())


def dry(trainer: Trainer, source: Source, workers: int) -> None:
    """Three steps at each length: tokens per second and peak memory."""
    lengths = [length for length in LENGTHS if length <= source.tokens]
    plan = [length for length in lengths for _ in range(_DRY_STEPS)]
    asked = time.monotonic()
    made = batches(source, lambda step: plan[min(step, len(plan) - 1)], 0, 1, workers)
    with closing(made):
        for length in lengths:
            _dry_steps(trainer, length, made)
    print(f"dry run over, {time.monotonic() - asked:.0f} s with the making of batches", flush=True)


def _dry_steps(trainer: Trainer, length: int, made: Iterator[Batch]) -> None:
    cuda = trainer.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(_DRY_STEPS):
        batch = next(made)
        if cuda:
            torch.cuda.synchronize()
        started = time.monotonic()
        outcome = trainer.update(batch, 1e-5)
        losses = {name: round(value.item(), 4) for name, value in outcome.losses.items()}
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    print(
        f"length {length}: steps of {', '.join(f'{s:.2f}' for s in seconds)} s, "
        f"{batch.tokens.size / min(seconds):,.0f} tokens/s, {peak:.1f} GiB, {losses}",
        flush=True,
    )


@contextmanager
def processes() -> Iterator[tuple[int, int, torch.device]]:
    """This process's number, how many train together, and its device; several when torchrun started them."""
    if not torch.cuda.is_available():
        yield 0, 1, torch.device("cpu")
        return
    if "LOCAL_RANK" not in os.environ:
        yield 0, 1, torch.device("cuda", 0)
        return
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        yield dist.get_rank(), dist.get_world_size(), device
    finally:
        dist.destroy_process_group()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--text", type=Path, required=True, help="packed training text")
    parser.add_argument("--state", type=Path, required=True, help="folder of what resumes exactly; may be lost")
    parser.add_argument("--output", type=Path, required=True, help="folder of adapter and log")
    parser.add_argument("--adapter", type=Path, help="an adapter to go on from where there is no state")
    parser.add_argument("--leg-seconds", type=float, default=510, help="when this leg stops (default: %(default)s)")
    parser.add_argument("--total-seconds", type=float, default=1020, help="of all legs (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=65_536, help="of each step and process (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=48, help="of the adapter (default: %(default)s)")
    parser.add_argument("--alpha", type=int, default=96, help="of the adapter (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--rope-base", type=float, default=1e6, help="rotary base (default: %(default)s)")
    parser.add_argument("--divergence", type=float, default=4.0, help="weight of KL to the base (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches (default: %(default)s)")
    parser.add_argument("--every", type=int, default=25, help="steps between log lines (default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--dry", action="store_true", help="three steps at each length, nothing kept")
    return parser.parse_args(arguments)


def main() -> None:
    """Run one leg."""
    started = time.monotonic()
    options = parse()
    torch.set_float32_matmul_precision("high")
    with processes() as (rank, count, device):
        compiled = device.type == "cuda" and not options.eager
        shape, base = load(options.base, device)
        unpacked = options.state / f"text-{rank}"
        PackedText.load(options.text).unpack(unpacked)
        schedule = Schedule(options.total_seconds, options.rate)
        source = Source(options.base / "tokenizer.json", unpacked, options.tokens, schedule.seed)
        attention = fastest_attention(shape, max(LENGTHS), device)
        adapter = Adapter(base, options.rank, options.alpha, options.rope_base)
        network = Network(shape, compiled=compiled, attention=attention)
        objective = Objective(divergence=options.divergence)
        trainer = Trainer(adapter, network, objective, compiled=compiled)
        workers = max(1, options.workers // count)
        if options.dry:
            dry(trainer, source, workers)
            return
        resume(trainer, options.state, options.adapter)
        leg = Leg(options.leg_seconds, trainer.progress.seconds, schedule.total_seconds, started)
        first = trainer.progress.step * count + rank
        made = batches(source, lambda step: schedule.length(step // count, leg.elapsed), first, count, workers)
        log = Log(options.output / f"log{f'-{rank}' if rank else ''}.jsonl", options.every)
        with closing(made):
            run_leg(trainer, schedule, leg, made, log, options.state, options.output)


if __name__ == "__main__":
    main()
