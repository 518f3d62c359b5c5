"""The network against transformers' Llama, and decoding against reading the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from smollm2_training.evaluate import loss_by_position, sink_shares
from smollm2_training.generate import Decoder
from smollm2_training.network import Network, Shape, Weights, load

CPU = torch.device("cpu")


@pytest.mark.parametrize("rope_base", [1e4, 1e6])
def test_logits_are_those_of_transformers(base: Path, rope_base: float) -> None:
    shape, weights = load(base, CPU, torch.float32)
    config = AutoConfig.from_pretrained(base)
    config.rope_parameters = {"rope_theta": rope_base, "rope_type": "default"}
    model = AutoModelForCausalLM.from_pretrained(base, config=config, dtype=torch.float32)
    tokens = torch.randint(shape.vocabulary, (2, 300), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(tokens).logits.flatten(0, 1)
        found = Network(shape).rows(weights, tokens, rope_base) @ weights.embedding.T
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_answers_are_those_of_reading_everything_again(shape: Shape, weights: Weights) -> None:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, shape.vocabulary, (n,), generator=generator).tolist() for n in (5, 17, 40)]
    network = Network(shape)
    answers = Decoder(network, weights, 1e5).answers(prompts, 12, end=-1)
    for prompt, answer in zip(prompts, answers, strict=True):
        read = list(prompt)
        for _ in range(12):
            hidden = network.rows(weights, torch.tensor([read]), 1e5)[-1]
            read.append(int((weights.embedding @ hidden).argmax()))
        assert answer == read[len(prompt) :]


def test_an_answer_ends_before_its_end_token(shape: Shape, weights: Weights) -> None:
    decoder = Decoder(Network(shape), weights, 1e5)
    (whole,) = decoder.answers([[5, 6, 7]], 20, end=-1)
    end = whole[9]
    (cut,) = decoder.answers([[5, 6, 7]], 20, end=end)
    assert cut == whole[: whole.index(end)]


def test_loss_by_position_covers_each_target_once(shape: Shape, weights: Weights) -> None:
    rows = torch.randint(shape.vocabulary, (2, 64), generator=torch.Generator().manual_seed(3))
    network = Network(shape)
    found = loss_by_position(network, weights, 1e5, rows, ((0, 16), (16, 64)))
    logits = (network.rows(weights, rows, 1e5) @ weights.embedding.T).view(2, 64, -1)
    losses = -logits[:, :-1].log_softmax(-1).gather(2, rows[:, 1:, None])[..., 0]
    assert found[0]["loss"] == pytest.approx(losses[:, :16].mean().item(), abs=1e-3)
    assert found[1]["loss"] == pytest.approx(losses[:, 16:].mean().item(), abs=1e-3)


def test_sink_shares_are_attention_of_the_first_token(shape: Shape, weights: Weights) -> None:
    row = torch.randint(shape.vocabulary, (40,), generator=torch.Generator().manual_seed(4))
    network = Network(shape)
    shares = sink_shares(network, weights, 1e5, row)
    assert [share["layer"] for share in shares] == list(range(shape.layers))
    seen = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(shape.group, dim=1)) * shape.head_dim**-0.5
        scores += torch.full((40, 40), float("-inf")).triu(1)
        seen.append(scores.softmax(-1)[:, 20:, 0].mean(-1))
        return network.causal(1)(layer, q, k, v)

    with torch.inference_mode():
        network.hidden(weights, row, torch.arange(40), 1e5, attend)
    for share, expected in zip(shares, seen, strict=True):
        assert share["mean"] == pytest.approx(expected.mean().item(), abs=1e-3)
        assert share["most"] == pytest.approx(expected.max().item(), abs=1e-3)


def test_a_base_that_is_no_plain_llama_is_refused(base: Path) -> None:
    config = base / "config.json"
    config.write_text(config.read_text().replace('"rope_type": "default"', '"rope_type": "yarn"'))
    with pytest.raises(ValueError, match="plain rotary embedding, not 'yarn'"):
        load(base, CPU)
