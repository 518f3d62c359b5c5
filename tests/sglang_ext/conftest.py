"""A small server for the tests that only send it requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from packaging.version import Version

from sglang_winnow import crossover
from sglang_winnow.sglang_versions.releases import runs
from tests.models import ModelShape, write_model, write_weights
from tests.runtime import Runtime, runtime_server

SERVED_MODEL = "tiny"
# Responses can be fetched later if the command line says so; until then they always could.
RESPONSE_STORE = Version("0.5.20")
CHUNK = 256
# Policies are followed at every length; SGLang looks for lost KV slots whenever it is idle.
ENVIRONMENT = {crossover.ENVIRONMENT: "0", "SGLANG_DEBUG_MEMORY_POOL": "1"}


@pytest.fixture(scope="session")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """It runs four requests at once."""
    folder = tmp_path_factory.mktemp("small_server")
    model = write_model(folder / "model", ModelShape())
    write_weights(model)
    arguments = [
        "--served-model-name",
        SERVED_MODEL,
        "--max-total-tokens",
        "4096",
        "--chunked-prefill-size",
        str(CHUNK),
    ]
    # Metrics are where a label that a client makes up would end the server.
    arguments += ["--attention-backend", "winnow", "--enable-metrics", "--max-running-requests", "4"]
    if runs(RESPONSE_STORE):
        arguments.append("--enable-response-store")
    with runtime_server(model, *arguments, log=folder / "log", **ENVIRONMENT) as runtime:
        yield runtime
    # SGLang waits for those that it believes to run, until it is killed.
    assert "Remaining number of requests 0" in runtime.log.read_text()
