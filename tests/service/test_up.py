"""``winnow up`` and ``winnow down``, with a fake runtime program and the real service."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port
from tests.service.processes import Winnow, alive, descendants, winnow
from tests.service.test_streaming import events
from tests.service.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
FAKE_SGLANG = ROOT / "tests" / "service" / "fake_sglang"


@dataclass(frozen=True)
class Place:
    """A folder to run ``winnow up`` in, with a model, and two free ports."""

    folder: Path
    port: int
    runtime_port: int

    @property
    def model(self) -> Path:
        return self.folder / "tiny-model"

    @property
    def pids_file(self) -> Path:
        return self.folder / "pids"

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def runtime_pids(self) -> list[int]:
        return [int(pid) for pid in self.pids_file.read_text().split()]

    def up(self, *arguments: str) -> contextlib.AbstractAsyncContextManager[Winnow]:
        given = dict(zip(arguments[::2], arguments[1::2], strict=False))
        options = {"--model": str(self.model), "--port": str(self.port), "--runtime-port": str(self.runtime_port)}
        defaults = [part for name, value in options.items() if name not in given for part in (name, value)]
        return self.run("up", "--device", "cpu", *defaults, *arguments)

    def run(self, *arguments: str) -> contextlib.AbstractAsyncContextManager[Winnow]:
        environment = {"PYTHONPATH": f"{FAKE_SGLANG}:{ROOT}", "FAKE_PIDS": str(self.pids_file)}
        return winnow(arguments, self.folder, environment)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path, free_port(), free_port())
    place.model.mkdir()
    (place.model / "config.json").write_text("{}")
    (place.model / "model.safetensors").write_bytes(b"weights")
    return place


@contextlib.asynccontextmanager
async def ready(place: Place, *arguments: str) -> AsyncIterator[tuple[Winnow, set[int]]]:
    """A ``winnow up`` that is ready, and all processes below it."""
    async with place.up(*arguments) as up:
        await up.line_with("curl -s")
        pids = descendants(up.process.pid)
        # Two guards, the service, the runtime, and the three that the runtime started, the daemon with them.
        assert len(pids) == 7
        assert set(place.runtime_pids()) <= pids
        yield up, pids


async def all_gone(pids: set[int]) -> None:
    async def look() -> bool | None:
        return None if any(map(alive, pids)) else True

    await eventually(look)


async def test_both_start_and_answer_and_their_logs_are_prefixed(place: Place) -> None:
    async with ready(place) as (up, _), httpx.AsyncClient(base_url=place.address) as client:
        assert f"winnow | ready at {place.address}" in up.lines
        question = {"model": "tiny-model", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
        assert up.lines[-1] == (
            f"winnow | curl -s {place.address}/v1/chat/completions -H 'content-type: application/json' "
            f"-d '{json.dumps(question)}'"
        )
        assert "runtime | serving tiny-model on the '' devices" in up.lines
        assert any(line.startswith("service | ") for line in up.lines)
        assert sum(line.count("x") for line in up.lines if line.strip("x") in ("", "runtime | ")) >= 200_000
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.post("/generate", json={"text": "hello"})).json()["text"] == "an answer"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_stops_both_cleanly(place: Place, number: signal.Signals) -> None:
    async with ready(place) as (up, pids):
        up.process.send_signal(number)
        assert await up.end() == 0
        assert not any(map(alive, pids))
        # As `winnow` words its own, and as the service logs.
        assert "error:" not in up.output
        assert '"level": "error"' not in up.output


async def test_killed_it_leaves_nothing_behind(place: Place) -> None:
    async with ready(place) as (up, pids):
        up.process.kill()
        await up.process.wait()
        await all_gone(pids)


async def test_a_killed_guard_leaves_nothing_behind(place: Place) -> None:
    async with ready(place) as (up, pids):
        [runtime, *_] = place.runtime_pids()
        guard = next(pid for pid in pids if runtime in descendants(pid) and runtime != pid)
        os.kill(guard, signal.SIGKILL)
        assert await up.end() == 1
        assert not any(map(alive, pids))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_dead_runtime_stops_the_service(place: Place, number: signal.Signals) -> None:
    async with ready(place) as (up, pids):
        os.kill(place.runtime_pids()[0], number)
        assert await up.end() == 1
        assert not any(map(alive, pids))
        assert "error: the runtime" in up.output
        assert "service" in up.output


async def test_a_dead_service_stops_the_runtime(place: Place) -> None:
    async with ready(place) as (up, pids):
        runtime = set(place.runtime_pids())
        services = [pid for pid in pids - runtime if not descendants(pid)]
        assert len(services) == 1
        os.kill(services[0], signal.SIGKILL)
        assert await up.end() == 1
        assert not any(map(alive, pids))
        assert "winnow | error: the service was killed by signal 9; its last lines:" in up.lines


async def test_a_runtime_that_does_not_start_is_reported_with_its_last_lines(place: Place) -> None:
    async with place.up("--", "--fake-exit", "7") as up:
        assert await up.end() == 1
        [position] = [i for i, line in enumerate(up.lines) if "error: the runtime ended with status 7" in line]
        assert "runtime | about to fail" in up.lines[position:]
        assert not any(map(alive, place.runtime_pids()))


async def test_a_refusal_of_the_plugin_is_the_error_that_is_shown(place: Place) -> None:
    async with place.up("--", "--fake-refusal") as up:
        assert await up.end() == 1
        assert up.lines[-1] == "winnow | error: the server does not start, because it does not serve what was asked."
        # The log stands above it, once.
        assert up.output.count("RuntimeError: Rank 0 scheduler died") == 1


async def test_a_second_ctrl_c_does_not_wait(place: Place) -> None:
    async with ready(place, "--", "--fake-stubborn") as (up, pids):
        up.process.send_signal(signal.SIGINT)
        await up.line_with("stopping")
        up.process.send_signal(signal.SIGINT)
        # Less than the grace that the runtime has.
        assert await up.end(timeout_seconds=5) == 0
        assert not any(map(alive, pids))


async def test_a_stream_that_the_runtime_dies_in_ends_with_an_error_event(place: Place) -> None:
    async with ready(place) as (up, _), httpx.AsyncClient(base_url=place.address) as client:
        body = {"stream": True, "fake": {"gated": True}}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            os.kill(place.runtime_pids()[0], signal.SIGKILL)
            text = (await answer.aread()).decode()
        assert events(text)[-1]["error"]["code"] == "runtime_died"
        assert await up.end() == 1


async def test_down_stops_what_up_started(place: Place) -> None:
    async with ready(place) as (up, pids):
        reading = asyncio.create_task(up.end())
        async with place.run("down") as down:
            assert await down.end() == 0
            assert down.output == f"stopped winnow up at {place.address}"
        assert await reading == 0
        assert not any(map(alive, pids))
        async with place.run("down") as down:
            assert await down.end() == 0
            assert down.output == "winnow up is not running here"


async def test_down_never_signals_a_process_of_a_stale_file(place: Place) -> None:
    stale = place.folder / ".winnow" / "up.json"
    stale.parent.mkdir()
    stale.write_text(json.dumps({"pid": os.getpid(), "address": "a", "runtime_address": "b"}))
    async with place.run("down") as down:
        assert await down.end() == 0
        assert down.output == "winnow up is not running here"
    async with ready(place):
        assert json.loads(stale.read_text())["address"] == place.address


async def test_a_second_up_in_the_same_place_is_refused(place: Place) -> None:
    other = Place(place.folder, free_port(), free_port())
    async with ready(place) as (first, _):
        async with other.up() as second:
            assert await second.end() == 2
            assert f"already runs here at {place.address}, process {first.process.pid}" in second.output
        async with httpx.AsyncClient() as client:
            assert (await client.get(place.address + "/readyz")).status_code == 200


async def refused(place: Place, *arguments: str) -> str:
    """The one line with which ``winnow up`` refuses to start."""
    async with place.up(*arguments) as up:
        assert await up.end() == 2
        assert not place.pids_file.exists()
        [line] = up.lines
        assert line.startswith("error: ")
        return line


@pytest.mark.parametrize("option", ["--port", "--runtime-port"])
async def test_a_port_in_use_is_refused(place: Place, option: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        line = await refused(place, option, port)
    assert f"port {port}" in line
    assert f"choose another with {option}" in line


async def test_one_port_for_both_is_refused(place: Place) -> None:
    assert "choose two ports" in await refused(place, "--port", str(place.runtime_port))


async def test_a_missing_model_is_refused(place: Place) -> None:
    line = await refused(place, "--model", str(place.folder / "nowhere"))
    assert f"{place.folder / 'nowhere'} does not exist, and no model is called " in line
    assert line.endswith("; name a folder, or one of needle, smollm2, smollm2-32k, gemma3-270m")


async def test_a_folder_that_is_no_model_is_refused(place: Place) -> None:
    (place.model / "config.json").unlink()
    assert "has no config.json" in await refused(place)


async def test_a_model_larger_than_memory_is_refused(place: Place) -> None:
    # A hole in the file: it takes no disk.
    os.truncate(place.model / "model.safetensors", 8 * 1024**4)
    line = await refused(place)
    assert "needs about 8195.0 GiB of memory" in line
    assert "--model NAME|FOLDER" in line


@pytest.mark.parametrize("argument", ["--port=1", "--model-path", "--host", "--device"])
async def test_sglang_options_that_up_sets_itself_are_refused(place: Place, argument: str) -> None:
    assert f"{argument} cannot be passed on to SGLang" in await refused(place, "--", argument)
