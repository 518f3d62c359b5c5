"""Decode on ranks that share out the heads, as one rank with all heads computes and counts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier, Lock

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from tests.sglang_ext.device.test_decode import (
    EVERYTHING,
    GROUP,
    KV_HEADS,
    POLICIES,
    Server,
    Share,
    device_decode,
    on_device,
    policies_act_at_every_length,
)
from winnow_kernels.decode.ranks import Ranks
from winnow_kernels.decode.statistics import Field

__all__ = ["policies_act_at_every_length"]

Outcome = tuple[list[Tensor], Tensor]
OF_KV_HEADS = [Field(number) for number in range(Field.DECODE_CONTEXT, Field.ESTIMATED_SHARE)]


class Lockstep:
    """Ranks in threads, one of which runs at a time: the interpreter of kernels is not made for more."""

    def __init__(self, size: int) -> None:
        self._given: list[Tensor] = [torch.empty(0)] * size
        self._operation = ReduceOp.SUM
        self._running = Lock()
        self._all_given = Barrier(size, action=self._combine)

    def run(self, tasks: Sequence[Callable[[], Outcome]]) -> list[Outcome]:
        with ThreadPoolExecutor(len(tasks)) as threads:
            return list(threads.map(self._run, tasks))

    def _run(self, task: Callable[[], Outcome]) -> Outcome:
        with self._running:
            try:
                return task()
            except BaseException:
                self._all_given.abort()
                raise

    def reduce(self, rank: int, numbers: Tensor, operation: ReduceOp.RedOpType) -> None:
        assert numbers.is_contiguous()
        self._given[rank] = numbers
        self._operation = operation
        self._running.release()
        try:
            self._all_given.wait()
        finally:
            self._running.acquire()

    def _combine(self) -> None:
        together = torch.stack(self._given)
        combined = together.amax(0) if self._operation == ReduceOp.MAX else together.sum(0)
        for own in self._given:
            own.copy_(combined)


def shares(size: int) -> tuple[Lockstep, list[Share]]:
    """Return what each of ``size`` ranks has; more ranks than KV heads have copies, as in SGLang."""
    lockstep = Lockstep(size)
    query_heads = KV_HEADS * GROUP // size
    kv_heads = max(1, KV_HEADS // size)
    found = []
    for rank in range(size):
        first = rank * KV_HEADS // size
        found.append(
            Share(
                slice(first, first + kv_heads),
                slice(rank * query_heads, (rank + 1) * query_heads),
                Ranks(rank, partial(lockstep.reduce, rank)),
            )
        )
    return lockstep, found


def decode(names: Sequence[str], lengths: Sequence[int], device: torch.device, share: Share = EVERYTHING) -> Outcome:
    """Return what each layer of a step yields, and the requests' costs."""
    server = Server(names, lengths, device, share)
    outputs = on_device(server, device_decode(server), step=0, padding=1)
    return outputs, server.statistics.snapshot(server.request_slots).cpu()


def on_ranks(names: Sequence[str], lengths: Sequence[int], device: torch.device, size: int) -> list[Outcome]:
    lockstep, found = shares(size)
    return lockstep.run([partial(decode, names, lengths, device, share) for share in found])


def assert_equal_outputs(of_ranks: Sequence[Outcome], expected: Outcome) -> None:
    for pieces, whole in zip(zip(*(outputs for outputs, _ in of_ranks), strict=True), expected[0], strict=True):
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["delta", "tactic, capped"], id="what heads must agree on"),
        # KV heads of Ada-SnapKV share a budget with those of their rank.
        pytest.param(sorted(POLICIES.keys() - {"ada_snapkv"}), id="all policies", marks=pytest.mark.full),
    ],
)
def test_two_ranks_attend_and_count_as_one(names: list[str], device: torch.device) -> None:
    lengths = [140 + 5 * i for i in range(len(names))]
    expected = decode(names, lengths, device)
    of_ranks = on_ranks(names, lengths, device, 2)
    assert_equal_outputs(of_ranks, expected)
    wanted = expected[1]
    for _, got in of_ranks:
        assert torch.equal(got, of_ranks[0][1])
        for field in set(Field) - {Field.ESTIMATED_SHARE, Field.ESTIMATES}:
            assert torch.equal(got[:, field], wanted[:, field]), field.name
        shares_of_mass = got[:, Field.ESTIMATED_SHARE] / got[:, Field.ESTIMATES]
        wanted_shares = wanted[:, Field.ESTIMATED_SHARE] / wanted[:, Field.ESTIMATES]
        torch.testing.assert_close(shares_of_mass, wanted_shares, rtol=1e-6, atol=0, equal_nan=True)
    assert wanted[names.index("tactic, capped"), Field.CAPPED_STEPS] == 1


def test_copies_of_a_kv_head_count_once_each(device: torch.device) -> None:
    names, lengths = ["delta", "dense"], [143, 90]
    expected = decode(names, lengths, device)
    of_ranks = on_ranks(names, lengths, device, 2 * KV_HEADS)
    assert_equal_outputs(of_ranks, expected)
    for _, got in of_ranks:
        assert torch.equal(got[:, OF_KV_HEADS], 2 * expected[1][:, OF_KV_HEADS])
        assert torch.equal(got[:, Field.STEPS], expected[1][:, Field.STEPS])
