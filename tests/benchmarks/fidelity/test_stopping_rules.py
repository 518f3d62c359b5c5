"""What stopping early skips: selections and stops are the product's, and a share that is held is what it says."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
import torch

from benchmarks.fidelity.captured_attention import NEWEST, CapturedAttention, Moments, Prompt
from benchmarks.fidelity.code_choice import Step
from benchmarks.fidelity.key_estimates import rotated
from benchmarks.fidelity.stopping_rules import (
    HELD,
    POLICIES,
    SETTLED,
    SHARES,
    SMALLER,
    WHOLE,
    Decode,
    main,
    measure,
    outcomes,
)
from benchmarks.fidelity.stopping_tables import equal_loss_table, held_shares_table, skipped_at
from benchmarks.fidelity.tile_stops import AS_READ, BITS, BY_MASS, NEWEST_FIRST, ORDERS, Known, Tiles
from winnow_evaluation.calibration.early_termination import THRESHOLDS
from winnow_evaluation.fidelity.prefilled import PAGE_SIZE
from winnow_kernels.attend.early_termination import TILE, Termination
from winnow_kernels.attend.gather import Meter
from winnow_kernels.attend.reference import attend
from winnow_kernels.cache import Context, LayerCache
from winnow_kernels.contract.early_termination import EarlyTermination
from winnow_kernels.indexes.key_codes import BLOCK, KeyCodes
from winnow_kernels.indexes.pages import PageGenerations
from winnow_kernels.policies.lowbit_top_k.parameters import LowBitTopK
from winnow_kernels.policies.lowbit_top_k.reference import LowBitTopKStep
from winnow_kernels.policies.lowbit_top_p.parameters import LowBitTopP
from winnow_kernels.policies.lowbit_top_p.reference import LowBitTopPStep

HEADS, GROUP, HEAD_DIM, TOKENS = 2, 2, 16, 3000
SCALE: Final = HEAD_DIM**-0.5
DECODES: Final = (*POLICIES, LowBitTopP(p=0.5), LowBitTopP(p=0.95, min_tokens=128, max_tokens=512), LowBitTopP(p=0.999))
STOPPED: Final = EarlyTermination(scale=0.3, direction=0.1, patience=2)


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    generator = torch.Generator().manual_seed(5)
    keys, values = torch.randn(2, 1, TOKENS, HEADS, HEAD_DIM, generator=generator)
    drift = torch.randn(1, TOKENS, HEADS, HEAD_DIM, generator=generator).cumsum(1) / 20
    lengths = [TOKENS - 8, TOKENS]
    queries = torch.randn(1, len(lengths), HEADS * GROUP, HEAD_DIM, generator=generator) * 3
    return Prompt(keys + drift, values + drift, queries, lengths)


@pytest.fixture(scope="module")
def known(prompt: Prompt) -> Known:
    estimates = rotated(prompt.keys[0, : TOKENS - NEWEST], BITS, BLOCK).transpose(0, 1)
    return Known.of(Step.of(prompt, 0, 1, SCALE), estimates, prompt.values[0].transpose(0, 1))


@pytest.mark.parametrize("decode", DECODES, ids=lambda decode: decode.model_dump_json())
def test_what_is_selected_and_where_arts_rule_stops_are_the_products(
    prompt: Prompt, known: Known, decode: Decode
) -> None:
    queries = prompt.queries[0, -1:]
    cache = LayerCache(prompt.keys[0].contiguous(), prompt.values[0].contiguous())
    codes = KeyCodes([cache], PageGenerations(TOKENS, PAGE_SIZE, torch.device("cpu")), in_triton=False, bits=BITS)
    slots = torch.arange(TOKENS)[None]
    context = Context.of(slots, torch.tensor([TOKENS]), TOKENS)
    termination = Termination.of([STOPPED], torch.device("cpu"))
    step = (
        LowBitTopKStep(context, SCALE, termination, [decode], codes)
        if isinstance(decode, LowBitTopK)
        else LowBitTopPStep(context, SCALE, termination, [decode], codes)
    )
    selection = step.select(0, queries, cache, Meter(1, torch.device("cpu")))

    tiles = Tiles.of(known, known.selected(decode), AS_READ)
    assert tiles.counts.tolist() == selection.counts[0].tolist()
    for head, count in enumerate(tiles.counts.tolist()):
        assert tiles.positions[head, :count].tolist() == selection.slots[0, head, :count].tolist()
    attended = attend(queries, cache, selection, SCALE, Meter(1, torch.device("cpu")), termination)
    is_read = tiles.until_settled(STOPPED)
    assert tiles.tokens(is_read).tolist() == attended.read[0].tolist()
    output, _ = tiles.attended(is_read)
    torch.testing.assert_close(output.flatten(0, 1).float(), attended.output[0], rtol=1e-4, atol=1e-4)


def test_arts_rule_stops_some_of_what_is_compared(known: Known) -> None:
    tiles = Tiles.of(known, known.selected(POLICIES[1]), AS_READ)
    assert (tiles.tokens(tiles.until_settled(STOPPED)) < tiles.counts).any()


@pytest.mark.parametrize("decode", POLICIES, ids=lambda decode: decode.policy)
@pytest.mark.parametrize("order", ORDERS)
def test_a_share_that_is_held_ends_reading(known: Known, decode: Decode, order: str) -> None:
    tiles = Tiles.of(known, known.selected(decode), order)
    assert not tiles.is_whole.any()
    assert tiles.tokens(tiles.until_held(0.0)).tolist() == [TILE] * HEADS
    assert tiles.tokens(tiles.until_held(1.01)).tolist() == tiles.counts.tolist()
    read = [tiles.until_held(share) for share in SHARES]
    for less, more in pairwise(read):
        assert (more | ~less).all()
    assert read[0].sum() < read[-1].sum()


def test_a_share_is_held_once_every_query_head_of_a_group_holds_it(known: Known) -> None:
    tiles = Tiles.of(known, known.selected(POLICIES[0]), AS_READ)
    unselected = tiles.rest + tiles.predicted.sum(1)
    for share in SHARES:
        for head, is_read in enumerate(tiles.until_held(share)):
            last = int(is_read.sum())
            for tile in range(1, last + 1):
                exact = tiles.masses[head, :tile].sum(0)
                rest = unselected[head] - tiles.predicted[head, :tile].sum(0)
                is_held = bool((exact / (exact + rest) >= share).all())
                assert is_held == (tile == last) or tile * TILE >= int(tiles.counts[head])


def test_what_is_whole_is_read_newest_first_to_its_end(known: Known) -> None:
    whole = torch.ones(HEADS, TOKENS, dtype=torch.bool)
    for order in ORDERS:
        tiles = Tiles.of(known, whole, order)
        assert tiles.positions[0, :3].tolist() == [TOKENS - 1, TOKENS - 2, TOKENS - 3]
        for is_read in (tiles.until_held(0.0), tiles.until_settled(STOPPED)):
            assert tiles.tokens(is_read).tolist() == [TOKENS] * HEADS


def test_alone_with_exact_scores_the_order_of_masses_reads_least(prompt: Prompt) -> None:
    # With groups it may not: the order is of a group's mean, and all of its heads must hold the share.
    alone = Prompt(prompt.keys, prompt.values, prompt.queries[:, :, ::GROUP], prompt.lengths)
    step = Step.of(alone, 0, 1, SCALE)
    exact = Known.of(step, prompt.keys[0].transpose(0, 1), prompt.values[0].transpose(0, 1))
    exact = Known(step, exact.predicted, exact.masses, exact.masses, exact.values)
    selected = exact.selected(POLICIES[0])
    by_mass, as_read, newest_first = (Tiles.of(exact, selected, order) for order in (BY_MASS, AS_READ, NEWEST_FIRST))
    for share in SHARES:
        fewest = by_mass.until_held(share).sum(-1)
        for other in (as_read, newest_first):
            assert (fewest <= other.until_held(share).sum(-1)).all()


@pytest.mark.parametrize("decode", POLICIES, ids=lambda decode: decode.policy)
def test_a_rule_that_reads_everything_loses_nothing(known: Known, decode: Decode) -> None:
    whole, *others = outcomes(known, decode)
    rules = {own.rule for own in others}
    assert whole.rule == WHOLE
    assert {SETTLED, HELD, SMALLER} <= rules
    for own in others:
        assert (own.read <= whole.read).all()
        of_whole = own.read == whole.read
        if own.rule in (SETTLED, HELD):
            torch.testing.assert_close(own.output[of_whole], whole.output[of_whole])
            torch.testing.assert_close(own.share[of_whole], whole.share[of_whole])


def test_errors_are_relative_to_the_whole_selection_and_to_dense_attention(prompt: Prompt) -> None:
    layers: list[None] = []
    found = measure([prompt], SCALE, lambda: layers.append(None))
    assert len(layers) == 1
    for own in found:
        row = own[WHOLE, "", "{}"].row()
        assert row["skipped"] == row["error"] == row["share_lost"] == row["stopped"] == 0
        assert 0 < row["dense_error"] < 1
        assert 0 < row["true_share"] < 1
        smaller = [figures.row() for (rule, *_), figures in own.items() if rule == SMALLER]
        for less, more in pairwise(sorted(smaller, key=lambda row: row["skipped"])):
            assert less["share_lost"] <= more["share_lost"]
        assert all(row["error"] > 0 for row in smaller if row["skipped"] > 0.05)


def test_equal_losses_are_compared_on_a_line() -> None:
    rows = [{"error": 0.1, "skipped": 0.2}, {"error": 0.3, "skipped": 0.6}, {"error": 0.5, "skipped": 0.5}]
    assert skipped_at(rows, "error", 0.05) == pytest.approx(0.1)
    assert skipped_at(rows, "error", 0.2) == pytest.approx(0.4)
    assert skipped_at(rows, "error", 0.4) == pytest.approx(0.6)
    assert skipped_at(rows, "error", 0.6) is None


def test_files_become_tables(tmp_path: Path, prompt: Prompt) -> None:
    about = {"model": "tiny", "text": "prose", "context": 2968, "prompts": 1, "queries_each": 2, "dtype": "float32"}
    about |= {"device": "a CPU", "commit": None}
    nothing = torch.zeros(1, HEADS, HEAD_DIM, HEAD_DIM)
    CapturedAttention(about, SCALE, [prompt], Moments(nothing, nothing)).write(tmp_path / "tiny.pt")
    record = tmp_path / "record.json"
    main([tmp_path / "tiny.pt"], record)
    [run] = json.loads(record.read_text())["runs"]
    assert [own["decode"]["policy"] for own in run["policies"]] == ["lowbit_top_p", "lowbit_top_k"]
    lines = equal_loss_table(record).splitlines()
    assert len([line for line in lines if line.startswith("| tiny ")]) == (len(THRESHOLDS) + 1) * len(POLICIES)
    assert lines[-1].startswith("tiny, 1 prompt of 2,968 tokens (prose); 2 queries each")
    assert sum(WHOLE in line for line in held_shares_table(record).splitlines()) == len(POLICIES)
