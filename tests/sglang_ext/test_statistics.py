"""What the counters of requests do on a GPU that must not wait, seen with tensors that have no memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from winnow_kernels.decode.statistics import Field, Statistics


class Copies(TorchDispatchMode):
    """Notes copies from the host, which wait for all that the GPU has been told to do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, _types: Any, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        if "copy" in str(operator) and any(tensor.device.type == "cpu" for tensor in tensors):
            self.found.append(str(operator))
        return operator(*arguments, **(named or {}))


def test_to_set_one_number_waits_for_nothing() -> None:
    with FakeTensorMode():
        statistics = Statistics(4, torch.device("cuda"))
        with Copies() as copies:
            statistics.set_one(3, Field.BUDGET, 1024.0)
        assert copies.found == []
        with Copies() as copies:
            statistics.rows[3, Field.BUDGET] = 1024.0
        assert copies.found


def test_one_number_is_set() -> None:
    statistics = Statistics(4, torch.device("cpu"))
    statistics.set_one(2, Field.BUDGET, 7.0)
    assert statistics.rows.count_nonzero() == 1
    assert statistics.rows[2, Field.BUDGET] == 7
