"""StreamingLLM in the decode steps of a server on a GPU."""

from __future__ import annotations

from winnow_kernels.decode.gpu_selector import Selector
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.policies.streaming_llm import gpu
from winnow_kernels.policies.streaming_llm.gpu import StreamingLLMRows

KIND = "streaming_llm"


class StreamingLLMSelector(Selector):
    """Sinks and window: the same in all layers."""

    selects_in_layers = False

    def begin(self, step: Step, *, ordered: bool) -> None:
        del ordered
        rows = StreamingLLMRows(step.parameters.sinks, step.parameters.own(KIND, "window"))
        gpu.select(step.batch, rows, step.selection(0))
        # Every row's counts are those of whole contexts as yet, but for this kind's.
        step.counts[1:] = step.counts[0]
