"""The generated keys are as sparse as Tactic's Table 3 says, and their clusters and groups as loose."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.tactic_keys import OPTIMAL, TABLE_LENGTH, make_keys, p_for_union, table_of, tables_of, union_of

QUERIES = 6


def test_table_3() -> None:
    made = make_keys(TABLE_LENGTH + QUERIES, QUERIES, 1, 4, 128, dtype=torch.float32)
    tables = tables_of(made)
    for p in (0.5, 0.7, 0.9):
        table = table_of(tables, p)
        assert table["head"]["optimal"] == pytest.approx(OPTIMAL[p], rel=0.2)
        assert table["head"]["cluster_optimal"] <= 2.2 * table["head"]["optimal"]
        assert table["union"]["tactic"] >= 1.8 * table["head"]["tactic"]


def test_union_as_wanted() -> None:
    made = make_keys(8192 + QUERIES, QUERIES, 1, 4, 64, seed=1, dtype=torch.float32)
    found = [p_for_union(made, union) for union in (0.05, 0.12)]
    assert found[0] < found[1]
    tables = tables_of(made)
    assert [union_of(tables, p) for p in found] == pytest.approx([0.05, 0.12], rel=0.05)


def test_the_more_is_shared_the_smaller_the_union() -> None:
    unions = []
    for shared in (16, 32):
        made = make_keys(8192 + QUERIES, QUERIES, 1, 4, 64, shared=shared, dtype=torch.float32)
        table = table_of(tables_of(made), 0.7)
        unions.append(table["union"]["optimal"] / table["head"]["optimal"])
    assert unions[0] > unions[1] + 0.5


def test_seeds() -> None:
    one, same, other = (make_keys(3000, 2, 3, 2, 64, seed=seed) for seed in (0, 0, 1))
    assert one.keys.shape == (3000, 3, 64)
    assert one.queries.shape == (2, 6, 64)
    assert torch.equal(one.keys, same.keys)
    assert torch.equal(one.queries, same.queries)
    assert not torch.equal(one.keys, other.keys)


@pytest.mark.parametrize(("head_dim", "shared", "field"), [(32, 20, "head_dim"), (64, 33, "shared")])
def test_bounds(head_dim: int, shared: int, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        make_keys(1000, 1, 1, 1, head_dim, shared=shared)
