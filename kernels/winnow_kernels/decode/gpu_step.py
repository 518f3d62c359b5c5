"""The rows of one decode step on the device: views of buffers that are made once, for the largest batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from winnow_kernels.batch import DecodeBatch, DeviceSelection, ReportedShares
from winnow_kernels.decode.gpu_rows import Layout, RowParameters


@dataclass(frozen=True, eq=False)
class Step:
    """A batch of so many rows; the same object, at the same addresses, whenever a batch has as many.

    Attributes:
        request_slots: int64 [rows].
        batch: where the rows' contexts lie.
        parameters: of the rows in this step.
        slots: int32 [rows, KV heads, width]; of all layers' selections. Each row's selector alone writes to its slots.
        counts: int32 [layers, rows, KV heads]; of the selections.
        reported: what selectors believe of a layer and attention reports in a step. Each row's selector alone writes
            its beliefs.
        drafting: int32 [rows]; 1 where the row's token is a draft, which a pass of its own checks.
        checked: int32 [rows], at least 1; how many of its tokens are the row's own in a pass that checks.
    """

    request_slots: Tensor
    batch: DecodeBatch
    parameters: RowParameters
    slots: Tensor
    counts: Tensor
    reported: ReportedShares
    drafting: Tensor
    checked: Tensor

    @property
    def rows(self) -> int:
        return self.batch.rows

    def selection(self, layer: int) -> DeviceSelection:
        """Return what the rows attend to in ``layer``."""
        return DeviceSelection(self.slots, self.counts[layer])

    def parts(self, rows: int) -> Iterator[tuple[slice, Step]]:
        """Yield the step in parts of up to ``rows`` rows, for selectors whose scratch has no room for more."""
        for first in range(0, self.rows, rows):
            part = slice(first, min(first + rows, self.rows))
            yield part, self if part == slice(0, self.rows) else self._part(part)

    def _part(self, rows: slice) -> Step:
        return Step(
            self.request_slots[rows],
            self.batch[rows],
            self.parameters[rows],
            self.slots[rows],
            self.counts[:, rows],
            self.reported.of_rows(rows),
            self.drafting[rows],
            self.checked[rows],
        )


class StepBuffers:
    """The memory of all steps."""

    def __init__(
        self,
        layout: Layout,
        rows: int,
        longest: int,
        page_size: int,
        layers: int,
        query_heads: int,
        kv_heads: int,
        width: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            layout: of rows' parameters.
            rows: of the largest batch.
            longest: tokens of the longest context.
            page_size: slots in a page.
            layers: how many the model has.
            query_heads: of each layer.
            kv_heads: of each layer.
            width: most tokens that a KV head can select; where it selects more, it attends to everything.
            device: where.
        """
        self._request_slots = torch.zeros(rows, dtype=torch.int64, device=device)
        self._batch = DecodeBatch.empty(rows, longest, page_size, device)
        self._parameters = RowParameters.empty(layout, rows, device)
        self._slots = torch.zeros(rows, kv_heads, width, dtype=torch.int32, device=device)
        self._counts = torch.zeros(layers * rows * kv_heads, dtype=torch.int32, device=device)
        self._reported = ReportedShares.empty(rows, query_heads, device)
        self._drafting = torch.zeros(rows, dtype=torch.int32, device=device)
        self._checked = torch.ones(rows, dtype=torch.int32, device=device)
        self._layers = layers
        self._steps: dict[int, Step] = {}

    @property
    def rows(self) -> int:
        """Rows of the largest batch."""
        return self._batch.rows

    @property
    def bytes(self) -> int:
        """Bytes of device memory."""
        batch, parameters = self._batch, self._parameters
        tensors = (batch.page_table, batch.lengths, batch.counts, parameters.values, self._slots, self._counts)
        return sum(tensor.nbytes for tensor in (*tensors, *self._reported, self._drafting, self._checked))

    @property
    def largest(self) -> Step:
        """The step of the largest batch."""
        return self[self.rows]

    def __getitem__(self, rows: int) -> Step:
        """Return the step of a batch of ``rows`` rows."""
        if rows not in self._steps:
            heads = self._slots.shape[1]
            self._steps[rows] = Step(
                self._request_slots[:rows],
                self._batch[:rows],
                RowParameters(
                    self._parameters.layout,
                    self._parameters.values.flatten()[: len(self._parameters.values) * rows].view(-1, rows),
                    self._parameters.shares[:rows],
                    self._parameters.thresholds[:rows],
                ),
                self._slots[:rows],
                self._counts[: self._layers * rows * heads].view(self._layers, rows, heads),
                self._reported.of_rows(slice(rows)),
                self._drafting[:rows],
                self._checked[:rows],
            )
        return self._steps[rows]
