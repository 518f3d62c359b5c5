"""The chunked losses against plain ones over all logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from smollm2_training import losses


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK", 8)


def test_cross_entropy_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(21, 16, generator=generator, requires_grad=True)
    embedding, weights = torch.randn(50, 16, generator=generator), torch.rand(21, generator=generator)
    targets = torch.randint(50, (21,), generator=generator)
    logits = hidden @ embedding.T
    (3 * (F.cross_entropy(logits, targets, reduction="none") * weights).sum()).backward()
    expected, hidden.grad = hidden.grad, None
    total, right = losses.cross_entropy(hidden, embedding, targets, weights)
    (3 * total).backward()
    torch.testing.assert_close(hidden.grad, expected)
    assert torch.equal(right, logits.argmax(-1) == targets)


def test_divergence_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(21, 16, generator=generator, requires_grad=True)
    teacher, weights = torch.randn(21, 16, generator=generator), torch.rand(21, generator=generator)
    embedding = torch.randn(50, 16, generator=generator)
    student_log, teacher_log = ((h @ embedding.T).log_softmax(-1) for h in (hidden, teacher))
    plain = (F.kl_div(student_log, teacher_log, reduction="none", log_target=True).sum(-1) * weights).sum()
    plain.backward()
    expected, hidden.grad = hidden.grad, None
    total, same = losses.divergence(hidden, embedding, teacher, weights)
    total.backward()
    assert total.item() == pytest.approx(plain.item(), rel=1e-5)
    torch.testing.assert_close(hidden.grad, expected)
    assert torch.equal(same, student_log.argmax(-1) == teacher_log.argmax(-1))


def test_a_model_does_not_diverge_from_itself() -> None:
    hidden, embedding = torch.randn(5, 16), torch.randn(50, 16)
    total, same = losses.divergence(hidden, embedding, hidden, torch.ones(5))
    assert total.item() == pytest.approx(0, abs=1e-5)
    assert same.all()
