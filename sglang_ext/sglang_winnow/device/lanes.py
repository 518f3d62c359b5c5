"""Selectors that run side by side: one alone leaves most of a GPU idle while its short launches follow each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from winnow_kernels.decode.gpu_selector import Selector
from winnow_kernels.policies.declarations import in_order


class Lanes:
    """Streams beside the current one. In a CUDA graph, what is captured on different ones may run at the same time."""

    def __init__(self, most: int, device: torch.device) -> None:
        """``most`` is how many tasks there are at once."""
        on_gpu = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(1, most)] if on_gpu else []

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run ``tasks``, which need nothing of each other; what comes next on the current stream waits for all.

        Outside of graphs they run one after another: there the host takes longer to launch than the GPU to run.
        """
        if len(tasks) < 2 or not self._streams or not torch.cuda.is_current_stream_capturing():
            for task in tasks:
                task()
            return
        current = torch.cuda.current_stream()
        first, *others = tasks
        streams = self._streams[: len(others)]
        for stream, task in zip(streams, others, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                task()
        first()
        for stream in streams:
            current.wait_stream(stream)


def lanes_of(selectors: Mapping[str, Selector]) -> list[list[str]]:
    """Return the kinds that select in every layer, in lists that may run side by side.

    Programs that wait for each other must all fit the device at once, which two such launches together may not: their
    kinds are in one list.
    """
    kinds = [kind for kind in in_order(selectors) if selectors[kind].selects_in_layers]
    meeting = [kind for kind in kinds if selectors[kind].programs_meet]
    alone = [[kind] for kind in kinds if kind not in meeting]
    # The longest first: it stays on the current stream, and waits for no event of another.
    return [meeting, *alone] if meeting else alone
