"""The console's panel Policies."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.service.browser.browsing import POLICY, Console, serious_faults
from tests.service.browser.explanations import HOSTILE

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_policies_are_made_changed_and_deleted(opened: Console) -> None:
    page = opened.page
    await opened.open("policies")
    await page.get_by_role("button", name="New policy").click()
    name, attention = page.get_by_label("Name"), page.get_by_label("Policy", exact=True).first
    await page.get_by_role("button", name="Save").click()
    await expect(name).to_have_attribute("aria-invalid", "true")
    await name.fill("exact")
    await page.get_by_role("button", name="Save").click()
    await expect(name.locator("xpath=..").locator(".error")).to_contain_text("is a preset")
    await name.fill("search")
    await attention.fill('{"decode": {"policy": "quest", "budget": 1}}')
    await page.get_by_role("button", name="Save").click()
    await expect(attention.locator("xpath=..").locator(".error")).to_contain_text("attention.decode.budget: must be")
    await expect(attention).to_be_focused()
    await attention.fill(POLICY)
    await page.get_by_label("Description").fill(HOSTILE)
    await page.get_by_role("button", name="Check").click()
    await expect(page.get_by_text("The served model takes it as:")).to_be_visible()
    await page.get_by_role("button", name="Save").click()
    item = page.locator(".items > li", has_text="quest, budget 1024")
    await expect(item).to_contain_text(HOSTILE)
    assert (await opened.service.get("/v1/policies/search")).json()["description"] == HOSTILE

    await page.get_by_role("button", name="Change search").click()
    await page.get_by_label("Description").fill("For the search team.")
    # Somebody else is faster.
    other = {"attention": {"decode": {"policy": "quest", "budget": 2048}}, "description": "Another's."}
    await opened.service.put("/v1/policies/search", json=other, headers={"if-match": "*"})
    await page.get_by_role("button", name="Save").click()
    await expect(page.locator("#panel-policies .error:text-matches('.')").first).to_be_visible()
    await page.get_by_role("button", name="Cancel").click()
    await opened.open("live")
    await opened.open("policies")
    await page.get_by_role("button", name="Change search").click()
    await page.get_by_label("Description").fill("For the search team.")
    await page.get_by_role("button", name="Save").click()
    await expect(page.locator(".items > li", has_text="For the search team.")).to_be_visible()

    await page.get_by_role("button", name="Try search").click()
    await expect(page.get_by_label("Policy of column B", exact=True)).to_have_value("name:search")
    await opened.open("policies")
    await page.get_by_role("button", name="Set").click()
    await expect(page.get_by_text("* gets exact")).to_be_visible()
    await page.get_by_role("button", name="Delete search").click()
    await page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    await expect(page.get_by_role("button", name="Change search")).to_have_count(0)
    assert (await opened.service.get("/v1/policies/search")).status_code == 404


async def test_axe_finds_nothing_serious(opened: Console) -> None:
    page = opened.page
    await opened.open("policies")
    await page.get_by_role("button", name="New policy").click()
    await page.get_by_role("button", name="Save").click()
    await expect(page.locator("#panel-policies [aria-invalid]")).to_be_visible()
    assert await serious_faults(page) == []
