"""Gemma 3 as ``winnow models get`` makes it: what it says, alone and over a server, and how it reads texts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_winnow import crossover
from tests.policy_rows import small_policies
from tests.runtime import runtime_server
from tests.sglang_ext.reference import Reference
from winnow_service.models.cache import models_folder

# The model is fetched first.
pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

NAME = "gemma3-270m"
TOKENS = 24
LOGIT_TOLERANCE = 2e-3
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "policies.md"
# The ids are those of the tokenizer that Google publishes.
TEXTS: dict[str, list[int]] = {
    "The capital of France is": [818, 5279, 529, 7001, 563],
    "two  spaces and   three": [13498, 138, 35220, 532, 139, 19891],
    "a line\n\n\nb\tc": [236746, 1757, 109, 236763, 255968, 236755],
    "👩\u200d👩\u200d👧 🚀 ✅": [243767, 237243, 243767, 237243, 244814, 236743, 242015, 113452],
    "x = [1, 23]  # 7": [236781, 578, 870, 236770, 236764, 236743, 236778, 236800, 236842, 138, 236865, 236743, 236832],
    "漢字 العربية": [201637, 87595],
    "    return x\n\t\tpass": [140, 2060, 1123, 107, 255969, 4373],
    " <table><b>x</b>": [236743, 168, 200, 236781, 209],
}
SAYS = {
    "The capital of Japan is": " Tokyo.",
    "Water boils at a temperature of": " 100 degrees Celsius.",
    "def fibonacci(n):\n    ": "if n == 0:\n        return 0\n    elif n == 1:\n        return 1",
}


@pytest.fixture(scope="module")
def model() -> Path:
    subprocess.run([Path(sys.executable).with_name("winnow"), "models", "get", NAME], check=True)
    return models_folder() / NAME


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_read_as_the_published_tokenizer_reads_them(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids == [tokenizer.bos_token_id, *TEXTS[text]]
    assert tokenizer.decode(ids[1:]) == text


def test_it_goes_on_with_texts(model: Path, tokenizer: Any) -> None:
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    for text, expected in SAYS.items():
        tokens = tokenizer(text, return_tensors="pt")
        answer = network.generate(**tokens, max_new_tokens=TOKENS, do_sample=False)[0, tokens["input_ids"].shape[1] :]
        assert tokenizer.decode(answer).startswith(expected)


def test_a_server_answers_as_transformers_and_reads_less_with_each_policy(
    model: Path, tokenizer: Any, tmp_path: Path
) -> None:
    prompt = tokenizer(DOCUMENT.read_text()[:9000])["input_ids"]
    environment = {crossover.ENVIRONMENT: "0", "SGLANG_DEBUG_MEMORY_POOL": "1"}
    arguments = ["--attention-backend", "winnow", "--max-total-tokens", "8192", "--chunked-prefill-size", "1024"]
    policies: dict[str, Any] = {name: policy for name, policy in small_policies().items() if name != "dense"}
    policies["delta"] = {"decode": {"policy": "delta", "budget": 256, "delta_layers": [5]}}
    with runtime_server(model, *arguments, log=tmp_path / "log", **environment) as runtime:

        def ask(policy: Any) -> Any:
            parameters: dict[str, Any] = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
            parameters["custom_params"] = {"attention": json.dumps(policy)}
            body = {"input_ids": prompt, "sampling_params": parameters}
            return httpx.post(f"{runtime.url}/generate", json=body, timeout=600).raise_for_status().json()

        dense = ask({})["output_ids"]
        costs = {name: ask(policy)["meta_info"]["attention"] for name, policy in policies.items()}
    assert max(Reference(model).logit_gaps(prompt, dense)) < LOGIT_TOLERANCE
    for name, cost in costs.items():
        assert (cost["decode"]["policy"], cost["decode"]["dense_steps"], cost["sliding_layers"]) == (name, 0, 15)
        assert cost["decode"]["attended_ratio"] < 0.5, (name, cost)
