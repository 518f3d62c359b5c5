"""DELTA in the decode steps of a server on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.gpu_selector import Entry, Selector, Server, rows_within
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.request import Request
from winnow_kernels.host_tensors import to_device
from winnow_kernels.policies.delta import gpu
from winnow_kernels.policies.delta.gpu import DeltaBuffers, DeltaRows
from winnow_kernels.policies.delta.parameters import Delta

KIND = "delta"


class DeltaSelector(Selector):
    """Pages that Δ-layers find. Those layers' attention is its own, too: ``attend_at``."""

    selects_in_layers = False

    def __init__(self, server: Server) -> None:
        layers, step = len(server.caches), server.step
        device = step.slots.device
        self._server = server
        self._roles = torch.zeros(server.requests, layers, dtype=torch.int8, device=device)
        self._roles_of_rows = torch.zeros(layers * step.rows, dtype=torch.int8, device=device)
        self._rows = rows_within(4 * step.batch.longest * (server.query_heads + 1), step.rows)
        [(_, part), *_] = step.parts(self._rows)
        self._buffers = DeltaBuffers.empty(part.batch, server.query_heads)

    def enter(self, request: Request, slot: int, context: Context) -> Entry:
        del context
        policy = request.decode
        assert isinstance(policy, Delta)
        layers = self._roles.shape[1]
        roles = torch.tensor([policy.role(layer) for layer in range(layers)], dtype=torch.int8)
        self._roles[slot] = to_device(roles, self._roles.device)
        return Entry()

    def begin(self, step: Step, *, ordered: bool) -> None:
        del ordered
        is_row = step.parameters.own(KIND, "pages") > 0
        torch.mul(self._roles[step.request_slots].T, is_row, out=self._of(step).roles)
        gpu.write_counts(step.batch, self._of(step), step.counts, step.slots.shape[2])

    def attend_at(self, layer: int, queries: Tensor, cache: LayerCache, step: Step, output: Tensor) -> None:
        """Attend with the rows whose Δ-layer ``layer`` is, write their ``output``, and select for the layers behind."""
        everything = self._of(step)
        for rows, part in step.parts(self._rows):
            own = _rows(part, everything.roles[:, rows].contiguous())
            gpu.attend_and_score(
                layer,
                queries[rows],
                cache,
                part.batch,
                own,
                self._server.scale,
                self._server.attend_buffers,
                self._buffers,
                output[rows],
            )
            gpu.score_tokens(layer, part.batch, own, self._server.attend_buffers, self._buffers)
            self._server.ranks.maximize(self._buffers.tokens.greatest[: part.rows])
            gpu.select(layer, part.batch, own, part.slots, self._buffers)

    def _of(self, step: Step) -> DeltaRows:
        layers = self._roles.shape[1]
        return _rows(step, self._roles_of_rows[: layers * step.rows].view(layers, step.rows))


def _rows(step: Step, roles: Tensor) -> DeltaRows:
    """Return the parameters of a step's rows with ``roles``, int8 [layers, rows]."""
    own = step.parameters
    return DeltaRows(roles, own.own(KIND, "pages"), own.own(KIND, "recent"), own.sinks, own.by_score)
