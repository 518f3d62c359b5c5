"""The CUDA graphs of passes that check drafts, beside those of decode steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from sglang_winnow.verification_plan import Accepted
from winnow_kernels.contract.verification import CHECKED_WIDTHS, MAX_CHECKED_TOKENS, checked_width

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class CheckGraphs:
    """Runs checks with ``CheckBackend``: by a CUDA graph where one was captured, else without.

    Graphs are captured of the sizes that decode steps have, up to ``MAX_CHECKED_TOKENS``; of none on a server that
    captures none.
    """

    def __init__(self, runner: ModelRunner) -> None:
        """Capture the graphs of a server whose decode steps are captured."""
        self._runner = runner
        self._backend = runner.attn_backend.check
        self._graphs: dict[int, DecodeCudaGraphRunner] = {}
        self._logits = GraphSharedOutput(device=torch.device(runner.device), max_rows=MAX_CHECKED_TOKENS)
        decode = runner.decode_cuda_graph_runner
        if isinstance(decode, DecodeCudaGraphRunner):
            widths = [width for width in CHECKED_WIDTHS if min(decode.capture_bs) * width <= MAX_CHECKED_TOKENS]
            self._graphs = {width: self._captured(width) for width in widths}

    def width(self, tokens: int) -> int:
        """Return how many tokens a row a pass has that checks so many: those of the next graph."""
        return checked_width(tokens) if self._graphs else tokens

    def rows(self, tokens: int) -> int:
        """Return how many rows a pass can have that checks so many tokens of each."""
        width = self.width(tokens)
        graph = self._graphs.get(width)
        return MAX_CHECKED_TOKENS // width if graph is None else graph.max_bs

    @contextmanager
    def checking(self, width: int) -> Iterator[None]:
        """Let the model's next pass check ``width`` tokens of each row."""
        runner = self._runner
        decode = (runner.attn_backend, runner.decode_cuda_graph_runner)
        runner.attn_backend, runner.decode_cuda_graph_runner = self._backend, self._graphs.get(width)
        try:
            yield
        finally:
            runner.attn_backend, runner.decode_cuda_graph_runner = decode

    def accept(self, accepted: Accepted) -> None:
        """Count the last pass, and what it has ``accepted``."""
        self._backend.accept(accepted)

    def _captured(self, width: int) -> DecodeCudaGraphRunner:
        # SGLang captures either decode steps or checks, and has logits of the largest batch of those.
        runner = self._runner
        shared, algorithm = runner.graph_shared_output, runner.spec_algorithm
        algorithm.checked_width, runner.graph_shared_output = width, self._logits
        try:
            return DecodeCudaGraphRunner(runner, attn_backend=self._backend, speculative_num_draft_tokens=width)
        finally:
            algorithm.checked_width, runner.graph_shared_output = None, shared
