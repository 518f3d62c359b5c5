"""The codes that are compared: those that ship are what servers compute, and more bits tell more."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.fidelity.captured_attention import NEWEST, CapturedAttention, Moments, Prompt
from benchmarks.fidelity.code_choice import BUDGETS, app, as_scored, measure, table_of
from benchmarks.fidelity.key_estimates import (
    CODES,
    PER_CHANNEL,
    ROTATED,
    SHIPPED,
    Code,
    balancing,
    per_channel,
    rotated,
)
from winnow_kernels.cache import LayerCache
from winnow_kernels.indexes.key_codes import KeyCodes, RoundedQueries
from winnow_kernels.indexes.pages import PageGenerations

HEADS, GROUP, HEAD_DIM, TOKENS = 2, 2, 16, 1200
SCALE: Final = HEAD_DIM**-0.5


@pytest.fixture
def prompt() -> Prompt:
    generator = torch.Generator().manual_seed(5)
    # Neighbours are alike, and some channels are larger than others.
    channels = torch.linspace(0.3, 2.0, HEAD_DIM)
    drift = torch.randn(1, TOKENS, HEADS, HEAD_DIM, generator=generator).cumsum(1) / 10
    keys = (drift + torch.randn(1, TOKENS, HEADS, HEAD_DIM, generator=generator)) * channels
    lengths = list(range(TOKENS - NEWEST + 1, TOKENS + 1))
    queries = torch.randn(1, len(lengths), HEADS * GROUP, HEAD_DIM, generator=generator) * 3
    return Prompt(keys, torch.zeros_like(keys), queries, lengths)


@pytest.fixture
def moments() -> Moments:
    generator = torch.Generator().manual_seed(6)
    spread = torch.randn(2, 1, HEADS, HEAD_DIM, HEAD_DIM, generator=generator)
    return Moments(*(spread @ spread.mT))


@pytest.mark.parametrize("code", SHIPPED, ids=lambda code: f"{code.bits} bits")
def test_what_ships_is_estimated_as_the_index_scores_it(prompt: Prompt, moments: Moments, code: Code) -> None:
    keys, queries = prompt.keys[0], prompt.queries[0, 0].unflatten(0, (HEADS, GROUP))
    cache = LayerCache(keys.contiguous(), torch.zeros_like(keys))
    index = KeyCodes([cache], PageGenerations(TOKENS, 16, torch.device("cpu")), in_triton=False, bits=code.bits)
    pages = torch.arange(TOKENS // 16)
    index.build(0, cache, pages)
    scores = index.scores(0, RoundedQueries.of(queries, SCALE), index.blocks_of(pages))
    estimates = code.estimate(0, moments)(keys).transpose(0, 1)
    torch.testing.assert_close(as_scored(queries, SCALE) @ estimates.mT, scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("estimate", [per_channel, rotated])
@pytest.mark.parametrize("block", [16, 128])
def test_a_bit_more_is_nearer(prompt: Prompt, estimate: object, block: int) -> None:
    assert callable(estimate)
    keys = prompt.keys[0]
    errors = [float((estimate(keys, bits, block) - keys).square().mean()) for bits in (1, 2, 3, 4)]
    if estimate is rotated:
        # An unbiased factor is not the nearest one; with one bit it is far too long.
        assert errors[0] < float(keys.square().mean())
    assert all(more < 0.5 * fewer for fewer, more in pairwise(errors))


def test_a_short_block_is_one_of_its_own() -> None:
    keys = torch.randn(40, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(7))
    for estimate in (per_channel, rotated):
        whole, rest = estimate(keys[:32], 2, 32), estimate(keys[32:], 2, 32)
        torch.testing.assert_close(estimate(keys, 2, 32), torch.cat((whole, rest)))


def test_balanced_coordinates_make_the_product_of_traces_least(moments: Moments) -> None:
    residuals, queries = moments.residuals[0], moments.queries[0]

    def product(there: Tensor) -> Tensor:
        back = torch.linalg.inv(there)
        return _trace(there @ residuals @ there.mT) * _trace(back.mT @ queries @ back)

    balanced = product(balancing(residuals, queries))
    generator = torch.Generator().manual_seed(8)
    assert (balanced < product(torch.eye(HEAD_DIM).expand_as(residuals))).all()
    for _ in range(20):
        near = torch.eye(HEAD_DIM) + 0.1 * torch.randn(HEAD_DIM, HEAD_DIM, generator=generator)
        assert (balanced <= product(balancing(residuals, queries) @ near) * (1 + 1e-4)).all()


def test_more_bits_hold_more_and_report_better(prompt: Prompt, moments: Moments) -> None:
    codes = [Code(ROTATED, bits, 16) for bits in (1, 2, 3)]
    exact, *coded = [figures.row() for _, figures in measure([prompt], SCALE, moments, codes, lambda: None)]
    for fewer, more in pairwise(coded):
        assert more["error"] < fewer["error"]
        assert more["budgets"]["256"] > fewer["budgets"]["256"]
    assert exact["reached"] > coded[-1]["reached"]
    assert exact["error"] < coded[-1]["error"]
    assert all(exact["budgets"][str(budget)] >= coded[-1]["budgets"][str(budget)] - 1e-3 for budget in BUDGETS)


def test_bits_count_what_a_block_shares() -> None:
    assert Code(PER_CHANNEL, 2, 64).bits_of_channel(64) == 2.5
    assert Code(ROTATED, 2, 16).bits_of_channel(64) == 2 + 16 / 64 + 4 / 16


def test_a_file_becomes_a_table(tmp_path: Path, prompt: Prompt, moments: Moments) -> None:
    about = {"model": "tiny", "text": "prose", "context": 1168, "prompts": 1, "queries_each": 32, "dtype": "float32"}
    about |= {"device": "a CPU", "commit": None}
    CapturedAttention(about, SCALE, [prompt], moments).write(tmp_path / "captured.pt")
    command = ["measure", str(tmp_path / "captured.pt"), "--output", str(tmp_path / "one.json")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    merged = tmp_path / "all.json"
    assert not CliRunner().invoke(app, ["merge", str(tmp_path / "one.json"), "--output", str(merged)]).exit_code
    [run] = json.loads(merged.read_text())["runs"]
    assert [row["code"] for row in run["rows"][1:]] == [code.name for code in CODES]
    lines = table_of("tiny")(merged).splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == len(CODES) + 3
    assert lines[-1].startswith("tiny, 1 prompt of 1,168 tokens (prose), 32 queries each")


def _trace(matrices: Tensor) -> Tensor:
    return matrices.diagonal(dim1=-2, dim2=-1).sum(-1)
