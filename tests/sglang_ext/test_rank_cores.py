"""Each rank of data parallelism on a CPU has cores, on machines with fewer memory nodes than ranks, too."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_winnow import rank_cores
from sglang_winnow.rank_cores import ENVIRONMENT, share_cores


@given(st.integers(1, 40), st.lists(st.integers(1, 16), min_size=1, max_size=4))
def test_every_rank_has_as_many_and_none_is_left_over(ranks: int, sizes: list[int]) -> None:
    starts = [sum(sizes[:node]) for node in range(len(sizes))]
    nodes = [",".join(str(start + i) for i in range(size)) for start, size in zip(starts, sizes, strict=True)]
    parts = [part.split(",") for part in share_cores(ranks, nodes).split("|")]
    assert len(parts) == ranks
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    shared = [int(core) for part in parts for core in part]
    if ranks <= sum(sizes):
        assert shared == list(range(sum(sizes)))
    else:
        assert set(shared) == set(range(sum(sizes)))


@pytest.mark.parametrize(
    ("ranks", "given", "expected"), [(2, None, "0|1"), (1, None, None), (2, "all", "all"), (4, None, "0|0|1|1")]
)
def test_what_the_environment_says_is_kept(
    ranks: int, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_cores, "get_cpu_ids_by_node", lambda: ["0,1"])
    monkeypatch.setenv(ENVIRONMENT, given or "")
    if given is None:
        monkeypatch.delenv(ENVIRONMENT)
    rank_cores._bind_before_launch(None, SimpleNamespace(dp_size=ranks))
    assert os.environ.get(ENVIRONMENT) == expected
