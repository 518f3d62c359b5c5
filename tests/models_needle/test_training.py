"""The training loop on a CPU with a network of a few thousand weights."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
import torch

from needle_training.network import Shape
from needle_training.tokenizer import SPECIAL_TOKENS, VOCABULARY_SIZE
from needle_training.train import Log, Plan, Progress, SyntheticStage, TextStage, Trainer, train_synthetic, train_text

TINY = Shape(vocabulary=22, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=64, rope_base=1e3)
STAGE = SyntheticStage(16)
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("eager")


def _trainer(plan: Plan | None = None, shape: Shape = TINY) -> Trainer:
    return Trainer(plan or Plan(warm_up=4, learning_rate=2e-2, embedding_rate=1e-2), shape, CPU)


def _steps(trainer: Trainer, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        batch = trainer.synthetic_batch(STAGE, True, 64 * STAGE.length)
        losses.append(trainer.update(batch)[0].item())
    return losses


def test_training_learns_to_copy() -> None:
    trainer = _trainer()
    losses = _steps(trainer, 60)
    # Guessing among the tokens that occur costs this much; less takes looking at those before.
    guessing = math.log(TINY.vocabulary - len(SPECIAL_TOKENS))
    assert losses[0] > guessing - 0.1
    assert sum(losses[-5:]) / 5 < guessing - 0.3


def test_the_loss_counts_learned_tokens_alone() -> None:
    trainer = _trainer()
    batch = trainer.synthetic_batch(STAGE, True, 64 * STAGE.length)
    with torch.inference_mode():
        logits = trainer.network.logits(trainer.network(batch.tokens)).view(*batch.tokens.shape, -1)
    log_probabilities = logits.log_softmax(-1)[:, :-1].gather(2, batch.tokens[:, 1:, None])[..., 0]
    learned = batch.weights[:, 1:] > 0
    loss, right = trainer.update(batch)
    assert loss.item() == pytest.approx(-log_probabilities[learned].mean().item(), abs=1e-3)
    assert not right[batch.weights == 0].any()
    assert torch.equal(right[:, 1:], (logits[:, :-1].argmax(-1) == batch.tokens[:, 1:]) & learned)


def test_the_rate_warms_up_and_falls_at_the_end() -> None:
    trainer = _trainer(Plan(warm_up=4, text=(TextStage(10, {16: 1.0}),), decay_share=0.5, learning_rate=1.0))
    rates = []
    for text_step in (0, 0, 0, 0, 0, 5, 6, 9):
        trainer.progress.text_step = text_step
        _steps(trainer, 1)
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.8, 0.2])


def test_resuming_changes_nothing(tmp_path: Path) -> None:
    whole = _trainer()
    _steps(whole, 4)

    first = _trainer()
    _steps(first, 2)
    first.save(tmp_path / "checkpoint.pt")
    second = _trainer()
    with torch.no_grad():
        for weight in second.network.parameters():
            weight.fill_(1.0)
    second.load(tmp_path / "checkpoint.pt")
    assert second.progress == Progress(step=2)
    _steps(second, 2)

    assert second.progress == whole.progress
    for (name, one), other in zip(whole.network.named_parameters(), second.network.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_both_parts_run_to_their_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = Shape(VOCABULARY_SIZE, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate=16)
    plan = Plan(
        synthetic=(SyntheticStage(16, most_steps=2), SyntheticStage(64, (1, 2), (0, 1), (1, 2), 2, most_steps=2)),
        text=(TextStage(3, {256: 1.0}),),
        synthetic_tokens=256,
        text_tokens=512,
        synthetic_share=0.4,
        warm_up=2,
    )
    trainer = _trainer(plan, shape)
    log = Log(tmp_path / "log.jsonl", every=2)
    train_synthetic(trainer, log, time.monotonic() + 60)
    assert (trainer.progress.stage, trainer.progress.step) == (2, 4)
    train_text(trainer, log, time.monotonic() + 60, workers=1)
    assert (trainer.progress.text_step, trainer.progress.step) == (3, 7)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert all(math.isfinite(line["loss"]) for line in lines if "loss" in line)
    assert "stage 0 (16 tokens) given up" in capsys.readouterr().out


def test_no_time_left_is_no_step(tmp_path: Path) -> None:
    trainer = _trainer()
    train_synthetic(trainer, Log(tmp_path / "log.jsonl", every=1), deadline=time.monotonic() - 1)
    assert trainer.progress == Progress()


def test_the_optimizers_share_the_weights_between_them() -> None:
    trainer = _trainer()
    groups = [{id(p) for group in each.param_groups for p in group["params"]} for each in trainer.optimizers]
    assert not groups[0] & groups[1]
    assert groups[0] | groups[1] == {id(p) for p in trainer.network.parameters()}
    assert groups[0] == {id(p) for p in trainer.network.matrices()}
