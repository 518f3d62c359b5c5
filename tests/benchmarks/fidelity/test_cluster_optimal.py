"""Clusters beside which Tactic's are counted: no others that hold as much are fewer, or have fewer tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.fidelity.cluster_optimal import ORDERS, measure, whole_clusters
from benchmarks.fidelity.fidelity_tables import unions_table
from tests.models import ModelShape, write_model, write_weights
from winnow_evaluation.fidelity.prompts import Continued
from winnow_evaluation.offline_model import OfflineModel

MOST: Final = 7
PROMPT, TOKENS = 600, 3


@st.composite
def attention(draw: st.DrawFn) -> tuple[Tensor, Tensor, float]:
    """Draw clusters' masses and sizes, and what is held without them: together 1, or less where a size is 0."""
    clusters = draw(st.integers(1, MOST))
    of_each = st.lists(st.floats(1e-6, 1.0), min_size=clusters + 1, max_size=clusters + 1)
    masses = torch.tensor(draw(of_each), dtype=torch.float64)
    masses /= masses.sum()
    sizes = torch.tensor(draw(st.lists(st.integers(0, 40), min_size=clusters, max_size=clusters)))
    return masses[:-1] * (sizes > 0), sizes, float(masses[-1])


@given(attention(), st.floats(0.05, 0.99))
def test_nothing_less_holds_the_share(drawn: tuple[Tensor, Tensor, float], p: float) -> None:
    masses, sizes, before = drawn
    subsets = torch.cartesian_prod(*[torch.tensor([False, True])] * len(masses)).view(-1, len(masses))
    held = before + (subsets * masses).sum(-1)
    can_hold = bool(held.max() >= p + 1e-9)
    # What holds it within rounding may be held to do so or not.
    doing = subsets[held >= p + 1e-9]
    taken = {order: whole_clusters(masses, sizes, torch.tensor(before), p, order) for order in ORDERS}
    for own in taken.values():
        assert not (own & (sizes == 0)).any()
        assert not can_hold or before + float(masses[own].sum()) >= p - 1e-9
    if can_hold:
        assert taken["by_mass"].sum() <= doing.sum(-1).min()
        fewest = (doing * sizes).sum(-1).min()
        by_token = taken["by_mass_per_token"].nonzero()[:, 0]
        worth = (masses / sizes.clamp_min(1))[by_token]
        # The last cluster may have more tokens than were needed of it; of equals it is that with the highest number.
        last = sizes[by_token[worth == worth.min()][-1]] if len(by_token) else 0
        assert sizes[by_token].sum() - last <= fewest


def test_enough_without_clusters_takes_none() -> None:
    masses, sizes = torch.tensor([0.1, 0.2], dtype=torch.float64), torch.tensor([3, 4])
    for order in ORDERS:
        assert not whole_clusters(masses, sizes, torch.tensor(0.7), 0.6, order).any()


def test_unions_of_a_model_are_counted(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", ModelShape(layers=3, kv_heads=2))
    write_weights(folder)
    model = OfflineModel(folder, torch.device("cpu"))
    drawn = torch.randint(5, 60, (PROMPT + TOKENS + 1,), generator=torch.Generator().manual_seed(0)).tolist()
    sums = measure(model, [Continued(drawn[:PROMPT], drawn[PROMPT:])], (0.3, 0.9))
    rows = [{"p": p, **of_share.row()} for p, of_share in sums.items()]
    for row, of_share in zip(rows, sums.values(), strict=True):
        # One layer of three is sparse.
        assert (of_share.query_heads, of_share.kv_heads) == (TOKENS * model.query_heads, TOKENS * model.kv_heads)
        union = row["union"]
        # All but two pieces of 256 tokens is read always, and the sinks.
        assert PROMPT - 512 + 16 < union[row["optimal_order"]] <= PROMPT + TOKENS
        assert union["tactic"] <= union["tactic_read"] <= PROMPT + TOKENS
        assert all(row["true_share"][order] >= row["p"] for order in ORDERS)
    assert sums[0.3].union["by_mass"] < sums[0.9].union["by_mass"]

    run = {"model": "m", "context": PROMPT, "prompts": 1, "tokens_each": TOKENS, "text": "prose"}
    path = tmp_path / "unions.json"
    path.write_text(json.dumps({"runs": [run | {"device": "CPU", "dtype": "float32", "commit": None, "rows": rows}]}))
    lines = unions_table(path).splitlines()
    assert lines[2].startswith("| m | 600 | 0.3 |")
    assert lines[-1] == "m, 1 prompts × 3 tokens of prose, CPU, float32, commit unknown."
