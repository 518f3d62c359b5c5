"""Traces of lengths are written, read and refused, and put in a server's place."""

from __future__ import annotations

import json
import pkgutil
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.layers.linear import QKVParallelLinear
from torch import Tensor, nn

from benchmarks.kernels.tactic_keys import make_keys, tables_of
from benchmarks.kernels.tactic_trace import lengths
from benchmarks.kernels.tactic_trace.alike_heads import blend, make_heads_alike
from benchmarks.kernels.tactic_trace.lengths import LengthTrace, ServedLengths
from benchmarks.kernels.tactic_trace.record import Found, correlation_for, found_in, simulated_union, trace_of
from benchmarks.kernels.tactic_trace.serving import ENVIRONMENT, check_share, register
from winnow_kernels.policies.quest.parameters import Quest
from winnow_kernels.policies.tactic.parameters import Tactic

FOLDER = Path(lengths.__file__).parent
CONTENT: dict[str, Any] = {
    "about": {"generator": "none"},
    "clustered": 2048,
    "group": 2,
    "correlation": 0.5,
    "recorded": [
        {"p": 0.5, "tokens": [[[10, 20], [30, 40]]], "tokens_per_head": 25.0, "union_percent": 2.0},
        {"p": 0.9, "tokens": [[[11, 21], [31, 2048]]], "tokens_per_head": 527.75, "union_percent": 30.0},
    ],
}


def changed(*path: str | int, value: object) -> dict[str, Any]:
    content: Any = json.loads(json.dumps(CONTENT))
    at = content
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    result: dict[str, Any] = content
    return result


def test_read_and_write(tmp_path: Path) -> None:
    path, copy = tmp_path / "trace.json", tmp_path / "copy.json"
    path.write_text(json.dumps(CONTENT))
    trace = LengthTrace.read(path)
    trace.write(copy)
    assert json.loads(copy.read_text()) == CONTENT
    assert trace.shares == [0.5, 0.9]
    assert trace.tokens.tolist() == [[[[10, 20], [30, 40]]], [[[11, 21], [31, 2048]]]]


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (changed("clustered", value=0), "clustered"),
        (changed("correlation", value=1.5), "correlation"),
        (changed("recorded", value=[]), "recorded"),
        (changed("more", value=1), "more"),
        (changed("recorded", 1, "p", value=1.1), "recorded.1.p"),
        (changed("recorded", 1, "p", value=0.5), "each p"),
        (changed("recorded", 0, "tokens", 0, 1, 1, value=-1), "recorded.0.tokens.0.1.1"),
        (changed("recorded", 0, "tokens", 0, 1, 1, value=1.5), "recorded.0.tokens.0.1.1"),
        (changed("recorded", 0, "tokens", 0, 1, 1, value=2049), "recorded.0.tokens"),
        (changed("recorded", 0, "tokens", 0, 1, value=[1]), "recorded.0.tokens"),
        (changed("recorded", 0, "tokens", value=[]), "recorded.0.tokens"),
        (changed("recorded", 1, "tokens", 0, value=[[1, 2]]), "recorded.1.tokens"),
        (changed("recorded", 1, "tokens", value=[[[1, 2], [3, 4]]] * 2), "recorded.1.tokens"),
        ({"about": {}}, "recorded"),
    ],
)
def test_what_is_no_trace(content: dict[str, Any], field: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=field) as raised:
        LengthTrace.read(path)
    assert str(path) in str(raised.value)


def test_what_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=f"{path}: "):
        LengthTrace.read(path)


def test_layers_are_spread_and_heads_repeat() -> None:
    served = ServedLengths.of(LengthTrace.model_validate(CONTENT), 3, 5, torch.device("cpu"))
    first, second = [10, 20, 10, 20, 10], [30, 40, 30, 40, 30]
    assert served.tokens[:, 0, 0].tolist() == [first, first, second]
    assert served.tokens[2, 1, 0].tolist() == [31, 2048, 31, 2048, 31]
    assert served.tokens[1].is_contiguous()
    assert (served.shares.tolist(), served.clustered) == ([0.5, 0.9], 2048)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_traces_that_there_are(path: Path) -> None:
    trace = LengthTrace.read(path)
    assert trace.shares == [0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9]
    for recorded, tokens in zip(trace.recorded, trace.tokens.double(), strict=True):
        assert recorded.tokens_per_head == pytest.approx(float(tokens.mean()), abs=0.1)
        union = recorded.union_percent / 100 * trace.clustered
        assert 2 * recorded.tokens_per_head <= union <= trace.group * recorded.tokens_per_head


def found_for(group: int) -> Found:
    tables = tables_of(make_keys(2100 + 2, 2, 2, group, 64, dtype=torch.float32))
    return found_in([(tables, 0), (tables, 0)], 0.6)


def test_what_is_found_is_what_tactic_takes() -> None:
    alone = found_for(1)
    assert alone.tokens.shape == (2, 2, 2)
    assert torch.equal(alone.union, alone.tokens)
    found = found_for(3)
    assert (found.tokens.shape, found.union.shape, found.group) == ((2, 2, 6), (2, 2, 2), 3)
    of_groups = found.tokens.unflatten(-1, (2, 3))
    assert bool((found.union >= of_groups.amax(-1)).all())
    assert bool((found.union <= of_groups.sum(-1)).all())
    trace = trace_of({0.6: found}, 2048, {"generator": "some"})
    assert trace.tokens.tolist() == [found.tokens.tolist()]
    assert trace.recorded[0].tokens_per_head == pytest.approx(float(found.tokens.double().mean()), abs=0.05)
    assert trace.recorded[0].union_percent == pytest.approx(float(found.union.double().mean()) / 20.48, abs=0.01)


def test_the_correlation_is_found_again() -> None:
    tokens = torch.randint(50, 800, (3, 4, 8), generator=torch.Generator().manual_seed(0))
    nothing = Found(tokens, torch.zeros(3, 4, 2, dtype=torch.int64))
    unions = [simulated_union(nothing, 8192, correlation) for correlation in (0.0, 0.8, 1.0)]
    mean, largest = tokens.double().mean(), tokens.unflatten(-1, (2, 4)).amax(-1).double().mean()
    assert 3.3 * mean < unions[0] < 4 * mean
    # Of equal lists the longest holds the others.
    assert unions[2] == pytest.approx(float(largest), rel=0.01)
    found = Found(tokens, torch.full((3, 4, 2), round(unions[1])))
    assert correlation_for([found], 8192) == pytest.approx(0.8, abs=0.02)


def scores_of(weights: Tensor, heads: int) -> Tensor:
    """Correlations between heads of what random keys score with random inputs: [heads, heads]."""
    generator = torch.Generator().manual_seed(5)
    queries = weights.view(heads, -1, weights.shape[1]) @ torch.randn(weights.shape[1], generator=generator)
    scores = torch.randn(4000, queries.shape[1], generator=generator) @ queries.T
    return torch.corrcoef(scores.T)


def test_heads_of_a_group_are_alike() -> None:
    weights = torch.empty(2 * 3 * 256, 512).uniform_(-1e-3, 1e-3, generator=torch.Generator().manual_seed(0))
    before, deviation = weights.clone(), float(weights.std())
    blend(weights, 2, 3, 0.9, 0)
    found = scores_of(weights, 6)
    assert found[0, 1:3].tolist() == pytest.approx([0.9, 0.9], abs=0.05)
    assert float(found[1, 2]) == pytest.approx(0.9, abs=0.05)
    assert float(found[:3, 3:].abs().max()) < 0.25
    assert float(weights.std()) == pytest.approx(deviation, rel=0.02)
    alone = before.clone()
    blend(alone, 6, 1, 0.9, 0)
    assert torch.equal(alone, before)


class Projection(QKVParallelLinear):  # type: ignore[misc]
    """As SGLang's, without a process group."""

    def __init__(self, *, bias: bool) -> None:
        nn.Module.__init__(self)
        self.num_heads, self.num_kv_heads, self.head_size = 4, 2, 8
        self.weight = nn.Parameter(torch.randn(8 * 8, 16), requires_grad=False)
        self.register_parameter("bias", nn.Parameter(torch.randn(8 * 8), requires_grad=False) if bias else None)


def test_only_queries_become_alike() -> None:
    model = nn.ModuleList([Projection(bias=True), nn.Linear(3, 3), Projection(bias=False)])
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    make_heads_alike(model, 1.0)
    after = dict(model.named_parameters())
    assert torch.equal(after["1.weight"], before["1.weight"])
    for name in ("0.weight", "0.bias", "2.weight"):
        assert torch.equal(after[name][32:], before[name][32:])
        groups = after[name][:32].view(2, 2, 8, -1)
        assert torch.equal(groups[:, 0], groups[:, 1])
        assert not torch.equal(groups[0], groups[1])


def test_sglang_would_find_the_plugin() -> None:
    [plugin] = distributions(path=[str(FOLDER / "plugin")])
    [entry] = plugin.entry_points
    assert entry.group == "sglang.srt.plugins"
    assert pkgutil.resolve_name(entry.value) is register


def test_no_server_without_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(SystemExit, match=ENVIRONMENT):
        register()
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "missing.json"))
    with pytest.raises(SystemExit, match=r"missing\.json"):
        register()
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(changed("clustered", value=-1)))
    monkeypatch.setenv(ENVIRONMENT, str(path))
    with pytest.raises(SystemExit, match=r"trace\.json: clustered"):
        register()


def test_shares_that_the_trace_knows() -> None:
    trace = LengthTrace.model_validate(CONTENT)
    check_share(Tactic(policy="tactic", p=0.5), trace)
    check_share(Quest(policy="quest"), trace)
    with pytest.raises(ValueError, match=r"0\.6"):
        check_share(Tactic(policy="tactic", p=0.6), trace)
