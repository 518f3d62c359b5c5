"""The console's panel Explain: what policies read of a prompt."""

from __future__ import annotations

import json

import pytest
from playwright.async_api import expect

from tests.service.browser.browsing import Console, serious_faults
from tests.service.browser.explanations import PROMPT
from tests.service.fake_runtime import FakeRuntime

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_prompt_is_explained_under_each_policy(opened: Console, runtime: tuple[FakeRuntime, str]) -> None:
    page = opened.page
    await opened.open("explain")
    await page.get_by_label("Prompt").fill(PROMPT)
    await page.get_by_role("button", name="Add a policy").click()
    await page.get_by_label("Policy C", exact=True).select_option("typed")
    await page.get_by_label("Policy C, as JSON").fill('{"decode": {"policy": "quest", "budget": 64}}')
    await page.get_by_role("button", name="Explain", exact=True).click()
    first = page.get_by_role("region", name="A, balanced", exact=True)
    third = page.get_by_role("region", name="C, quest, budget 64", exact=True)
    for section in (first, third):
        strip = section.locator(".strip")
        # The tokens are the text, whatever is in it.
        await expect(strip).to_have_text(PROMPT + " yes", use_inner_text=True)
        await expect(strip.locator(".read")).to_have_count(2)
        await expect(strip.locator(".generated")).to_have_text(" yes")
        await expect(section).to_contain_text("Not explained: step 8. The answer took 1 decode step.")
    assert await page.locator(".explanation :is(img, b, script)").count() == 0
    await expect(first).to_contain_text("which hold 75 % of dense attention's weights")
    heats = await first.locator(".token").evaluate_all(
        "all => all.map(one => Number(one.style.getPropertyValue('--heat')))"
    )
    assert heats[:2] == [1, pytest.approx(0.8646, abs=1e-3)]
    shares = first.get_by_role("table", name="Share per layer of A, balanced")
    await expect(shares.get_by_role("row").nth(3)).to_have_text("775 %11 %")
    tokens = first.get_by_role("table", name="Tokens of A, balanced")
    await expect(tokens.get_by_role("row").nth(1)).to_have_text('0 "<img"0.6875004 of 8')
    await first.get_by_role("button", name="Next").click()
    await expect(tokens.get_by_role("row")).to_have_count(len(PROMPT.split(" ")) + 1 - 12 + 1)
    await page.get_by_role("combobox", name="Layer", exact=True).select_option("7")
    await page.get_by_role("combobox", name="KV head", exact=True).select_option("1")
    await expect(tokens.get_by_role("row").nth(1)).to_contain_text("0 of 1")

    [body] = {request.body for request in runtime[0].asked if b"quest" in request.body}
    assert b'"messages"' in body
    assert PROMPT in json.loads(body)["messages"][0]["content"]


async def test_what_cannot_be_explained_is_said_at_its_field(opened: Console, runtime: tuple[FakeRuntime, str]) -> None:
    page = opened.page
    await opened.open("explain")
    send = page.get_by_role("button", name="Explain", exact=True)
    layers = page.get_by_label("Layers", exact=True)
    await layers.fill("1 to 3")
    await send.click()
    await expect(page.locator("#panel-explain .error", has_text="must be numbers with commas between")).to_be_visible()
    await layers.fill("3, 9-12")
    await send.click()
    await expect(page.locator("#panel-explain .error", has_text="there is no layer 12")).to_be_visible()
    await expect(layers).to_be_focused()
    await layers.fill("")
    await page.get_by_label("Policy B", exact=True).select_option("name:lossless")
    await send.click()
    await expect(page.locator(".asked-policy .error", has_text="policies.1.verify: is not explained")).to_be_visible()
    await expect(page.get_by_label("Policy B", exact=True)).to_be_focused()
    await page.get_by_label("Policy B", exact=True).select_option("typed")
    await page.get_by_label("Policy B, as JSON").fill('{"decode": ')
    await send.click()
    await expect(page.locator(".asked-policy .error", has_text="not valid JSON")).to_be_visible()
    assert runtime[0].asked == []
    assert await page.locator("#panel-explain [aria-invalid]").count() == 1


async def test_axe_finds_nothing_serious(opened: Console) -> None:
    page = opened.page
    await opened.open("explain")
    await page.get_by_label("Layers", exact=True).fill("none")
    await page.get_by_role("button", name="Explain", exact=True).click()
    await expect(page.locator("#panel-explain [aria-invalid]")).to_be_visible()
    assert await serious_faults(page) == []
    await page.get_by_label("Layers", exact=True).fill("")
    await page.get_by_role("button", name="Explain", exact=True).click()
    await expect(page.locator(".strip")).to_have_count(2)
    assert await serious_faults(page) == []
