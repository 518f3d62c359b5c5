"""The key that the console asks for, what it may do, and the panel Keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from tests.service.browser.browsing import Console, console, serious_faults
from tests.service.control import ADMIN_KEY, bearer, make_key
from tests.service.fake_runtime import FakeRuntime

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_key_is_asked_for_kept_by_the_tab_and_forgotten(shut: Console) -> None:
    page = shut.page
    await shut.open()
    field = page.get_by_label("Key", exact=True)
    await field.fill("winnow_0123456789abcdef_" + "x" * 43)
    await field.press("Enter")
    await expect(page.locator("#sign-in .error")).to_contain_text("unknown or was revoked")
    assert await stored(page) == []
    assert await serious_faults(page) == []
    await field.fill(ADMIN_KEY)
    await field.press("Enter")
    await expect(page.locator("#sign-in")).to_be_hidden()
    await expect(page.locator("#access")).to_contain_text("admin")
    assert await stored(page) == [ADMIN_KEY]
    await page.reload()
    await expect(page.locator("#access")).to_contain_text("admin")
    await page.get_by_role("button", name="Forget the key").click()
    await expect(page.locator("#sign-in")).to_be_visible()
    assert await stored(page) == []
    assert await page.evaluate("Object.values(localStorage).join()") == ""
    assert [address for address in shut.asked if ADMIN_KEY in address] == []


async def test_a_refused_key_is_told_where_it_was_used(shut: Console) -> None:
    page = shut.page
    key = await make_key(shut.service, scopes=["infer"])
    await shut.open()
    await page.get_by_label("Key", exact=True).fill(key["key"])
    await page.get_by_role("button", name="Use this key").click()
    await expect(page.locator("#access")).to_contain_text(key["id"])
    # This key may neither read metrics nor list policies: the service says so, and nothing else is tried.
    await shut.open("live")
    await expect(page.locator("#panel-live .problem")).to_have_text("This needs a key with the scope 'read'.")
    await shut.open("policies")
    await expect(page.locator("#panel-policies > .problem")).to_have_text("This needs a key with the scope 'read'.")
    await expect(page.get_by_role("button", name="New policy")).to_be_disabled()
    await shut.open()
    await shut.type_policy("B", "fast")
    await shut.send("one two")
    await expect(shut.column("B").locator(".badge")).to_have_text("done")
    await shut.service.delete(f"/v1/keys/{key['id']}", headers=bearer(ADMIN_KEY))
    await shut.send("one two")
    await expect(shut.column("A").locator(".problem")).to_contain_text("The key is not valid")
    await expect(shut.column("A").locator(".problem")).to_contain_text("status 401 · invalid_key")
    await expect(page.locator("#access")).to_contain_text("key refused")


async def test_what_a_key_may_not_do_is_not_offered(shut: Console) -> None:
    page = shut.page
    key = await make_key(shut.service, scopes=["read"])
    await shut.open("frontier")
    await page.get_by_label("Key", exact=True).fill(key["key"])
    await page.get_by_role("button", name="Use this key").click()
    await expect(page.locator("#panel-frontier").get_by_role("row")).to_have_count(5)
    await expect(page.locator("#panel-frontier").get_by_role("button")).to_have_count(0)
    await expect(page.locator(".scatter .choosable")).to_have_count(0)
    await shut.open("explain")
    await expect(page.get_by_role("button", name="Explain", exact=True)).to_be_disabled()
    await expect(page.get_by_text("This needs a key with the scope 'admin'.")).to_be_visible()


async def test_a_new_key_is_shown_once(browser: Browser, tmp_path: Path, runtime: tuple[FakeRuntime, str]) -> None:
    permissions = {"permissions": ["clipboard-read", "clipboard-write"]}
    async with console(browser, tmp_path, runtime[1], context=permissions) as shown:
        page = shown.page
        await shown.open("keys")
        await page.get_by_role("button", name="New key").click()
        await page.get_by_label("Name").fill("team <b>a</b>")
        await page.get_by_label("admin").uncheck()
        await page.get_by_role("button", name="Save").click()
        await expect(page.locator(".error", has_text="must have admin")).to_be_visible()
        await page.get_by_label("admin").check()
        await page.get_by_label("Requests a minute").fill("0")
        await page.get_by_role("button", name="Save").click()
        limit = page.get_by_label("Requests a minute")
        await expect(limit).to_be_focused()
        await expect(limit).to_have_attribute("aria-invalid", "true")
        await limit.fill("600")
        await page.get_by_label("Bounds on policies").fill('{"min_p": 2}')
        await page.get_by_role("button", name="Save").click()
        await expect(page.locator(".error", has_text="bounds.min_p: must be")).to_be_visible()
        await page.get_by_label("Bounds on policies").fill('{"min_p": 0.8}')
        await page.get_by_role("button", name="Save").click()
        secret = await page.get_by_label("The key team <b>a</b>").input_value()
        assert secret.startswith("winnow_")
        await page.get_by_role("button", name="Copy").click()
        await expect(page.get_by_text("Copied.")).to_be_visible()
        assert await page.evaluate("navigator.clipboard.readText()") == secret
        # The service is shut now.
        await expect(page.locator("#sign-in")).to_be_visible()
        await page.get_by_role("button", name="Use it in this tab").click()
        await expect(page.locator("#access")).to_contain_text(secret.split("_")[1])
        await page.reload()
        await expect(page.locator(".items")).to_contain_text("team <b>a</b>")
        await expect(page.locator(".items")).to_contain_text("min_p 0.8")
        assert secret not in await page.content()

        await page.get_by_role("button", name="Change team").click()
        await page.get_by_label("Name").fill("team b")
        await page.get_by_role("button", name="Save").click()
        await expect(page.locator(".items")).to_contain_text("team b")
        await page.get_by_role("button", name="Revoke team b").click()
        await page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
        await expect(page.locator("#sign-in")).to_be_visible()


async def stored(page: Page) -> list[str]:
    values: list[str] = await page.evaluate("Object.values(sessionStorage)")
    return values


async def test_axe_finds_nothing_serious(opened: Console) -> None:
    page = opened.page
    await opened.open("keys")
    await page.get_by_role("button", name="New key").click()
    await page.get_by_role("button", name="Save").click()
    await expect(page.locator("#panel-keys [aria-invalid]")).to_be_visible()
    assert await serious_faults(page) == []
