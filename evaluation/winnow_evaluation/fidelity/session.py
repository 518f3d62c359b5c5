"""One run of the command: from its options to a record."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sglang_winnow.delta_profiles import delta_profile
from winnow_evaluation.fidelity.delta_layers import calibrated_layers
from winnow_evaluation.fidelity.measure import Plan
from winnow_evaluation.fidelity.policies import (
    Measured,
    asked_for,
    checked,
    full_layers_of_delta,
    oracles,
    presets,
    sweep,
)
from winnow_evaluation.fidelity.prefilled import PAGE_SIZE
from winnow_evaluation.fidelity.prompts import Continued, from_documents, from_tasks, read_folder
from winnow_evaluation.fidelity.record import FidelityRecord, identity_of
from winnow_evaluation.fidelity.results import INTERVAL
from winnow_evaluation.fidelity.table import results_table
from winnow_evaluation.offline_model import OfflineModel
from winnow_evaluation.text import Kind, TextError, load_text
from winnow_kernels.contract.fields import PolicyError

_GIB: Final = 2**30
_CACHE_DTYPES: Final = {"fp8_e4m3": torch.float8_e4m3fn}
"""KV caches that are narrower than the model, by SGLang's names."""
_PLAIN_WIDTH: Final = 200
_CPU_STEP, _CPU_CACHE = 1 * _GIB, 4 * _GIB
_CUDA_STEP_SHARE, _CUDA_CACHE_SHARE = 8, 4
"""Which part of a GPU's free memory a step may take, and which part the KV cache of a batch of prompts."""


class SessionError(Exception):
    """What was asked for cannot be measured; the message says why in a sentence."""


def device_of(name: str | None) -> torch.device:
    """Return the device that is asked for: without a name a GPU if there is one."""
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def default_dtype(device: torch.device) -> str:
    """Return the dtype that models run in on a device unless another is asked for."""
    return "float32" if device.type == "cpu" else "bfloat16"


def load_model(folder: Path, device: torch.device, dtype: str, cache_dtype: torch.dtype | None = None) -> OfflineModel:
    """Load the model in ``folder``.

    Raises:
        SessionError: it cannot be loaded.
    """
    if not (folder / "config.json").is_file():
        raise SessionError(f"{folder} is no folder of a model: it has no config.json")
    try:
        return OfflineModel(folder, device, getattr(torch, dtype), cache_dtype)
    except (OSError, ValueError, RuntimeError) as error:
        raise SessionError(f"the model in {folder} cannot be loaded: {error}") from error


def step_memory(device: torch.device) -> int:
    """Return the bytes that a step may take for what it reads."""
    return _CPU_STEP if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // _CUDA_STEP_SHARE


@dataclass(frozen=True)
class Options:
    """What the command was asked for; None where it is to choose."""

    model: Path
    text: Kind
    text_folder: Path | None
    tasks: Sequence[str] | None
    contexts: Sequence[int]
    prompts: int
    tokens: int
    asked: Sequence[Mapping[str, Any] | str]
    bits: Sequence[int]
    known: FidelityRecord | None
    presets: bool
    oracles: bool
    delta_layers: str | None
    scored: int
    prefill_prompts: int
    seed: int
    device: str | None
    dtype: str | None
    cache_dtype: str | None
    batch: int | None
    memory: float | None

    @property
    def source(self) -> str:
        """What the prompts are made of."""
        if self.tasks is not None:
            return ", ".join(self.tasks)
        return self.text if self.text_folder is None else self.text_folder.resolve().name


class Session:
    """A model, and what it is measured on."""

    def __init__(self, options: Options, console: Console) -> None:
        """Load the model.

        Raises:
            SessionError: it cannot be loaded.
        """
        self._options, self._console = options, console
        self._device = device_of(options.device)
        if options.cache_dtype is not None and self._device.type != "cpu":
            raise SessionError(f"--kv-cache-dtype: {options.cache_dtype} is measured on a CPU alone (--device cpu)")
        dtype = options.dtype or default_dtype(self._device)
        narrow = None if options.cache_dtype is None else _CACHE_DTYPES[options.cache_dtype]
        self._model = load_model(options.model, self._device, dtype, narrow)
        self._texts: list[str] | None = None
        self._known = {identity_of(row) for row in options.known.rows} if options.known else set()
        if not console.is_terminal:
            console.width = _PLAIN_WIDTH

    def run(self, output: Path | None) -> FidelityRecord:
        """Measure each context, print its tables, and keep ``output`` up to date with what is measured.

        A run that was cut off has ``complete`` false in the record, and each of its rows as many prompts as it says.

        Raises:
            SessionError: a context, a policy or the text does not do.
        """
        options = self._options
        longest = options.contexts[-1] + options.tokens + 1
        if options.tasks is None and longest > self._model.context_length:
            raise SessionError(
                f"--context: {options.contexts[-1]} tokens and {options.tokens + 1} behind them are more than the"
                f" model's context of {self._model.context_length}"
            )
        record = FidelityRecord([], [])
        for context in options.contexts:
            before = record
            for header, of_context in self._measured(context):
                added = [row | {"run": len(before.runs)} for row in of_context]
                record = FidelityRecord([*before.runs, header], [*before.rows, *added])
                if output is not None:
                    record.write(output)
            self._print(context, record.rows[len(before.rows) :])
        return record

    def _measured(self, context: int) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """Yield the run's header and the rows so far, time and again; the last ones are complete."""
        options, model = self._options, self._model
        begin = time.perf_counter()
        prompts, spare = self._prompts(context)
        try:
            wanted = [*asked_for(options.asked, options.bits)] if options.asked else sweep(context, options.bits)
            wanted += presets() if options.presets else []
            layers, source = self._delta_layers(wanted, spare)
            policies = checked(wanted, model.layers, model.context_length, layers)
        except (PolicyError, ValueError) as error:
            raise SessionError(f"--policy: {error}") from error
        plan = Plan(
            policies=[
                each
                for each in policies
                if self._is_new(context, "prefill" if each.is_prefill else "decode", *each.named)
            ],
            oracles=[
                each
                for each in (oracles(context) if options.oracles else [])
                if self._is_new(context, "decode", each.name, each.parameters(), None)
            ],
            batch=options.batch or self._batch(context),
            scored=options.scored,
            prefilled=min(options.prefill_prompts, len(prompts)),
            memory=int(options.memory * _GIB) if options.memory else step_memory(self._device),
        )
        header = model.environment() | {
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv_cache_dtype": options.cache_dtype,
            "text": options.source,
            "context": context,
            "prompts": len(prompts),
            "tokens_each": options.tokens,
            "scored": options.scored,
            "batch": plan.batch,
            "delta_layers": None if layers is None else {"layers": list(layers), "source": source},
            "interval": INTERVAL,
        }
        about = {"model": self._measured_model, "text": options.source, "context": context}
        for rows, complete in self._with_progress(plan, prompts, context):
            so_far = {"seconds": round(time.perf_counter() - begin, 1), "complete": complete}
            yield header | so_far, [about | row for row in rows]

    def _is_new(self, context: int, phase: str, policy: str, parameters: Mapping[str, Any], preset: str | None) -> bool:
        """Whether the record of what was measured before has no row of this."""
        about = {"model": self._measured_model, "text": self._options.source, "context": context}
        row = about | {"phase": phase, "policy": policy, "parameters": parameters, "preset": preset}
        return identity_of(row) not in self._known

    @property
    def _measured_model(self) -> str:
        """What rows call the model: with the dtype of its KV cache, if that is another than its own."""
        narrow = self._options.cache_dtype
        return self._model.name if narrow is None else f"{self._model.name}, KV in {narrow}"

    def _prompts(self, context: int) -> tuple[list[Continued], Continued]:
        """Return the prompts, and one more: by it Δ-layers are chosen."""
        options, model = self._options, self._model
        count = options.prompts + 1
        try:
            if options.tasks is not None:
                found = from_tasks(model, options.tasks, context, options.tokens, count, options.seed)
            else:
                found = from_documents(model, self._documents(), context, options.tokens, count)
        except ValueError as error:
            raise SessionError(f"--context {context}: {error}") from error
        return found[:-1], found[-1]

    def _documents(self) -> list[str]:
        if self._texts is None:
            folder = self._options.text_folder
            try:
                if folder is not None:
                    self._texts = read_folder(folder)
                else:
                    self._texts = [document.text for document in load_text("test", self._options.text)]
            except (TextError, ValueError) as error:
                raise SessionError(str(error)) from error
        return self._texts

    def _delta_layers(self, wanted: Sequence[Measured], spare: Continued) -> tuple[tuple[int, ...] | None, str]:
        full_layers = full_layers_of_delta(wanted)
        if full_layers is None:
            return None, ""
        if self._options.delta_layers is not None:
            return _named_layers(self._options.delta_layers, self._model.layers), "named"
        if (profile := delta_profile(self._model.folder)) is not None:
            return profile, "the model's profile"
        with torch.inference_mode():
            return calibrated_layers(
                self._model, spare, full_layers, step_memory(self._device)
            ), "one prompt that is not measured"

    def _batch(self, context: int) -> int:
        """Return how many prompts' KV cache fits, dealt out evenly."""
        model = self._model
        room = (
            _CPU_CACHE if self._device.type == "cpu" else torch.cuda.mem_get_info(self._device)[0] // _CUDA_CACHE_SHARE
        )
        tokens = context + self._options.tokens + PAGE_SIZE
        of_prompt = tokens * 2 * model.layers * model.kv_heads * model.head_dim * model.dtype.itemsize
        batches = -(-self._options.prompts // max(1, room // of_prompt))
        return -(-self._options.prompts // batches)

    def _with_progress(
        self, plan: Plan, prompts: Sequence[Continued], context: int
    ) -> Iterator[tuple[list[dict[str, Any]], bool]]:
        """Yield the rows so far, and whether they are all."""
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        where = f"{context:,} tokens"
        last = time.perf_counter()
        with bar:
            task = bar.add_task(where, total=plan.steps(len(prompts)))

            def advance(done: str) -> None:
                nonlocal last
                now = time.perf_counter()
                bar.update(task, advance=1, description=f"{where}: {done}")
                if not self._console.is_terminal:
                    self._console.print(f"{where}: {done}, {now - last:.1f} s", highlight=False, markup=False)
                last = now

            rows: list[dict[str, Any]] = []
            for rows in plan.measured(self._model, prompts, advance):
                yield rows, False
            yield rows, True

    def _print(self, context: int, rows: Sequence[dict[str, Any]]) -> None:
        console = Console()
        if not console.is_terminal:
            console.width = _PLAIN_WIDTH
        for phase in ("decode", "prefill"):
            if of_phase := [row for row in rows if row["phase"] == phase]:
                prompts = max(row["prompts"] for row in of_phase)
                tokens = max(row["tokens"] for row in of_phase)
                where = (
                    f"{phase}, {context:,} tokens of {self._options.source}, {prompts} prompts, {tokens} predictions"
                )
                console.print(results_table(where, of_phase))


def _named_layers(text: str, layers: int) -> tuple[int, ...]:
    items = [item.strip() for item in text.split(",")]
    for item in items:
        if not item.isdecimal() or int(item) >= layers:
            raise SessionError(f"--delta-layers: {item!r} is not the number of a layer, from 0 to {layers - 1}")
    return tuple(map(int, items))
