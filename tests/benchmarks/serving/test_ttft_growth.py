"""How the time to first token grows: fits, series, table and plot."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.records import Record, Row, merged
from benchmarks.serving.tables import growth_table, ttft_table
from benchmarks.serving.ttft_growth import fitted_power, growths_of
from benchmarks.serving.ttft_plot import draw
from tests.plots import assert_readable

LENGTHS = (8192, 16384, 32768, 65536, 131072, 262144)
HEADER = {"device": "H200", "commit": {"id": "0123456789", "modified": False}}


def row(context: int, seconds: float, policy: str = "quoka prefill", backend: str = "winnow", **more: object) -> Row:
    return Row(
        bench="serve",
        model="Qwen3-4B",
        policy=policy,
        parameters={"figure": "ttft", "backend": backend, "batches": 3} | more,
        context=context,
        batch=1,
        dense=2e3 * seconds,
        measured=1e3 * seconds,
        unit="ms",
        speedup=2.0,
        floor_ratio=None,
        spread=0.012,
    )


def series(exponent: float, policy: str = "quoka prefill", backend: str = "winnow") -> list[Row]:
    return [row(length, 1e-6 * length**exponent, policy, backend) for length in LENGTHS]


@given(
    exponent=st.floats(-3, 3),
    scale=st.floats(1e-6, 1e3),
    lengths=st.lists(st.integers(1, 2**20), min_size=2, max_size=8, unique=True),
)
def test_a_power_law_is_found_again(exponent: float, scale: float, lengths: list[int]) -> None:
    found = fitted_power({length: scale * length**exponent for length in lengths})
    # Neighbouring lengths far from 1 tell little: their logarithms differ by a millionth.
    assert found.exponent == pytest.approx(exponent, abs=1e-6)
    for length in lengths:
        assert found(length) == pytest.approx(scale * length**exponent, rel=1e-6)
    assert (found.first, found.last) == (min(lengths), max(lengths))


def test_one_point_is_no_line() -> None:
    with pytest.raises(ValueError, match="at least two"):
        fitted_power({8192: 1.0})


def test_the_longest_half_counts() -> None:
    linear_then_square = [row(length, max(length, length**2 / 32768)) for length in reversed(LENGTHS)]
    [growth] = growths_of(Record(HEADER, linear_then_square))
    assert list(growth.seconds) == list(LENGTHS)
    assert growth.fit.exponent == pytest.approx(2)
    assert (growth.fit.first, growth.fit.last) == (65536, 262144)
    # Of an odd number the middle one, too.
    [growth] = growths_of(Record(HEADER, linear_then_square[:5]))
    assert growth.fit.first == 65536


def test_only_single_requests_first_tokens_make_series() -> None:
    other = [row(length, 1.0, figure="tpot") for length in LENGTHS]
    few = [row(length, 1.0, "no-op", "noop") for length in LENGTHS[:3]]
    found = growths_of(Record(HEADER, [*series(1.5), *series(2, "dense", "fa3"), *other, *few]))
    assert [growth.name for growth in found] == ["quoka prefill", "dense, fa3"]
    with pytest.raises(ValueError, match="measured twice at 8192 tokens"):
        growths_of(Record(HEADER, [*series(1.5), *series(1.5)]))


def test_runs_are_kept_apart() -> None:
    half = len(LENGTHS) // 2
    runs = merged([Record(HEADER, series(1)[:half]), Record(HEADER, series(1)[half:])])
    assert growths_of(runs) == []
    twice = merged([Record(HEADER, series(1)), Record(HEADER, series(2))])
    assert [growth.run for growth in growths_of(twice)] == [0, 1]
    with pytest.raises(ValueError, match="2 runs of Qwen3-4B"):
        draw(twice, Path())


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "ttft.json"
    bound = [row(131072, 2.0, "no-op", "noop"), row(131072, 3.0, "dense", part_of_bound=0.5)]
    more = row(524288, 9.5, part_of_bound=0.625, memory_beyond_dense_bytes=2**29)
    Record(HEADER, [*series(1), more, *bound, row(131072, 1.0, figure="tpot")]).write(path)
    text = ttft_table(path)
    assert "| Qwen3-4B | 512K × 1 | quoka prefill | 9.50 | 3 | 1.2 | 2.00 | 62.5 | +0.50 |" in text
    assert "| Qwen3-4B | 128K × 1 | no-op | 2.00 | 3 | 1.2 | 2.00 |  |  |" in text
    assert "| dense, winnow | 3.00 |" in text
    assert text.count("Qwen3-4B") == len(LENGTHS) + 3
    # What is compared stands together.
    assert text.index("256K") > text.index("no-op")
    assert text.endswith("\nH200, commit 01234567.\n")
    growth = growth_table(path)
    assert "| model | policy | 8K, s | 16K, s | 32K, s | 64K, s | 128K, s | 256K, s | 512K, s | exponent |" in growth
    Record(HEADER, series(1.5)).write(path)
    assert "| 1.50 | 64K to 256K |" in growth_table(path)


def test_a_plot(tmp_path: Path) -> None:
    record = Record(HEADER, [*series(1.25), *series(2, "dense", "fa3")])
    [path] = draw(record, tmp_path)
    assert path.name == "gpu-ttft-qwen3-4b.svg"
    text = path.read_text()
    for shown in ("quoka prefill (1.25)", "dense, fa3 (2.00)", "256K", "H200", "tokens of the prompt"):
        assert shown in text
    assert_readable(path)
    [again] = draw(record, tmp_path / "again")
    assert again.read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="no run"):
        draw(Record(HEADER, series(1)[:3]), tmp_path)
