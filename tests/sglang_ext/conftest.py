"""A small server for the tests that only send it requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from packaging.version import Version

from sglang_winnow import crossover
from sglang_winnow.profile_settings import LOAD, PROFILE, UNDER_LOAD
from sglang_winnow.sglang_versions.releases import LINEAR_ATTENTION_ON_CUDA, runs
from tests.models import ModelShape, write_model, write_weights
from tests.profiles import curve, profile
from tests.runtime import Runtime, runtime_server

# SGLang's classes that have states are of one release.
_WITH_STATES = ("linear_attention", "linear_server", "images_server", "states_in_radix")
collect_ignore = [] if LINEAR_ATTENTION_ON_CUDA else [f"test_{name}.py" for name in _WITH_STATES]
SERVED_MODEL = "tiny"
# Responses can be fetched later if the command line says so; until then they always could.
RESPONSE_STORE = Version("0.5.20")
CHUNK = 256
# Policies are followed at every length; SGLang looks for lost KV slots whenever it is idle.
ENVIRONMENT = {crossover.ENVIRONMENT: "0", "SGLANG_DEBUG_MEMORY_POOL": "1"}

# Of no real model: figures by which a choice can be told.
PROFILE_LENGTHS = (150, 2000)
QUEST = {"decode": {"policy": "quest", "budget": 64, "full_layers": 0}}
QUOKA = {"prefill": {"policy": "quoka", "budget": 64, "block": 64}}
# Cheaper, and near enough for the server under load alone.
QUEST_UNDER_LOAD = {"decode": {"policy": "quest", "budget": 32, "full_layers": 0}}
LOAD_REQUESTS = 3
CURVES = [
    curve(QUEST, dict.fromkeys(PROFILE_LENGTHS, (0.01, 0.98, 0.4))),
    curve(QUOKA, dict.fromkeys(PROFILE_LENGTHS, (0.005, 0.99, 0.5))),
    curve(QUEST | QUOKA, dict.fromkeys(PROFILE_LENGTHS, (0.015, 0.96, 0.4))),
    curve(QUEST_UNDER_LOAD, dict.fromkeys(PROFILE_LENGTHS, (0.03, 0.94, 0.2))),
    curve(QUEST_UNDER_LOAD | QUOKA, dict.fromkeys(PROFILE_LENGTHS, (0.04, 0.92, 0.2))),
]


@pytest.fixture(scope="session")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """It runs four requests at once, and chooses policies for those that leave it to the server."""
    folder = tmp_path_factory.mktemp("small_server")
    model = write_model(folder / "model", ModelShape())
    write_weights(model)
    profile(model, PROFILE_LENGTHS, CURVES).write(folder / "profile.json")
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
    environment = ENVIRONMENT | {PROFILE: str(folder / "profile.json"), LOAD: str(LOAD_REQUESTS), UNDER_LOAD: "0.05"}
    with runtime_server(model, *arguments, log=folder / "log", **environment) as runtime:
        yield runtime
    # SGLang waits for those that it believes to run, until it is killed.
    assert "Remaining number of requests 0" in runtime.log.read_text()
