"""On CUDA the dense backend is planned wherever it computes a layer, and CUDA graphs read what is planned."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_winnow.device.backend import WinnowDeviceBackend
from sglang_winnow.device.decode import Variant
from sglang_winnow.device.dense import DensePlans
from sglang_winnow.device.layers import ModelLayers
from sglang_winnow.device.variants import DENSE, variants_of

SIZES = (4, 2, 1)
VARIANTS = variants_of({"quest", "delta", "tactic"}, (), 2, ())
PLAIN, WITH_WINDOWS = ModelLayers((0, 1), {}), ModelLayers((1, 3), {0: 40, 2: 40})


class Buffers:
    """What the kernels of a graph read: of whom it was planned last."""

    def __init__(self) -> None:
        self.planned: Any = None


class Dense:
    """A dense backend that records what is planned."""

    def __init__(self) -> None:
        self.forward_metadata: Buffers | None = None
        self.of_sizes: dict[int, Buffers] = {}
        self.begun = 0

    def init_forward_metadata(self, batch: Any) -> None:
        self.forward_metadata = Buffers()
        self.forward_metadata.planned = batch

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        del max_bs, max_num_tokens
        self.of_sizes = {}

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        raise NotImplementedError

    def init_forward_metadata_in_graph(self, batch: Any) -> None:
        del batch
        self.begun += 1


class LikeFlashInfer(Dense):
    """Makes buffers of its own for each graph that is captured, and plans replays in the last ones of a size."""

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        if in_capture:
            self.of_sizes[batch.batch_size] = self.forward_metadata = Buffers()
        self.of_sizes[batch.batch_size].planned = batch


class LikeFlashAttention(LikeFlashInfer):
    """Has replays read the metadata of their size, too."""

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        self.forward_metadata = self.of_sizes[batch.batch_size]


class Decode:
    """Stands for the decode steps: knows what is launched."""

    def __init__(self) -> None:
        self.variant = Variant(frozenset())

    def prepare(self, variant: Variant, *_: Any) -> None:
        self.variant = variant

    def begin(self) -> None:
        """Launch nothing."""


@pytest.fixture(params=[LikeFlashInfer, LikeFlashAttention])
def dense(request: pytest.FixtureRequest) -> Dense:
    made: Dense = request.param()
    return made


def backend_of(layers: ModelLayers, dense: Dense) -> Any:
    backend: Any = object.__new__(WinnowDeviceBackend)
    backend._dense, backend._dense_plans = dense, DensePlans(dense)
    backend._layers, backend._decode = layers, Decode()
    backend._states, backend._slots, backend._lengths, backend._prefill = [], [], [], None
    backend._explained, backend.compared, backend._attends_densely = [], [], False
    backend.indexes = SimpleNamespace(generations=SimpleNamespace(written=lambda _: None))
    backend.variants, backend.label, backend.capturing = VARIANTS, DENSE, None
    return backend


def batch_of(size: int) -> Any:
    slots = torch.zeros(size, dtype=torch.int64)
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        req_pool_indices=slots,
        seq_lens=slots + 1,
        out_cache_loc=slots,
    )


def capture(backend: Any, dense: Dense) -> dict[tuple[int, str], Buffers | None]:
    """Capture all graphs, as SGLang does; return what each reads."""
    graphs = {}
    backend.init_cuda_graph_state(max(SIZES), max(SIZES))
    for size, label in product(SIZES, VARIANTS):
        backend.capturing = label
        batch = batch_of(size)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        backend.init_forward_metadata_in_graph(batch)
        graphs[size, label] = dense.forward_metadata
    backend.capturing = None
    return graphs


def computes_densely(layers: ModelLayers, label: str) -> bool:
    return bool(layers.windows) or label == DENSE


@pytest.mark.parametrize("layers", [PLAIN, WITH_WINDOWS])
def test_each_graph_reads_what_is_planned_for_its_replay(layers: ModelLayers, dense: Dense) -> None:
    backend = backend_of(layers, dense)
    # A server may capture anew.
    for _ in range(2):
        graphs = capture(backend, dense)
        assert dense.begun == sum(computes_densely(layers, label) for _, label in graphs)
        dense.begun = 0
        for size, label in [*graphs, *reversed(graphs)]:
            backend.init_forward_metadata(batch_of(3))
            backend.label = label
            batch = batch_of(size)
            backend.init_forward_metadata_out_graph(batch)
            if computes_densely(layers, label):
                read = graphs[size, label]
                assert read is not None
                assert read.planned is batch
            else:
                assert all(buffers.planned is not batch for buffers in dense.of_sizes.values())


@pytest.mark.parametrize("layers", [PLAIN, WITH_WINDOWS])
def test_a_step_without_a_graph_is_planned_where_layers_are_computed_densely(layers: ModelLayers, dense: Dense) -> None:
    backend = backend_of(layers, dense)
    for label in VARIANTS:
        backend.label, batch = label, batch_of(2)
        backend.init_forward_metadata(batch)
        planned = dense.forward_metadata is not None and dense.forward_metadata.planned is batch
        assert planned == computes_densely(layers, label)


def test_layers_that_take_turns_have_their_part_planned(dense: Dense) -> None:
    plans = DensePlans(dense)
    whole, part = batch_of(3), batch_of(1)
    plans.plan(whole)
    first = dense.forward_metadata
    plans.ensure(whole)
    assert dense.forward_metadata is first
    for batch in (part, whole, part):
        plans.ensure(batch)
        assert dense.forward_metadata is not None
        assert dense.forward_metadata.planned is batch
    # A pass is planned whatever was planned before it.
    before = dense.forward_metadata
    plans.plan(part)
    assert dense.forward_metadata is not before
    # What graphs plan may lie in the same buffers.
    backend = backend_of(WITH_WINDOWS, dense)
    backend._dense_plans = plans
    capture(backend, dense)
    plans.ensure(part)
    assert dense.forward_metadata is not None
    assert dense.forward_metadata.planned is part
