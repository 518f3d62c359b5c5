"""The shipped model finds what is hidden in long texts, in each form of request."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import httpx
import openai
import pytest

from tests.end_to_end.deployment import Deployment
from tests.service.processes import WINNOW
from winnow_evaluation.tasks import TASKS
from winnow_evaluation.tasks.sample import Sample

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "buried-answer-16k.json"
EXAMPLE_ANSWER = "5780389"


@pytest.fixture
def client(deployment: Deployment) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{deployment.address}/v1", api_key="none", max_retries=0, timeout=240)


@pytest.fixture(params=[0, 1])
def sample(request: pytest.FixtureRequest) -> Sample:
    return TASKS["niah_multikey_1"].make(random.Random(request.param), 1500)


def test_chat(client: openai.OpenAI, sample: Sample) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": sample.prompt}]
    answer = client.chat.completions.create(model="needle", messages=messages, temperature=0, max_tokens=32)
    assert answer.choices[0].message.content == sample.questions[0].answer
    assert answer.choices[0].finish_reason == "stop"


def test_completions(client: openai.OpenAI, sample: Sample) -> None:
    prompt = f"{sample.prompt}\nAnswer:"
    answer = client.completions.create(model="needle", prompt=prompt, temperature=0, max_tokens=32)
    assert answer.choices[0].text.strip() == sample.questions[0].answer


def test_native(deployment: Deployment, sample: Sample) -> None:
    body = {"text": f"{sample.prompt}\nAnswer:", "sampling_params": {"temperature": 0, "max_new_tokens": 32}}
    answer = httpx.post(f"{deployment.address}/generate", json=body, timeout=240)
    assert answer.json()["text"].strip() == sample.questions[0].answer


def test_the_example_of_the_readme(deployment: Deployment) -> None:
    body = json.loads(EXAMPLE.read_text())
    response = httpx.post(f"{deployment.address}/v1/chat/completions", json=body, timeout=240)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["choices"][0]["message"]["content"] == EXAMPLE_ANSWER
    assert 15_500 < answer["usage"]["prompt_tokens"] < 16_384


def test_the_evaluation_runs_through_the_service(deployment: Deployment, tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    options = ["--tasks", "niah_single_1,niah_multiquery", "--lengths", "1024", "--samples", "2", "--concurrency", "2"]
    command = [*WINNOW, "eval", "--url", deployment.address, *options, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert [row["accuracy"] for row in report["rows"]] == [100.0, 100.0]
    assert all(0 < row["ttft"] <= row["latency"] for row in report["rows"])
