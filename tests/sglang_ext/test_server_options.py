"""What a server is started with is served, or ends the start with a sentence; the documentation's table says which."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_winnow.server_options import OPTIONS, Device, Option, require_served
from tests.models import ModelShape, write_model
from tests.runtime import runtime_server

# Says for each option how its command line ends: with the sentence of a refusal, or with nothing.
COMMAND_LINES = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
from sglang_winnow.server_options import OPTIONS
said = {}
for option in OPTIONS:
    for device, interpreted in (("CPU", "0"), ("CUDA", "1")):
        os.environ["TRITON_INTERPRET"] = interpreted
        sentence = ""
        try:
            command = ["--model-path", sys.argv[1], "--attention-backend", "winnow", *option.example.split()]
            # From 0.5.19 on what the command line leaves open is decided later.
            getattr(prepare_server_args(command), "resolve_once", lambda: None)()
        except SystemExit as refusal:
            sentence = refusal.code
        said[f"{option.feature} on {device}"] = sentence
print("SAID", json.dumps(said))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("options") / "model", ModelShape())


@pytest.fixture(scope="module")
def said(model: Path) -> dict[str, str]:
    command = [sys.executable, "-c", COMMAND_LINES, str(model)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("SAID ")]
    parsed: dict[str, str] = json.loads(line.removeprefix("SAID "))
    return parsed


@pytest.mark.parametrize("device", Device)
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.feature)
def test_what_is_not_served_is_refused_with_a_sentence(option: Option, device: Device, said: dict[str, str]) -> None:
    where = f" on {device}" if option.served_on else ""
    expected = (
        "Winnow: the server does not start, because --attention-backend winnow does not serve"
        f" {option.feature}{where} ({option.flag}): {option.reason}."
    )
    assert said[f"{option.feature} on {device}"] == ("" if device in option.served_on else expected)


def test_a_reason_is_for_what_is_refused() -> None:
    for option in OPTIONS:
        assert bool(option.reason) == (option.served_on != set(Device)), option.feature


@pytest.mark.parametrize("backend", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_another_backend_serves_what_it_serves(backend: str) -> None:
    class Arguments(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return None

    given = {"dp_size": 1, "tp_size": 1, "pp_size": 2, "attn_cp_size": 1, "dcp_size": 1}
    require_served(Arguments(**given, attention_backend="torch_native"))
    with pytest.raises(SystemExit, match="pipeline parallelism"):
        require_served(Arguments(**given, **{backend: "winnow"}))


def test_drafts_are_verified_by_winnow_alone() -> None:
    arguments: Any = SimpleNamespace(
        attention_backend="torch_native",
        prefill_attention_backend=None,
        decode_attention_backend=None,
        speculative_algorithm="winnow",
    )
    with pytest.raises(SystemExit, match="--speculative-algorithm WINNOW needs --attention-backend winnow"):
        require_served(arguments)


def test_a_server_that_is_refused_says_why_and_ends(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = ["--load-format", "dummy", "--pp-size", "2"]
    with pytest.raises(RuntimeError, match=r"SGLang ended with (?!0:)"), runtime_server(model, *arguments, log=log):
        pass
    said = log.read_text()
    assert "Winnow: the server does not start, because --attention-backend winnow does not serve pipeline par" in said
    assert "Traceback" not in said
