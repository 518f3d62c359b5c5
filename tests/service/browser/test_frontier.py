"""The console's panel Frontier: the profile of the served model."""

from __future__ import annotations

import pytest
from playwright.async_api import expect

from tests.service.browser.browsing import Console, serious_faults
from tests.service.test_profile import PROFILE

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_point_of_the_frontier_becomes_a_policy(opened: Console) -> None:
    page = opened.page
    await opened.open("frontier")
    panel = page.locator("#panel-frontier")
    await expect(panel).to_contain_text("prose, validation; 8 prompts of each length")
    rows = panel.get_by_role("table").get_by_role("row")
    # The longest prompts that were measured, by what is read.
    await expect(rows).to_have_count(5)
    await expect(rows.nth(1)).to_contain_text(
        "lowbit_top_k, budget 512 frontMake a policy20 %0.06 to 0.0890 % from 89 %90 %no"
    )
    await expect(rows.nth(2)).to_contain_text(
        "lowbit_top_k, budget 2048 frontMake a policy55 %0.008 to 0.0198 % from 97 %90 %yes"
    )
    await expect(rows.nth(3)).to_contain_text("quest, budget 2560 not served here")
    await expect(rows.nth(3).get_by_role("button")).to_have_count(0)
    await expect(panel.locator(".scatter .marker")).to_have_count(4)
    await expect(panel.locator(".scatter .on-front")).to_have_count(3)
    await page.get_by_role("combobox", name="Accuracy").select_option("top1")
    await expect(panel.locator(".scatter .on-front")).to_have_count(3)
    await page.get_by_role("combobox", name="Prompts of").select_option("1024")
    await expect(rows).to_have_count(2)
    await page.get_by_role("combobox", name="Policies").select_option("Prefill")
    await expect(rows.nth(1)).to_contain_text("quoka, budget 1024")
    await page.get_by_role("combobox", name="Policies").select_option("Decode")
    await page.get_by_role("combobox", name="Prompts of").select_option("4096")

    await panel.locator(".scatter .marker[title*='budget 2048']").click()
    name = page.locator("#panel-policies").get_by_label("Name")
    await expect(name).to_be_focused()
    await expect(name).to_have_value("lowbit_top_k-2048")
    await page.get_by_role("button", name="Save").click()
    item = page.locator(".items > li", has_text="lowbit_top_k-2048")
    await expect(item).to_contain_text(
        "By the profile of needle: KV read 55 %, KL 0.008, at most 0.01, at 4,096 tokens."
    )
    saved = (await opened.service.get("/v1/policies/lowbit_top_k-2048")).json()
    assert (saved["revision"], saved["attention"]) == (1, PROFILE["curves"][1]["attention"])

    # Once more, by the keyboard: nothing is overwritten.
    await opened.open("frontier")
    await rows.nth(2).get_by_role("button", name="Make a policy of lowbit_top_k, budget 2048").focus()
    await page.keyboard.press("Enter")
    await expect(name).to_be_focused()
    await page.keyboard.press("Enter")
    await expect(name.locator("xpath=..").locator(".error")).to_contain_text("exists")
    assert (await opened.service.get("/v1/policies/lowbit_top_k-2048")).json()["revision"] == 1
    await name.fill("mine")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("button", name="Change mine", exact=True)).to_be_visible()


async def test_the_front_has_what_nothing_else_beats(opened: Console) -> None:
    await opened.open()
    found = await opened.page.evaluate(
        """async () => {
            const { frontOf } = await import("/console/js/profile.js");
            const of = (pairs) => {
                const measured = pairs.map(([kv_read_ratio, kl]) => ({ point: { kv_read_ratio, kl } }));
                return frontOf(measured, ({ kl }) => kl).map((each) => measured.indexOf(each));
            };
            const many = Array.from({ length: 200 }, () => [Math.random(), Math.random()]);
            const front = of(many);
            const beats = ([read, kl], [other, lost]) => read <= other && kl <= lost && (read < other || kl < lost);
            const beaten = (index) => many.some((each) => beats(each, many[index]));
            return {
                none: of([]),
                equal: of([[0.5, 0.1], [0.5, 0.1]]),
                some: of([[0.2, 0.1], [0.3, 0.1], [0.3, 0.05], [0.4, 0.2], [0.2, 0.2]]),
                random: many.every((_, index) => front.includes(index) !== beaten(index)),
            };
        }"""
    )
    assert found == {"none": [], "equal": [0, 1], "some": [0, 2], "random": True}


async def test_axe_finds_nothing_serious(opened: Console) -> None:
    await opened.open("frontier")
    await expect(opened.page.locator(".scatter canvas")).to_be_visible()
    assert await serious_faults(opened.page) == []
