"""What SGLang's own backend, which computes dense batches and layers with a window, has planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class DensePlans:
    """The plans of a dense backend: it has one at a time, and graphs of a size share one."""

    def __init__(self, dense: AttentionBackend) -> None:
        self._dense = dense
        self._planned: ForwardBatch | None = None
        self._of_sizes: dict[int, Any] = {}

    def plan(self, batch: ForwardBatch) -> None:
        """Plan a pass that no CUDA graph serves."""
        self._dense.init_forward_metadata(batch)
        self._planned = batch

    def ensure(self, batch: ForwardBatch) -> None:
        """Plan ``batch``, unless it was planned last: in one pass layers may take turns that compute different parts.

        Backends keep much of a plan in buffers of their own, so that two plans cannot be kept side by side.
        """
        if self._planned is not batch:
            self.plan(batch)

    def begin_graphs(self, rows: int, tokens: int) -> None:
        """Make what graphs need, of up to so many rows and tokens, before any is captured."""
        self._of_sizes.clear()
        self._dense.init_cuda_graph_state(rows, tokens)

    def plan_graph(self, batch: ForwardBatch, *, in_capture: bool) -> None:
        """Plan a decode step that a graph serves, or is captured for, outside of the graph.

        Only the first graph of a size is planned as SGLang plans a capture. Some backends, such as FlashInfer's, make
        new buffers then, in which all later steps of that size are planned: graphs captured before would read the old
        ones. So the other graphs of the size are captured with the first one's plan, filled in as for a replay.
        """
        size = batch.batch_size
        is_first = in_capture and size not in self._of_sizes
        self._planned = None
        self._dense.init_forward_metadata_out_graph(batch, is_first)
        if is_first:
            self._of_sizes[size] = getattr(self._dense, "forward_metadata", None)
        elif in_capture:
            self._dense.forward_metadata = self._of_sizes[size]
