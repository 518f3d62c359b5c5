"""The low-bit policies in the decode steps of a server on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.decode.gpu_selector import (
    Entry,
    PageIndexSelector,
    Server,
    count_capped,
    count_extended,
    count_shares,
    rows_within,
)
from winnow_kernels.decode.gpu_step import Step
from winnow_kernels.decode.request import Request
from winnow_kernels.decode.statistics import Statistics
from winnow_kernels.indexes.key_codes import KeyCodes
from winnow_kernels.policies.lowbit_top_p.aim import aimed_share
from winnow_kernels.policies.lowbit_top_p.gpu.cuda.arguments import PAIRS, Lists, Sizes
from winnow_kernels.policies.lowbit_top_p.gpu.cuda.kernels import CudaKernels, fits, serves
from winnow_kernels.policies.lowbit_top_p.gpu.layer import Layer
from winnow_kernels.policies.lowbit_top_p.gpu.selection import select
from winnow_kernels.policies.lowbit_top_p.gpu.state import Anchors, Policies, Scratch
from winnow_kernels.policies.lowbit_top_p.parameters import LowBitTopP

KIND = "lowbit_top_p"
_NOWHERE = torch.device("meta")


class CodedSelector(PageIndexSelector, ABC):
    """Tokens by the codes of their keys.

    Attributes:
        kind: of policy.
        by_key: whether requests have budgets, or shares of the mass.
        nothing: int32 [rows], zeros, for what a kind does not ask for.
    """

    reports_shares = True
    kind: ClassVar[str]
    by_key: ClassVar[bool]

    def __init__(self, server: Server) -> None:
        self._codes = server.indexes[KeyCodes]
        super().__init__(self._codes)
        self._scale = server.scale
        step, cache = server.step, server.caches[0]
        kv_heads = cache.kv_heads
        self._kv_heads, self._group = kv_heads, server.query_heads // kv_heads
        shape = (kv_heads, self._group, cache.head_dim, step.batch.longest)
        device = step.slots.device
        sizes = Sizes(cache.head_dim, self._group, kv_heads, step.batch.page_size, cache.keys.dtype)
        # CUDA C++ knows of no caps.
        is_served = cache.softmax.cap is None and serves(sizes, self._codes.bits)
        in_triton = self.by_key or not (is_served and fits(device, sizes))
        # In CUDA C++ a block waits only for earlier ones of its launch, which run already or have run.
        self.programs_meet = in_triton
        kinds = {"with_keys": self.by_key, "in_triton": in_triton}
        of_row = Scratch.empty(1, *shape, _NOWHERE, **kinds)
        bytes_of_row = of_row.bytes + (0 if in_triton else Lists.empty(1, sizes, of_row.tokens, _NOWHERE).bytes)
        most_rows = step.rows if in_triton else PAIRS // kv_heads
        self._rows = min(rows_within(bytes_of_row, step.rows), most_rows)
        self._scratch = Scratch.empty(self._rows, *shape, device, **kinds)
        self._cuda = None if in_triton else CudaKernels.on(device, sizes, self._rows, self._scratch.tokens)
        self._acts = torch.zeros(step.rows, dtype=torch.int32, device=device)
        self._anchors = [
            Anchors.empty(server.requests, server.query_heads, kv_heads, step.request_slots) for _ in server.caches
        ]
        self.nothing = torch.zeros(step.rows, dtype=torch.int32, device=device)
        self._ordered = True

    @abstractmethod
    def asked(self, part: Step, rows: slice, acts: Tensor) -> Policies:
        """Return what the ``rows`` of a part ask for; ``acts`` is not 0 in those of this kind."""

    def capped(self, step: Step) -> Tensor:
        """Return where it is noted that a cap has cut a selection: int32 [rows]."""
        return self.nothing[: step.rows]

    def begin(self, step: Step, *, ordered: bool) -> None:
        self._ordered = ordered
        acts = self._acts[: step.rows]
        acts.copy_(step.parameters.acting(self.kind))
        self._codes.extend(step.batch, acts)

    def select(self, layer: int, queries: Tensor, cache: LayerCache, step: Step) -> None:
        anchors = self._anchors[layer]
        acts, capped = self._acts[: step.rows], self.capped(step)
        for rows, part in step.parts(self._rows):
            policies = self.asked(part, rows, acts[rows])
            select(
                Layer(layer, queries[rows], cache, self._codes, part.batch, policies, self._scale),
                self._scratch,
                anchors._replace(slots=part.request_slots),
                part.selection(layer),
                part.reported.beliefs,
                capped[rows],
                in_order=self._ordered,
                by_key=self.by_key,
                cuda=self._cuda,
            )

    def finish(self, step: Step, statistics: Statistics) -> None:
        acts = self._acts[: step.rows]
        count_extended(step, acts, statistics)
        count_shares(step, acts > 0, statistics)

    def missed(self, rows: int) -> tuple[bool, float]:
        """Return where ``select``, when it last ran, began to look in vain; in a batch of ``rows`` rows that all act.

        Returns:
            Whether tokens had to be marked or listed again; and for what share of the query heads, or of the KV heads
            where there are budgets, they had to be counted again.
        """
        scratch, group = self._scratch, self._group
        pairs = rows * self._kv_heads
        is_open = scratch.key_open[:pairs] if self.by_key else scratch.open[:pairs, :group]
        # CUDA C++ lists again whatever it counts again, and has cleared the flag by now.
        begins_anew = scratch.any_open if self._cuda is None else (is_open != 0).any()
        return bool(begins_anew), float((is_open != 0).double().mean())


class LowBitTopPSelector(CodedSelector):
    """As many tokens as hold each query head's share of the attention mass."""

    kind = KIND
    by_key = False

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self._ranks = server.ranks
        self._capped = torch.zeros_like(self.nothing)
        device = self.nothing.device
        self._aims_of_requests = torch.zeros(server.requests, dtype=torch.float64, device=device)
        self._aims = torch.zeros(len(self.nothing), dtype=torch.float64, device=device)

    def enter(self, request: Request, slot: int, context: Context) -> Entry:
        policy = request.decode
        assert isinstance(policy, LowBitTopP)
        self._aims_of_requests[slot] = aimed_share(policy.p, self._codes.bits)
        return super().enter(request, slot, context)

    def asked(self, part: Step, rows: slice, acts: Tensor) -> Policies:
        own, aims = part.parameters, self._aims[rows]
        least, most = own.own(KIND, "least"), own.own(KIND, "most")
        return Policies(acts, aims, own.sinks, least, most, self.nothing[: part.rows], own.by_score)

    def capped(self, step: Step) -> Tensor:
        return self._capped[: step.rows]

    def begin(self, step: Step, *, ordered: bool) -> None:
        super().begin(step, ordered=ordered)
        torch.index_select(self._aims_of_requests, 0, step.request_slots, out=self._aims[: step.rows])
        self.capped(step).zero_()

    def finish(self, step: Step, statistics: Statistics) -> None:
        super().finish(step, statistics)
        capped = self.capped(step)
        if self._ordered:
            # A step is capped if a head of any rank is.
            self._ranks.maximize(capped)
        count_capped(step, capped, step.parameters.acting(KIND), statistics)
