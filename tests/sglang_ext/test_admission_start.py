"""A server whose requests would not be checked does not start."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from sglang_winnow.sglang_versions.prefix_cache import default_caches

NO_SUCH_TARGET = """
from sglang_winnow import plugin
from sglang_winnow.hooks import Hook
plugin.HOOKS = (*plugin.HOOKS, Hook("sglang.srt.utils.no_such_function", print, plugin.HookType.BEFORE))
from sglang.srt.plugins import load_plugins
load_plugins()
"""
RESPONSES = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses"
# As if a package that SGLang imports there were not installed.
CANNOT_BE_IMPORTED = f"""
import sys
sys.modules.pop("{RESPONSES.rpartition(".")[0]}", None)
sys.modules["openai_harmony"] = None
from sglang_winnow import plugin
from sglang_winnow.hooks import Hook
plugin.HOOKS = (Hook("{RESPONSES}.create_responses", print, plugin.HookType.BEFORE),)
from sglang.srt.plugins import load_plugins
load_plugins()
"""
NOT_APPLIED = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry._patched -= {name for name in HookRegistry._patched if "TokenizerManager" in name}
from sglang.srt.entrypoints.engine import Engine
Engine._launch_subprocesses(None)
"""
NOT_APPLIED_IN_SCHEDULER = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry._patched -= {name for name in HookRegistry._patched if name.endswith("Cache.insert")}
from sglang.srt.managers.scheduler import Scheduler
Scheduler.__init__(None)
"""
TOKENIZER_WORKERS = """
from types import SimpleNamespace
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.entrypoints.engine import Engine
Engine._launch_subprocesses(server_args=SimpleNamespace(tokenizer_worker_num=2))
"""
LOAD = "from sglang.srt.plugins import load_plugins; load_plugins()"


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes that have imported SGLang, which takes longer than all that they do."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sglang.srt.entrypoints.engine", "sglang.srt.managers.scheduler"])
    return context


def run(program: str, settings: dict[str, str], errors: Path) -> None:
    os.environ.update(settings)
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    exec(program, {})


def assert_ends(
    processes: ForkServerContext, program: str, settings: dict[str, str], folder: Path, reason: str
) -> None:
    errors = folder / "errors"
    process = processes.Process(target=run, args=(program, settings, errors))
    process.start()
    process.join(120)
    assert process.exitcode == 1
    assert errors.read_text().splitlines()[-1].startswith("Winnow: the server does not start, because " + reason)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (NO_SUCH_TARGET, "this version of SGLang has no sglang.srt.utils.no_such_function to hook"),
        (
            CANNOT_BE_IMPORTED,
            f"SGLang's {RESPONSES}.create_responses cannot be imported (import of openai_harmony halted",
        ),
        (NOT_APPLIED, "SGLang did not apply a hook to sglang.srt.managers.tokenizer_manager.TokenizerManager."),
        (NOT_APPLIED_IN_SCHEDULER, f"SGLang did not apply a hook to {default_caches()[0]}.insert"),
        (TOKENIZER_WORKERS, "--tokenizer-worker-num must be 1"),
    ],
)
def test_the_server_does_not_start_unchecked(
    processes: ForkServerContext, tmp_path: Path, program: str, reason: str
) -> None:
    assert_ends(processes, program, {}, tmp_path, reason)


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("WINNOW_POLICIES", "tactic,nonsense", "WINNOW_POLICIES: no decode policy is called 'nonsense'"),
        ("WINNOW_KEY_BITS", "5", "WINNOW_KEY_BITS: must be one of 2, 3, 4; it is '5'."),
        ("WINNOW_GRAPHS", "quest+nonsense", "WINNOW_GRAPHS: no decode policy is called 'nonsense'"),
        ("WINNOW_PROFILE", "/nowhere", "WINNOW_PROFILE: /nowhere cannot be read (No such file or directory)."),
        ("WINNOW_QUALITY_KL", "0", "WINNOW_QUALITY_KL: must be a KL in nats, more than 0 and at most 10; it is 0."),
        ("WINNOW_LOAD_REQUESTS", "0", "WINNOW_LOAD_REQUESTS: must be a number of requests from 1 on; it is 0."),
        ("WINNOW_QUALITY_UNDER_LOAD_KL", "1", "WINNOW_QUALITY_UNDER_LOAD_KL: needs WINNOW_LOAD_REQUESTS"),
        ("WINNOW_CROSSOVER_TOKENS", "-1", "WINNOW_CROSSOVER_TOKENS: must be a number of tokens from 0 on."),
    ],
)
def test_a_wrong_setting_ends_the_server_before_it_loads_a_model(
    processes: ForkServerContext, tmp_path: Path, variable: str, value: str, reason: str
) -> None:
    assert_ends(processes, LOAD, {variable: value}, tmp_path, reason)
