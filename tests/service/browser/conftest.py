"""A browser, and the console of a service in front of a fake runtime."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from playwright.async_api import Browser

from tests.ports import free_port
from tests.service.browser.browsing import Console, chromium, console
from tests.service.browser.explanations import PROMPT, explained
from tests.service.control import ADMIN_KEY
from tests.service.fake_runtime import FakeRuntime
from tests.service.servers import serving
from tests.service.test_attention import SERVED
from tests.service.test_profile import PROFILE

# What a runtime tells that explains, and that has a profile.
TOLD = {"winnow": SERVED | {"explains": True, "kv_heads": 2, "profile": PROFILE}}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def runtime() -> AsyncIterator[tuple[FakeRuntime, str]]:
    fake = FakeRuntime(word_seconds=0.02, server_info=TOLD, explanation=explained(PROMPT))
    async with serving(fake.app(), free_port(), grace_seconds=1) as address:
        yield fake, address


@pytest_asyncio.fixture(loop_scope="module")
async def opened(browser: Browser, tmp_path: Path, runtime: tuple[FakeRuntime, str]) -> AsyncIterator[Console]:
    """The console of a service without keys."""
    async with console(browser, tmp_path, runtime[1]) as shown:
        yield shown


@pytest_asyncio.fixture(loop_scope="module")
async def shut(browser: Browser, tmp_path: Path, runtime: tuple[FakeRuntime, str]) -> AsyncIterator[Console]:
    """The console of a service with keys."""
    async with console(browser, tmp_path, runtime[1], admin_key=ADMIN_KEY) as shown:
        yield shown
