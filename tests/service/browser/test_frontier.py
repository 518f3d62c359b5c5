"""The console's panel Frontier: the profile of the served model."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Locator, expect

from tests.service.browser.browsing import DESKTOP, PHONE, Console, console, serious_faults, width
from tests.service.fake_runtime import FakeRuntime
from tests.service.test_attention import SERVED
from tests.service.test_profile import PROFILE, TIMED, timed

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
                const measured = pairs.map(([cost, kl]) => ({ point: { cost, kl } }));
                return frontOf(measured, ({ cost }) => cost, ({ kl }) => kl).map((each) => measured.indexOf(each));
            };
            const many = Array.from({ length: 200 }, () => [1.5 * Math.random(), Math.random()]);
            const front = of(many);
            const beats = ([cost, kl], [other, lost]) => cost <= other && kl <= lost && (cost < other || kl < lost);
            // Dense attention is always there.
            const beaten = (index) => [...many, [1, 0]].some((each) => beats(each, many[index]));
            return {
                none: of([]),
                equal: of([[0.5, 0.1], [0.5, 0.1]]),
                some: of([[0.2, 0.1], [0.3, 0.1], [0.3, 0.05], [0.4, 0.2], [0.2, 0.2]]),
                asDense: of([[1, 0], [1.2, 0], [NaN, 0], [0.9, 0.1]]),
                random: many.every((_, index) => front.includes(index) !== beaten(index)),
            };
        }"""
    )
    assert found == {"none": [], "equal": [0, 1], "some": [0, 2], "asDense": [3], "random": True}


@contextlib.asynccontextmanager
async def frontier_of(
    profile: dict[str, Any],
    browser: Browser,
    tmp_path: Path,
    runtime: tuple[FakeRuntime, str],
    size: tuple[int, int] = DESKTOP,
) -> AsyncIterator[Console]:
    """The panel, open, where the runtime has that profile."""
    fake, address = runtime
    fake.server_info = {"winnow": SERVED | {"profile": profile}}
    async with console(browser, tmp_path, address, size=size) as shown:
        await shown.open("frontier")
        await expect(shown.page.locator(".scatter canvas")).to_be_visible()
        yield shown


async def test_a_profile_with_times_is_drawn_by_time(
    browser: Browser, tmp_path: Path, runtime: tuple[FakeRuntime, str]
) -> None:
    async with frontier_of(TIMED, browser, tmp_path, runtime) as shown:
        page = shown.page
        panel = page.locator("#panel-frontier")
        rows = panel.get_by_role("table").get_by_role("row")
        front = panel.locator(".scatter .on-front")
        cost = page.get_by_role("combobox", name="Cost")
        small, large = (panel.locator(f".scatter .marker[title*='budget {budget}:']") for budget in (512, 2048))
        await expect(panel.locator("figcaption h3")).to_have_text("Decode, prompts of 4,096 tokens: KL against KV read")
        await expect(front).to_have_count(3)
        assert await left(small) < await left(large)
        await expect(rows.nth(1)).to_contain_text("lowbit_top_k, budget 512 frontMake a policy20 %0.8×, 16.0 ms")

        await cost.focus()
        await page.keyboard.press("ArrowDown")
        await expect(panel.locator("figcaption h3")).to_have_text(
            "Decode, prompts of 4,096 tokens: KL against attention time per token"
        )
        await expect(panel.locator(".legend")).to_contain_text("nothing that is served takes less time and loses less")
        # The smaller budget takes longer and loses more, and lowbit_top_p takes longer than dense attention.
        await expect(front).to_have_count(1)
        await expect(front).to_have_attribute("title", re.compile("budget 2048: .*, attention time 0.5× dense"))
        assert await left(large) < await left(small)
        await expect(panel.locator(".scatter .marker")).to_have_count(4)
        # The fastest comes first.
        await expect(rows.nth(1)).to_contain_text("quest, budget 2560 not served here65 %0.3×, 6.0 ms")
        await expect(rows.nth(2)).to_contain_text("lowbit_top_k, budget 2048 frontMake a policy55 %0.5×, 10.0 ms")
        await expect(rows.nth(4)).to_contain_text("1.6×, 32.0 ms")
        # By equal first tokens it is the same one.
        await page.get_by_role("combobox", name="Accuracy").select_option("top1")
        await expect(front).to_have_count(1)
        assert await serious_faults(page) == []

        # Where nothing was timed there is no choice. The one that was made comes back.
        await page.get_by_role("combobox", name="Prompts of").select_option("1024")
        await expect(cost).to_be_disabled()
        await expect(cost).to_have_accessible_description(re.compile("no times of these policies at this length"))
        await expect(panel.locator("figcaption h3")).to_contain_text("against KV read")
        await page.get_by_role("combobox", name="Prompts of").select_option("4096")
        await expect(cost).to_be_enabled()
        await expect(cost).to_have_value("time")
        await page.get_by_role("combobox", name="Policies").select_option("Prefill")
        await expect(cost).to_be_disabled()
        # After a sparse prefill the same decode steps take as long.
        await page.get_by_role("combobox", name="Policies").select_option("Decode after quoka")
        await expect(rows.nth(1)).to_contain_text("20 %0.8×, 16.0 ms")
        await page.get_by_role("combobox", name="Policies").select_option("Decode")

        await large.click()
        await page.get_by_role("button", name="Save").click()
        await expect(page.locator(".items > li", has_text="lowbit_top_k-2048")).to_contain_text(
            "KV read 55 %, attention time 0.5× dense attention's, KL 0.008, at most 0.01, at 4,096 tokens."
        )
        saved = (await shown.service.get("/v1/policies/lowbit_top_k-2048")).json()
        assert saved["attention"] == TIMED["curves"][1]["attention"]


async def test_where_nothing_is_faster_there_is_no_front_by_time(
    browser: Browser, tmp_path: Path, runtime: tuple[FakeRuntime, str]
) -> None:
    # One policy was not timed: it has a row and no point.
    slow = timed(PROFILE, 4096, [6.5, 2.8, 0.3, None, None, 6.5])
    async with frontier_of(slow, browser, tmp_path, runtime, PHONE) as shown:
        await shown.page.get_by_role("combobox", name="Cost").select_option("time")
        panel = shown.page.locator("#panel-frontier")
        await expect(panel.locator(".legend")).to_contain_text("no front: nothing that is served takes less time")
        await expect(panel.locator(".legend")).not_to_contain_text("lowbit_top_p")
        await expect(panel.locator(".scatter .marker")).to_have_count(3)
        await expect(panel.locator(".scatter .on-front")).to_have_count(0)
        last = panel.get_by_role("table").get_by_role("row").nth(4)
        await expect(last).to_contain_text("lowbit_top_p, p 0.9Make a policy90 %–0 to 0")
        assert await width(shown.page) == PHONE[0]
        assert await serious_faults(shown.page) == []


@pytest.mark.parametrize(
    ("profile", "why"),
    [
        (PROFILE, "KV read is the only cost: the profile has no times."),
        (TIMED | {"times_are_of_this_machine": False}, "the profile's times are of another machine"),
    ],
    ids=["none", "of another machine"],
)
async def test_without_times_of_this_machine_there_is_no_choice(
    browser: Browser, tmp_path: Path, runtime: tuple[FakeRuntime, str], profile: dict[str, Any], why: str
) -> None:
    async with frontier_of(profile, browser, tmp_path, runtime) as shown:
        cost = shown.page.get_by_role("combobox", name="Cost")
        await expect(cost).to_be_disabled()
        await expect(cost).to_have_value("read")
        await expect(cost).to_have_accessible_description(re.compile(re.escape(why)))
        panel = shown.page.locator("#panel-frontier")
        await expect(panel).to_contain_text(why)
        await expect(panel.get_by_role("columnheader", name="Attention time")).to_have_count(0)
        assert await serious_faults(shown.page) == []


async def test_an_axis_of_times_has_some_labels_and_not_too_many_for_a_phone(opened: Console) -> None:
    await opened.open()
    found = await opened.page.evaluate(
        """async () => {
            const { TIME } = await import("/console/js/frontier-axes.js");
            return [[1], [0.98, 1.1], [0.6], [0.3, 1.6], [6.7], [0.05, 12], [0.01, 70]].map((ratios) => {
                const range = TIME.range(ratios);
                return { range, labels: TIME.labelled(range) };
            });
        }"""
    )
    for each in found:
        low, high = each["range"]
        places = [230 * math.log(label / low) / math.log(high / low) for label in each["labels"]]
        assert len(places) >= 3
        assert 1 in each["labels"]
        assert all(0 <= place <= 230 for place in places)
        # In CSS pixels, of a plot on a phone.
        assert min(after - before for before, after in itertools.pairwise(places)) > 25


async def left(element: Locator) -> float:
    box = await element.bounding_box()
    assert box is not None
    return box["x"]


async def test_axe_finds_nothing_serious(opened: Console) -> None:
    await opened.open("frontier")
    await expect(opened.page.locator(".scatter canvas")).to_be_visible()
    assert await serious_faults(opened.page) == []
