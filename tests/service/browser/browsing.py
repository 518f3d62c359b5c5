"""Pages in Debian's Chromium, and what is asked of them."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, ConsoleMessage, Locator, Page, async_playwright, expect

from tests.service.control import replica

CHROMIUM = shutil.which("chromium")
DESKTOP, PHONE = (1440, 900), (390, 844)
SHOWN_MS = 15_000
POLICY = '{"decode": {"policy": "quest", "budget": 1024}, "audit": {"share": 0.1, "kl": true}}'

expect.set_options(timeout=SHOWN_MS)


@dataclass
class Watched:
    """A page, and what happens in it.

    Attributes:
        faults: what the browser reports: errors of scripts, and what a security policy has kept from happening.
        asked: every address that the page has asked for.
    """

    page: Page
    faults: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", self._note)

    def _note(self, message: ConsoleMessage) -> None:
        # Answers that are errors are part of the tests.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.faults.append(message.text)


@dataclass
class Console(Watched):
    """A page at the console of a service.

    Attributes:
        service: a client of it, without a key.
    """

    service: httpx.AsyncClient = field(kw_only=True)

    def column(self, letter: str) -> Locator:
        return self.page.get_by_role("region", name=letter, exact=True)

    async def open(self, panel: str = "playground") -> None:
        await self.page.goto(f"{self.service.base_url}/console#{panel}")
        await expect(self.page.locator(f"#panel-{panel}")).to_be_visible()
        await expect(self.page.locator("#status .badge")).to_be_visible()

    async def send(self, prompt: str) -> None:
        await self.page.get_by_label("Prompt").fill(prompt)
        await self.page.get_by_role("button", name="Send", exact=True).click()

    async def type_policy(self, letter: str, text: str) -> None:
        await self.page.get_by_label(f"Policy of column {letter}", exact=True).select_option("typed")
        await self.page.get_by_label(f"Policy of column {letter}, as JSON").fill(text)


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    assert CHROMIUM is not None, "Debian's chromium is not installed: make packages"
    # Chromium's own sandbox needs a user that is not root.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        await browser.close()


@contextlib.asynccontextmanager
async def page_of(browser: Browser, *, size: tuple[int, int] = DESKTOP, **context: Any) -> AsyncIterator[Page]:
    """An empty page of that width and height, in CSS pixels."""
    opened = await browser.new_context(viewport={"width": size[0], "height": size[1]}, **context)
    yield await opened.new_page()
    await opened.close()


@contextlib.asynccontextmanager
async def console(
    browser: Browser,
    folder: Path,
    runtime_url: str,
    *,
    size: tuple[int, int] = DESKTOP,
    context: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Console]:
    """The console of a service in front of that runtime. What the browser objects to fails the test."""
    async with replica(f"sqlite:///{folder}/control.db", runtime_url, **settings) as service:
        async with page_of(browser, size=size, **(context or {})) as page:
            shown = Console(page, service=service)
            yield shown
        assert shown.faults == []
        origin = str(service.base_url)
        assert {address for address in shown.asked if not address.startswith(origin)} == set()


async def serious_faults(page: Page) -> list[str]:
    """What axe finds in either theme, of the two gravest kinds."""
    await page.emulate_media(color_scheme="light")
    found = [("light", await Axe().run(page))]
    # Nothing but colours is another in the other theme.
    await page.emulate_media(color_scheme="dark")
    found += [("dark", await Axe().run(page, options={"runOnly": ["cat.color"]}))]
    return [
        f"{theme}: {each['id']}: {node['html']}"
        for theme, results in found
        for each in results.response["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


async def width(page: Page) -> int:
    return int(await page.evaluate("document.documentElement.scrollWidth"))


async def holds(condition: bool) -> bool | None:
    return condition or None
