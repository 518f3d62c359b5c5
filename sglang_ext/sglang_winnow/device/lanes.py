"""Selectors that run side by side: one alone leaves most of a GPU idle while its short launches follow each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from winnow_kernels.decode.gpu_selector import Selector
from winnow_kernels.policies.declarations import in_order

# Above that of the current stream, 0. CUDA has six, PyTorch hands out four; lower numbers go first.
_HIGHEST: Final = 3


class Lanes:
    """Streams beside the current one. In a CUDA graph, what is captured on different ones may run at the same time.

    Priorities are captured, too: where blocks of several kernels wait for room, those of the higher one begin.
    """

    def __init__(self, most: int, device: torch.device) -> None:
        """``most`` is how many tasks there are at once."""
        priorities = [-min(above, _HIGHEST) for above in range(1, most)] if device.type == "cuda" else []
        self._streams = [torch.cuda.Stream(device, priority=priority) for priority in priorities]

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run ``tasks``, which need nothing of each other; what comes next on the current stream waits for all.

        Outside of graphs they run one after another: there the host takes longer to launch than the GPU to run.

        Args:
            tasks: the most urgent first.
        """
        if len(tasks) < 2 or not self._streams or not torch.cuda.is_current_stream_capturing():
            for task in tasks:
                task()
            return
        current = torch.cuda.current_stream()
        *urgent, last = tasks
        streams = self._streams[: len(urgent)][::-1]
        for stream, task in zip(streams, urgent, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                task()
        last()
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
    # The longest chains of launches first: all wait for the last of them.
    return [meeting, *alone[::-1]] if meeting else alone[::-1]
