"""Audited steps on the device: what the torch path finds, at no cost to anything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_winnow.device.decode import DeviceDecode, Variant
from sglang_winnow.device.variants import variant_for
from sglang_winnow.request_state import RequestState
from tests.sglang_ext.device.test_decode import (
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    POLICIES,
    SHAPE,
    TERMINATION,
    VARIANTS,
    Server,
    Shape,
    by_torch,
    device_decode,
    in_8_bits,
    of_field,
    on_device,
    policies_act_at_every_length,
    queries_of,
)
from tests.sglang_ext.device.test_ranks import shares
from winnow_kernels.attend.cuda.kernel import CudaAttend
from winnow_kernels.attend.gpu import attend_kernel
from winnow_kernels.decode.audit import is_audited
from winnow_kernels.decode.gpu_selector import Entry, NoRoomError
from winnow_kernels.decode.statistics import Field
from winnow_kernels.policies.quest.declaration import DECLARATION as QUEST
from winnow_kernels.policies.streaming_llm.declaration import DECLARATION as STREAMING_LLM

__all__ = ["policies_act_at_every_length"]

AUDITED = [field for field in Field if field.name.startswith("AUDITED")]
BESIDE = [field for field in Field if field not in AUDITED]
SPARSE = [name for name, policy in POLICIES.items() if policy and "verify" not in policy]
FEW = ["quest", "delta", "quest, terminated", "dense"]
LENGTHS = [208, 143, 190, 90]
STEPS = 2


def audited(policies: Mapping[str, Mapping[str, Any]], share: float) -> dict[str, Mapping[str, Any]]:
    return {name: policy if "verify" in policy else {**policy, "audit": share} for name, policy in policies.items()}


def run(
    names: Sequence[str], lengths: Sequence[int], device: torch.device, share: float, *, by_torch_too: bool = False
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """The outputs of each step and layer, and the statistics of each row; those of the torch path, if wanted."""
    policies = audited(POLICIES, share)
    servers = [Server(names, lengths, device, policies=policies) for _ in range(1 + by_torch_too)]
    decode = device_decode(servers[0])
    outputs = []
    for step in range(STEPS):
        outputs += on_device(servers[0], decode, step, padding=1)
        for other in servers[1:]:
            by_torch(other, step)
        for server in servers:
            server.grow()
    own, *others = (server.statistics.rows[1 : len(names) + 1].cpu() for server in servers)
    return outputs, own, others[0] if others else None


def assert_audits_equal(own: Tensor, wanted: Tensor) -> None:
    for field in Field:
        torch.testing.assert_close(own[:, field], wanted[:, field], rtol=1e-5, atol=1e-4, msg=partial(of_field, field))


@pytest.mark.parametrize(
    ("names", "lengths"),
    [
        (FEW, LENGTHS),
        pytest.param(SPARSE, [140 + 13 * i % 100 for i in range(len(SPARSE))], marks=pytest.mark.full),
    ],
    ids=["few", "all"],
)
def test_audits_are_those_of_the_torch_path_and_nothing_else_changes(
    names: list[str], lengths: list[int], device: torch.device
) -> None:
    outputs, own, wanted = run(names, lengths, device, 1.0, by_torch_too=True)
    assert wanted is not None
    assert_audits_equal(own, wanted)
    sparse = torch.tensor([name != "dense" for name in names])
    assert own[:, Field.AUDITED_STEPS].tolist() == (STEPS * sparse).tolist()
    assert own[:, Field.AUDITED_HEADS].tolist() == (STEPS * LAYERS * SHAPE.query_heads * sparse).tolist()
    held = (own[:, Field.AUDITED_SHARE] / own[:, Field.AUDITED_HEADS])[sparse]
    assert bool(((held > 0) & (held <= 1)).all())
    assert float(held.min()) < 0.95
    assert float(own[:, Field.AUDITED_ERROR].max()) > 0.1

    plain, without, _ = run(names, lengths, device, 0.0)
    for one, other in zip(plain, outputs, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(without[:, BESIDE], own[:, BESIDE])
    assert not without[:, AUDITED].any()


def test_the_steps_that_are_audited_are_those_of_the_torch_path(device: torch.device) -> None:
    names = ["quest", "streaming_llm", "quest, terminated"]
    given = {name: {**POLICIES[name], "audit": share} for name, share in zip(names, (0.5, 0.25, 0.0), strict=True)}
    servers = [Server(names, [143, 190, 120], device, policies=given) for _ in range(2)]
    for server in servers:
        for state, length, offset in zip(server.states, server.lengths, (0, 2, 3), strict=True):
            # None has just begun.
            state.audit_offset = offset - 2
            state.prompt_length = length - 3
    decode, labels = device_decode(servers[1]), []
    for step in range(5):
        by_torch(servers[0], step)
        needed = decode.needed(servers[1].states, servers[1].lengths)
        labels.append(needed.audited)
        on_device(servers[1], decode, step, padding=0)
        for server in servers:
            server.grow()
    assert labels == [is_audited(step, 0.5) or is_audited(step + 2, 0.25) for step in range(1, 6)]
    assert 0 < sum(labels) < 5
    wanted, own = (server.statistics.rows[1:4].cpu() for server in servers)
    assert_audits_equal(own, wanted)
    assert own[:, Field.AUDITED_STEPS].tolist() == [2, 1, 0]


def replayable(launch: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What replays a CUDA graph of ``launch``, or launches again where kernels are interpreted."""
    if device.type != "cuda":
        return launch
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def test_one_graph_serves_all_steps_whichever_rows_they_audit(device: torch.device) -> None:
    names = ["quest", "streaming_llm", "quest", "dense"]
    wanted, own = (Server(names, LENGTHS, device, policies=audited(POLICIES, 0.5)) for _ in range(2))
    for server in (wanted, own):
        for state, length, offset in zip(server.states, server.lengths, (0, 0, 1, 0), strict=True):
            # None has just begun.
            state.audit_offset = offset - 2
            state.prompt_length = length - 3
    decode, slots = device_decode(own), own.request_slots
    variant = Variant(frozenset({"quest", STREAMING_LLM.kind}), audited=True)
    queries = [queries_of(own, 0, layer) for layer in range(LAYERS)]
    outputs = [torch.empty_like(of_layer) for of_layer in queries]

    def prepare(states: Sequence[RequestState], lengths: Sequence[int]) -> None:
        of_states = slots[: len(states)].tolist()
        decode.prepare(variant, states, of_states, lengths, slots, torch.tensor(own.lengths, device=device))

    def launch() -> None:
        decode.begin()
        for layer in range(LAYERS):
            decode.attend(layer, queries[layer], outputs[layer])
        decode.finish()

    # As a graph is captured: of rows that nobody knows.
    prepare((), ())
    replay = replayable(launch, device)
    own.statistics.rows.zero_()
    for step in range(3):
        expected = by_torch(wanted, step)
        for layer, of_layer in enumerate(queries):
            of_layer.copy_(queries_of(own, step, layer))
        prepare(own.states, own.lengths)
        replay()
        for output, wanted_output in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output, wanted_output, rtol=1e-4, atol=1e-4)
        for server in (wanted, own):
            server.grow()
    told, expected_told = (server.statistics.rows[1:5].cpu() for server in (own, wanted))
    assert_audits_equal(told, expected_told)
    assert told[:, Field.AUDITED_STEPS].tolist() == [1, 1, 2, 0]


@pytest.mark.parametrize("stored", [in_8_bits])
@pytest.mark.parametrize("shape", [Shape(kv_heads=1, group=3, head_dim=96)])
def test_other_shapes_and_narrow_caches(stored: Any, shape: Shape, device: torch.device) -> None:
    names, lengths = ["quest", "streaming_llm"], [143, 190]
    policies = audited(POLICIES, 1.0)
    torch_server, device_server = (
        Server(names, lengths, device, policies=policies, shape=shape, stored=stored) for _ in range(2)
    )
    by_torch(torch_server, 0)
    on_device(device_server, device_decode(device_server), 0, padding=1)
    wanted, own = (server.statistics.rows[1:3].cpu() for server in (torch_server, device_server))
    assert_audits_equal(own, wanted)
    assert own[:, Field.AUDITED_STEPS].tolist() == [1, 1]


def test_who_has_no_room_runs_dense_and_is_not_audited(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(["quest", "streaming_llm"], [143, 143], device, policies=audited(POLICIES, 1.0))
    decode = device_decode(server)

    def has_no_room(*_: object) -> Entry:
        raise NoRoomError("no room")

    monkeypatch.setattr(decode._selectors[QUEST.kind], "enter", has_no_room)
    on_device(server, decode, 0, padding=0)
    assert server.statistics.rows[1:3, Field.AUDITED_STEPS].tolist() == [0, 1]
    assert server.statistics.rows[1:3, Field.DENSE_STEPS].tolist() == [1, 0]


def test_a_context_that_is_read_whole_is_not_audited(device: torch.device) -> None:
    server = Server(["quest", "streaming_llm"], [62, 143], device, policies=audited(POLICIES, 1.0))
    on_device(server, device_decode(server), 0, padding=0)
    assert server.statistics.rows[1:3, Field.AUDITED_STEPS].tolist() == [0, 1]


def test_two_ranks_audit_as_one(device: torch.device) -> None:
    names, lengths = ["delta", "quest", "lowbit_top_p"], [143, 190, 160]
    policies = audited(POLICIES, 1.0)

    def decode(share: Any) -> tuple[list[Tensor], Tensor]:
        server = Server(names, lengths, device, share, policies=policies)
        outputs = on_device(server, device_decode(server), 0, padding=1)
        return outputs, server.statistics.snapshot(server.request_slots).cpu()

    alone = Server(names, lengths, device, policies=policies)
    on_device(alone, device_decode(alone), 0, padding=1)
    wanted = alone.statistics.rows[alone.request_slots].cpu()
    lockstep, found = shares(2)
    for _, own in lockstep.run([partial(decode, share) for share in found]):
        for field in AUDITED:
            torch.testing.assert_close(own[:, field], wanted[:, field], rtol=1e-6, atol=1e-6)
    assert wanted[:, Field.AUDITED_STEPS].tolist() == [1, 1, 1]


class Launches:
    """Counts kernels, none of which runs."""

    def __init__(self, decode: DeviceDecode, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._decode, self._step = decode, decode.buffers[rows]
        self._launched: Counter[str] = Counter()
        monkeypatch.setattr(type(attend_kernel), "run", lambda kernel, *_, **__: self._note(kernel.fn))
        # In CUDA C++ it is the same step.
        monkeypatch.setattr(CudaAttend, "launch", lambda *_: self._note(attend_kernel.fn))

    def _note(self, kernel: Any) -> None:
        self._launched[f"{kernel.__module__.rpartition('.')[2]}:{kernel.__name__}"] += 1

    def of(self, variant: Variant) -> Counter[str]:
        """Return the launches of a step of three layers."""
        self._launched = Counter()
        queries = torch.zeros(self._step.rows, GROUP * KV_HEADS, HEAD_DIM, device=self._step.slots.device)
        self._decode.prepare(variant, (), (), (), self._step.request_slots, self._step.batch.lengths)
        self._decode.begin()
        for layer in range(LAYERS):
            self._decode.attend(layer, queries, torch.empty_like(queries))
        self._decode.finish()
        return self._launched


@pytest.mark.parametrize("kind", [STREAMING_LLM.kind, "delta"])
def test_a_graph_without_audits_launches_none(kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(device_decode(Server(["dense"] * 4, [64] * 4, device)), 4, monkeypatch)
    variant = VARIANTS[kind]
    without, audits = launches.of(variant), launches.of(replace(variant, audited=True))
    expected = dict.fromkeys(("gpu:attend_kernel", "gpu_merge:merge_kernel", "gpu_audit:_compare_kernel"), LAYERS)
    assert audits - without == expected | {"gpu_audit:_count_kernel": 1}
    assert not without - audits
    assert variant_for(variant, VARIANTS) == kind
    assert variant_for(replace(variant, audited=True), VARIANTS) == f"{kind}+audit"


def test_early_termination_of_a_dense_policy_is_audited(device: torch.device) -> None:
    policy = {"early_termination": TERMINATION | {"scale": 0.9, "direction": 0.9}, "audit": 1.0}
    server = Server(["terminated"], [250], device, policies={"terminated": policy})
    other = Server(["terminated"], [250], device, policies={"terminated": policy})
    by_torch(other, 0)
    on_device(server, device_decode(server), 0, padding=0)
    assert_audits_equal(server.statistics.rows[1:2].cpu(), other.statistics.rows[1:2].cpu())
    own = server.statistics.rows[1]
    assert float(own[Field.SKIPPED_TILES]) > 0
    assert float(own[Field.AUDITED_SHARE]) < 0.99 * float(own[Field.AUDITED_HEADS])


def test_the_dense_side_reads_the_pages_of_its_step(device: torch.device) -> None:
    """Two requests exchange theirs between two steps."""
    policies = audited(POLICIES, 1.0)
    servers = [Server(["quest", "quest"], [208, 143], device, policies=policies) for _ in range(2)]
    decode = device_decode(servers[1])
    for step in range(2):
        by_torch(servers[0], step)
        on_device(servers[1], decode, step, padding=0)
        for server in servers:
            server.swap()
    wanted, own = (server.statistics.rows[1:3].cpu() for server in servers)
    for field in AUDITED:
        torch.testing.assert_close(own[:, field], wanted[:, field], rtol=1e-5, atol=1e-4)
