"""The training loop, resuming and the evaluation, on a CPU with a model of a few thousand weights."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from smollm2_training import card, evaluate, pack, train
from smollm2_training.adapter import Adapter
from smollm2_training.batches import Batch, Source, batches, make_batch
from smollm2_training.generate import Decoder
from smollm2_training.network import Network, Shape, Weights
from smollm2_training.packed import PackedText
from smollm2_training.schedule import Schedule, Stage
from smollm2_training.trainer import Objective, Progress, Trainer
from winnow_evaluation import model_card
from winnow_evaluation.text.documents import Document, write_collection


@pytest.fixture
def source(packed: PackedText, base: Path, tmp_path: Path) -> Source:
    packed.unpack(tmp_path / "text")
    return Source(base / "tokenizer.json", tmp_path / "text", 2048, seed=0)


def _trainer(weights: Weights, shape: Shape, objective: Objective | None = None) -> Trainer:
    adapter = Adapter(weights, rank=4, alpha=8, rope_base=1e5)
    return Trainer(adapter, Network(shape), objective or Objective(teacher_tokens=256, teacher_context=256))


def _same(one: Trainer, other: Trainer) -> bool:
    pairs = zip(one.adapter.parameters(), other.adapter.parameters(), strict=True)
    return one.progress == other.progress and all(torch.equal(a, b) for a, b in pairs)


def test_the_losses_are_those_of_the_tokens_they_name(weights: Weights, shape: Shape, source: Source) -> None:
    trainer = _trainer(weights, shape)
    batch = make_batch(source, 0, 1024)
    found = trainer.losses(batch).losses
    tokens = torch.from_numpy(batch.tokens).long()
    network = Network(shape)
    with torch.inference_mode():
        logits = (network.rows(weights, tokens, 1e5) @ weights.embedding.T).view(2, 1024, -1).log_softmax(-1)
        base = (network.rows(weights, tokens[:1, :256], shape.rope_base) @ weights.embedding.T).log_softmax(-1)
    losses = -logits[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    assert found["text"].item() == pytest.approx(losses[0, 256:].mean().item(), rel=1e-4)
    assert found["kl"].item() == pytest.approx((base.exp() * (base - logits[0, :256])).sum(-1).mean().item(), rel=1e-3)
    answers = losses.new_zeros(2 * 1024)
    answers[torch.from_numpy(batch.places)] = torch.from_numpy(batch.weights)
    answers = answers.view(2, 1024)[:, 1:]
    assert found["tasks"].item() == pytest.approx(((losses * answers).sum() / answers.sum()).item(), rel=1e-4)


@pytest.mark.parametrize(
    ("text_rows", "length", "expected"),
    [
        (32, 1024, (16, 1024)),
        (16, 2048, (8, 2048)),
        (8, 4096, (8, 2048)),
        (4, 8192, (4, 4096)),
        (1, 32768, (1, 8192)),
        (0, 32768, (0, 0)),
    ],
)
def test_the_base_teaches_where_it_can(text_rows: int, length: int, expected: tuple[int, int]) -> None:
    assert Objective().taught(text_rows, length) == expected


def test_training_learns(weights: Weights, shape: Shape, source: Source) -> None:
    trainer = _trainer(weights, shape)
    batch = make_batch(source, 0, 1024)
    outcomes = [trainer.update(batch, 1e-2).losses for _ in range(12)]
    assert outcomes[-1]["tasks"] < 0.95 * outcomes[0]["tasks"]
    assert outcomes[-1]["text"] < outcomes[0]["text"]


def test_resuming_changes_nothing(weights: Weights, shape: Shape, source: Source, tmp_path: Path) -> None:
    def steps(trainer: Trainer, count: int) -> None:
        for batch in itertools.islice(batches(source, lambda _: 1024, trainer.progress.step, 1, 0), count):
            trainer.update(batch, 1e-2)

    whole, first, second = (_trainer(weights, shape) for _ in range(3))
    steps(whole, 4)
    steps(first, 2)
    train.keep(first, tmp_path / "state", tmp_path / "output")
    train.resume(second, tmp_path / "state", None)
    steps(second, 2)
    assert _same(whole, second)


def test_without_its_state_a_leg_goes_on_from_the_adapter(weights: Weights, shape: Shape, tmp_path: Path) -> None:
    first, second = (_trainer(weights, shape) for _ in range(2))
    with torch.no_grad():
        for parameter in first.adapter.parameters():
            parameter.copy_(torch.randn(parameter.shape).to(torch.bfloat16))
    first.progress = Progress(step=70, warm_steps=70, tokens=5, seconds=300.0)
    train.keep(first, tmp_path / "lost", tmp_path / "output")
    train.resume(second, tmp_path / "state", tmp_path / "output" / "adapter")
    assert second.progress == Progress(step=70, warm_steps=0, tokens=5, seconds=300.0)
    second.progress.warm_steps = 70
    assert _same(first, second)


def test_a_leg_ends_in_time_on_sigterm_and_when_all_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        leg = train.Leg(seconds=50, before=200, total=220, started=100.0)
        now[0] = 110.0
        assert (leg.elapsed, leg.over) == (210.0, False)
        now[0] = 121.0
        assert leg.over
        leg = train.Leg(seconds=50, before=0, total=220, started=100.0)
        now[0] = 149.0
        assert not leg.over
        now[0] = 150.0
        assert leg.over
        now[0] = 101.0
        assert not leg.over
        os.kill(os.getpid(), signal.SIGTERM)
        assert leg.over
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_the_schedule_warms_up_falls_and_lengthens() -> None:
    schedule = Schedule(1000, rate=1.0, warm_up=4, decay_share=0.5)
    rates = [
        schedule.rate_at(seconds, step) for seconds, step in ((0, 0), (1, 1), (400, 9), (750, 9), (1000, 9), (2000, 9))
    ]
    assert rates == pytest.approx([0.25, 0.5, 1.0, 0.5, 0.02, 0.02])
    drawn = {share: {schedule.length(step, 1000 * share) for step in range(200)} for share in (0.0, 0.4, 1.0, 2.0)}
    assert drawn[0.0] == {1024, 2048}
    assert drawn[0.4] == {2048, 4096, 8192}
    assert drawn[1.0] == drawn[2.0] == {2048, 4096, 8192, 16384, 32768}
    assert schedule.length(3, 990) == Schedule(1000).length(3, 990)


def test_a_whole_training_in_two_legs(
    base: Path, packed: PackedText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed.save(tmp_path / "train.xz")
    stages = (Stage(0.5, {512: 1.0}), Stage(1.0, {512: 1.0, 1024: 1.0}))
    monkeypatch.setattr(train, "Schedule", lambda total, rate: Schedule(total, rate, stages=stages))
    handler = signal.getsignal(signal.SIGTERM)
    arguments = f"train --base {base} --text {tmp_path}/train.xz --state {tmp_path}/state --output {tmp_path}/output"
    arguments += " --leg-seconds 6 --total-seconds 9 --tokens 1024 --rank 4 --alpha 8 --workers 1 --every 2"
    monkeypatch.setattr("sys.argv", arguments.split())
    try:
        train.main()
        assert "leg over" in capsys.readouterr().out
        train.main()
    finally:
        signal.signal(signal.SIGTERM, handler)
    told = capsys.readouterr().out
    assert "resumed exactly" in told
    assert "finished" in told
    lines = [json.loads(line) for line in (tmp_path / "output" / "log.jsonl").read_text().splitlines()]
    # The last line may be of a step before the end: what is saved is as of the end.
    assert json.loads((tmp_path / "output" / "adapter" / "progress.json").read_text())["seconds"] >= 9
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert any(name.startswith("kl@") for line in lines for name in line)


def test_a_dry_run_takes_steps_at_each_length(
    weights: Weights, shape: Shape, source: Source, capsys: pytest.CaptureFixture[str]
) -> None:
    train.dry(_trainer(weights, shape), source, 1)
    told = capsys.readouterr().out
    assert "length 1024:" in told
    assert "length 2048:" in told
    assert "length 4096:" not in told


def test_packing_takes_each_split_for_its_purpose(
    base: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    documents = [
        Document(f"{kind}/{number}", "package", kind, f"{kind} number {number} says so. " * 60)
        for kind in ("prose", "code")
        for number in range(60)
    ]
    (tmp_path / "collected").mkdir()
    write_collection(tmp_path / "collected", documents, {})
    arguments = f"pack --base {base} --collected {tmp_path}/collected --output {tmp_path}/packed"
    monkeypatch.setattr("sys.argv", arguments.split())
    pack.main()
    assert "train:" in capsys.readouterr().out
    expected = {
        "train": {d.text for d in documents if d.split == "train"},
        "test": {d.text for d in documents if d.split == "test" and d.kind == "prose"},
    }
    for name, texts in expected.items():
        read = PackedText.load(tmp_path / "packed" / f"{name}.xz")
        found = {tokenizer.decode(read.document(i).tolist(), skip_special_tokens=False) for i in range(len(read.code))}
        assert found == texts
    assert not expected["train"] & expected["test"]


def test_the_evaluation_fits_its_prompts_and_reports(
    base: Path, weights: Weights, shape: Shape, source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = evaluate.make_question(base, source.text, "niah_single_2", 2048, 0)
    assert 0.9 * (2048 - 128) < len(question.tokens) <= 2048 - 128
    assert question == evaluate.make_question(base, source.text, "niah_single_2", 2048, 0)
    decoder = Decoder(Network(shape), weights, 1e5)
    rows = list(evaluate.ruler(decoder, base, source.text, ["niah_single_1", "vt"], [2048], 2, 1))
    assert [(row["task"], row["length"], row["samples"]) for row in rows] == [
        ("niah_single_1", 2048, 2),
        ("vt", 2048, 2),
    ]
    assert all(0 <= row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"] <= 100 for row in rows)


def test_a_base_does_not_diverge_from_itself(weights: Weights, shape: Shape, packed: PackedText) -> None:
    rows = evaluate.prose_rows(packed, 256, 2)
    told = evaluate.divergence_from_base(Network(shape), weights, weights, shape.rope_base, rows)
    assert told == {"tokens": 512, "kl": 0.0, "top1_equal": 1.0}
    assert evaluate.divergence_from_base(Network(shape), weights, weights, 10.0, rows)["kl"] > 0


def test_answers_are_scored_by_what_they_contain() -> None:
    assert evaluate.found("They are ABC and def.", ("abc", "DEF", "ghi", "jkl")) == 0.5
    low, high = evaluate.wilson(0.9, 50)
    assert (low, high) == pytest.approx((0.786, 0.957), abs=1e-3)


def test_the_card_shows_the_reports(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    report = {
        "header": {"date": "2030-01-02T00:00:00", "device": "GPU", "torch": "2", "rank": 48, "rope_base": 1e6},
        "ruler": [
            {"task": "vt", "length": 8192, "samples": 50, "accuracy": 61.2, "accuracy_low": 47.1, "accuracy_high": 74}
        ],
        "loss": [{"from": 0, "to": 2048, "rows": 2, "loss": 3.2101}],
        "divergence": {"tokens": 1000, "kl": 0.0312, "top1_equal": 0.912},
        "sinks": [{"layer": layer, "mean": 0.5, "least": 0.25, "most": 0.8} for layer in range(14)],
    }
    (tmp_path / "results" / "gpu.json").write_text(json.dumps(report))
    (tmp_path / "results" / "training-log.jsonl").write_text('{"seconds": 1015.0, "step": 3000, "tokens": 196608000}\n')
    text = model_card.updated(f"before {model_card.BEGIN} stale {model_card.END} after", card.tables(tmp_path))
    assert text.startswith("before")
    assert text.endswith("after")
    assert "| `vt` | 61.2 [47, 74] |" in text
    assert "| 0 to 2,048 | 3.210 |" in text
    assert "0.0312 nats" in text
    assert "25 to 80 %" in text
    assert "1,015 seconds: 3,000 steps, 197 million tokens" in text
    assert "stale" not in text
    with pytest.raises(ValueError, match="the card must hold"):
        model_card.updated("no marks", "")


def test_batches_of_several_processes_are_different_steps(source: Source) -> None:
    def first(rank: int) -> list[Batch]:
        return list(itertools.islice(batches(source, lambda _: 1024, rank, 2, 0), 2))

    expected = [make_batch(source, step, 1024).tokens for step in range(4)]
    found = [first(0)[0], first(1)[0], first(0)[1], first(1)[1]]
    assert all(np.array_equal(batch.tokens, tokens) for batch, tokens in zip(found, expected, strict=True))
