"""What the console's panels share: theme, keyboard, the width of a phone, and a runtime that has little to say."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.ports import free_port
from tests.service.browser.browsing import PHONE, Console, console, width
from tests.service.control import make_key
from tests.service.fake_runtime import FakeRuntime
from tests.service.servers import serving
from tests.service.test_attention import SERVED

PANELS = ("playground", "explain", "frontier", "live", "policies", "keys")

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_runtime_without_a_profile_and_without_explanations_says_so(browser: Browser, tmp_path: Path) -> None:
    fake = FakeRuntime(server_info={"winnow": SERVED})
    async with (
        serving(fake.app(), free_port(), grace_seconds=1) as address,
        console(browser, tmp_path, address) as shown,
    ):
        await shown.open("frontier")
        panel = shown.page.locator("#panel-frontier")
        await expect(panel).to_contain_text("run `winnow calibrate profile --model MODEL`")
        await expect(panel.locator(".problem")).to_have_count(0)
        await shown.open("explain")
        await shown.page.get_by_role("button", name="Explain", exact=True).click()
        await expect(shown.page.locator("#panel-explain .problem")).to_contain_text("The runtime cannot explain")


async def test_the_theme_can_be_switched(opened: Console) -> None:
    await opened.open()
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = await opened.page.evaluate(ground)
    await opened.page.get_by_label("Theme").select_option("dark")
    assert await opened.page.evaluate(ground) != light
    await opened.page.reload()
    assert await opened.page.evaluate(ground) != light
    await opened.page.get_by_label("Theme").select_option("light")
    assert await opened.page.evaluate(ground) == light


async def test_the_keyboard_goes_everywhere(opened: Console) -> None:
    page = opened.page
    await opened.open()
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(page.locator("main")).to_be_focused()
    await expect(page.locator("#panel-playground")).to_be_visible()
    await page.get_by_label("Prompt").fill("one two")
    await page.keyboard.press("Control+Enter")
    await expect(opened.column("A").locator(".badge")).to_have_text("done")
    await expect(page.get_by_role("status").first).to_contain_text("Column")
    await page.get_by_role("link", name="Keys").focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("heading", name="Keys")).to_be_focused()


async def test_a_phone_scrolls_in_one_direction(
    browser: Browser, tmp_path: Path, runtime: tuple[FakeRuntime, str]
) -> None:
    async with console(browser, tmp_path, runtime[1], size=PHONE) as shown:
        await shown.open()
        await shown.send("w" * 300)
        await expect(shown.column("B").locator(".badge")).to_have_text("done")
        for panel in PANELS:
            await shown.open(panel)
            if panel == "explain":
                await shown.page.get_by_role("button", name="Explain", exact=True).click()
                await expect(shown.page.locator(".strip")).to_have_count(2)
            if panel == "frontier":
                await expect(shown.page.locator(".scatter canvas")).to_be_visible()
            assert await width(shown.page) == PHONE[0], panel
        await make_key(shown.service, scopes=["admin"])
        await shown.page.reload()
        await expect(shown.page.locator("#sign-in")).to_be_visible()
        assert await width(shown.page) == PHONE[0]
