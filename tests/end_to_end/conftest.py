"""The shipped model, served by SGLang behind the service: started once for all tests that leave it alive."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.deployment import Deployment, start_up, stop


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A ready ``winnow up``. It must stop cleanly."""
    running = start_up(tmp_path_factory.mktemp("up"))
    try:
        yield running
    finally:
        status = stop(running.process)
    assert status == 0, running.log.read_text()[-3000:]


@pytest.fixture
def stopped_at_the_end() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that a test puts here are stopped when it ends."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        stop(process)
