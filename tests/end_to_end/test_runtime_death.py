"""What is left when a real runtime is killed in the middle of an answer."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.end_to_end.deployment import (
    STOP_SECONDS,
    Deployment,
    runtime_pid,
    start,
    start_up,
    wait_readiness,
    wait_ready,
)
from tests.models import NEEDLE
from tests.ports import free_port
from tests.service.processes import WINNOW, alive, descendants
from tests.service.test_streaming import events
from winnow_service.supervisor.programs import Device, runtime_program

# Each start of SGLang is a minute of imports on two busy cores.
pytestmark = pytest.mark.timeout(600)


def test_winnow_up_stops_both_and_exits_with_an_error(tmp_path: Path) -> None:
    deployment = start_up(tmp_path)
    below = descendants(deployment.process.pid)
    client = openai.OpenAI(base_url=f"{deployment.address}/v1", api_key="none", max_retries=0, timeout=120)
    stream = client.chat.completions.create(
        model="needle",
        messages=[{"role": "user", "content": "Go on for long."}],
        max_tokens=20_000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    os.kill(runtime_pid(deployment.process), signal.SIGKILL)
    with pytest.raises(openai.APIError, match="The runtime ended its answer before it was complete"):
        for _ in stream:
            pass
    assert deployment.process.wait(STOP_SECONDS) == 1
    assert "winnow | error: the runtime was killed by signal 9; its last lines:" in deployment.log.read_text()
    assert not any(map(alive, below))


# It starts SGLang twice; tests/service kills fake runtimes in the same ways.
@pytest.mark.full
def test_a_service_of_its_own_stays_up_and_serves_again(
    tmp_path: Path, stopped_at_the_end: list[subprocess.Popen[bytes]]
) -> None:
    port, runtime_port = free_port(), free_port()
    program = runtime_program(NEEDLE, Device.cpu, runtime_port, [])
    address, runtime_address = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{runtime_port}"
    log = tmp_path / "log"
    body = {"text": "Go on.", "stream": True, "sampling_params": {"max_new_tokens": 20_000, "ignore_eos": True}}

    service = start([*WINNOW, "serve", "--port", str(port), "--runtime-url", runtime_address], log)
    stopped_at_the_end.append(service)
    deployment = Deployment(address, runtime_address, service, log)
    assert "cannot be reached" in wait_readiness(deployment, 503, 60)

    for _ in range(2):
        runtime = start(program.command, log, dict(program.environment))
        stopped_at_the_end.append(runtime)
        wait_ready(deployment)
        with httpx.stream("POST", f"{address}/generate", json=body, timeout=120) as answer:
            chunks = answer.iter_text()
            received = next(chunks)
            runtime.kill()
            received += "".join(chunks)
        assert events(received)[-1]["error"]["code"] == "runtime_died"
        wait_readiness(deployment, 503, 10)
        assert httpx.get(f"{address}/healthz").status_code == 200
        refused = httpx.post(f"{address}/generate", json={"text": "hello"}, timeout=30)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers

    families = text_string_to_metric_families(httpx.get(f"{address}/metrics").text)
    [errors] = [family for family in families if family.name == "winnow_runtime_errors"]
    counts = {sample.labels["kind"]: sample.value for sample in errors.samples if sample.name.endswith("_total")}
    assert counts == {"runtime_died": 2, "runtime_unavailable": 2}
