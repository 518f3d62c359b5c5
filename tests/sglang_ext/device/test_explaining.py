"""Explained steps on the device: positions and weights are those of the torch path, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_winnow.device.decode import DeviceDecode
from sglang_winnow.device.variants import variant_for
from sglang_winnow.explaining import explained, explained_rows
from tests.sglang_ext.device.test_decode import (
    KV_HEADS,
    LAYERS,
    POLICIES,
    TERMINATION,
    VARIANTS,
    Server,
    by_torch,
    device_decode,
    on_device,
    policies_act_at_every_length,
    queries_of,
)
from winnow_kernels.contract.explanation import Explain
from winnow_kernels.decode.explanation import Explanation

__all__ = ["policies_act_at_every_length"]

SPARSE = [name for name, policy in POLICIES.items() if policy and "verify" not in policy]
FEW = ["quest", "delta", "streaming_llm"]
SOON = {"early_termination": TERMINATION | {"scale": 0.9, "direction": 0.9}}
ASKED = Explain(steps=(1,), layers=tuple(range(LAYERS)), heads=tuple(range(KV_HEADS)))


def explaining(server: Server) -> Server:
    for state in server.states:
        state.explanation = Explanation(ASKED)
    return server


def explained_on_device(server: Server, decode: DeviceDecode) -> list[Tensor]:
    """As the backend does: behind the attention of each layer."""
    variant = VARIANTS[variant_for(decode.needed(server.states, server.lengths), VARIANTS)]
    slots = server.request_slots.tolist()
    lengths = torch.tensor(server.lengths, device=server.device)
    decode.prepare(variant, server.states, slots, server.lengths, server.request_slots, lengths)
    decode.begin()
    rows, outputs = explained_rows(server.states, server.lengths), []
    for layer in range(LAYERS):
        queries = queries_of(server, 0, layer)
        outputs.append(torch.empty_like(queries))
        if not variant.is_dense:
            decode.attend(layer, queries, outputs[-1])
        for row in rows:
            decode.explain(layer, layer, queries, row, slots[row.row])
    decode.finish()
    return outputs


def assert_explained_alike(own: Server, wanted: Server) -> int:
    """Return in how many layers and heads less than everything was attended to."""
    fewer = 0
    for row, length in enumerate(own.lengths):
        explanations = [server.states[row].explanation for server in (own, wanted)]
        assert all(explanations)
        found, expected = (explained(each, [0, 1]) for each in explanations if each is not None)
        assert len(found["entries"]) == len(expected["entries"]) == LAYERS * KV_HEADS
        for entry, wanted_entry in zip(found["entries"], expected["entries"], strict=True):
            assert entry["attended"] == wanted_entry["attended"]
            assert entry["weights"] == pytest.approx(wanted_entry["weights"], abs=2e-6)
            assert entry["share"] == pytest.approx(wanted_entry["share"], abs=1e-5)
            fewer += entry["attended_tokens"] < length
    return fewer


@pytest.mark.parametrize("names", [FEW, pytest.param(SPARSE, marks=pytest.mark.full)], ids=["few", "all"])
def test_explanations_are_those_of_the_torch_path_and_nothing_else_changes(
    names: list[str], device: torch.device
) -> None:
    lengths = [140 + 13 * row % 100 for row in range(len(names))]
    wanted, own, plain = (Server(names, lengths, device) for _ in range(3))
    by_torch(explaining(wanted), 0)
    outputs = explained_on_device(explaining(own), device_decode(own))
    assert assert_explained_alike(own, wanted) > len(names)
    for output, expected in zip(outputs, on_device(plain, device_decode(plain), 0, padding=0), strict=True):
        assert torch.equal(output, expected)
    assert torch.equal(own.statistics.rows, plain.statistics.rows)


@pytest.mark.parametrize("decode", [{}, {"decode": {"policy": "quest", "budget": 200, "full_layers": 1}}])
def test_what_early_termination_did_not_read_was_not_attended_to(
    decode: dict[str, object], device: torch.device
) -> None:
    policies = {"terminated": SOON | decode}
    wanted, own = (explaining(Server(["terminated"], [250], device, policies=policies)) for _ in range(2))
    by_torch(wanted, 0)
    explained_on_device(own, device_decode(own))
    assert assert_explained_alike(own, wanted) > 0


def test_a_dense_step_attends_to_everything(device: torch.device) -> None:
    wanted, own = (explaining(Server(["dense", "quest"], [90, 62], device)) for _ in range(2))
    by_torch(wanted, 0)
    decode = device_decode(own)
    explained_on_device(own, decode)
    assert decode.variant.is_dense
    assert assert_explained_alike(own, wanted) == 0
    slots = own.request_slots.tolist()
    assert all(map(decode.runs_dense, own.states, slots, own.lengths))
    assert not decode.runs_dense(own.states[1], slots[1], 143)
