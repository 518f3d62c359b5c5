"""The console's playground: answers of several policies side by side."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from tests.service.browser.browsing import POLICY, Console, console, holds, serious_faults
from tests.service.browser.explanations import HOSTILE
from tests.service.fake_runtime import FakeRuntime
from tests.service.runtime_process import runtime_process
from tests.service.test_attention import SERVED
from tests.service.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_two_policies_stream_side_by_side_and_text_stays_text(
    opened: Console, runtime: tuple[FakeRuntime, str]
) -> None:
    await opened.open()
    fake = runtime[0]
    fake.gates_words = True
    await opened.send(HOSTILE)
    first, second = opened.column("A"), opened.column("B")
    await expect(first.locator(".badge")).to_have_text("waiting")
    await eventually(lambda: holds(len(fake.asked) == 2))
    # Both answers have begun by then, in this same event loop, and wait.
    await asyncio.sleep(0.2)
    fake.gate.release()
    fake.gate.release()
    for column in (first, second):
        await expect(column.locator(".badge")).to_have_text("streaming")
        await expect(column.locator(".answer")).to_have_text(HOSTILE.partition(" ")[0], use_inner_text=True)
    for _ in range(100):
        fake.gate.release()
    for column in (first, second):
        await expect(column.locator(".badge")).to_have_text("done")
    await expect(first.locator(".answer")).to_have_text(HOSTILE, use_inner_text=True)
    assert await opened.page.locator(".answer :is(img, b, script)").count() == 0
    await expect(second.locator("ins")).to_have_text("otherwise")
    await expect(second.locator("del")).to_have_text("slow.")
    await expect(first).to_contain_text("KV read100 %")
    await expect(second).to_contain_text("Attended13 %")
    await expect(second).to_contain_text("TPOT")
    await expect(second).to_contain_text("× the first")
    await opened.page.get_by_label("Mark what differs from A").uncheck()
    await expect(second.locator("ins")).to_have_count(0)


async def test_a_refused_policy_is_shown_in_its_column_alone(opened: Console) -> None:
    await opened.open()
    await opened.type_policy("B", '{"decode": {"policy": "quest", "budget": 1}}')
    await opened.page.get_by_role("button", name="Add a column").click()
    await opened.type_policy("C", POLICY)
    await opened.send("one two three")
    await expect(opened.column("B").locator(".problem")).to_contain_text("attention.decode.budget: must be")
    await expect(opened.column("B").locator(".problem")).to_contain_text("status 422 · invalid_policy")
    await expect(opened.column("A").locator(".badge")).to_have_text("done")
    await expect(opened.column("C")).to_contain_text("True share93 %of the attention; p 0.9 reached by 95 %")
    await expect(opened.column("C")).to_contain_text("Next-token KL0.0021nats; top-1 98 %")
    await opened.type_policy("B", '{"decode": ')
    await opened.send("one two three")
    await expect(opened.column("B").locator(".error")).to_contain_text("not valid JSON")
    await expect(opened.column("A").locator(".badge")).to_have_text("done")


async def test_figures_of_verify_and_the_completion_form(opened: Console, runtime: tuple[FakeRuntime, str]) -> None:
    await opened.open()
    await opened.page.get_by_label("Policy of column B", exact=True).select_option("name:lossless")
    await opened.page.get_by_label("Completion").check()
    await opened.page.get_by_label("Max tokens").fill("2")
    await opened.send("one two three")
    await expect(opened.column("B")).to_contain_text("Tokens a check46 of 8 drafted tokens stood")
    await expect(opened.column("A").locator(".answer")).to_have_text("one two")
    assert {request.path for request in runtime[0].asked} >= {"/v1/completions"}


async def test_stop_ends_the_requests(opened: Console, runtime: tuple[FakeRuntime, str]) -> None:
    await opened.open()
    runtime[0].word_seconds = 0.5
    await opened.send("word " * 100)
    await expect(opened.column("A")).to_contain_text("streaming")
    await opened.page.get_by_role("button", name="Stop").click()
    for letter in "AB":
        await expect(opened.column(letter).locator(".badge")).to_have_text("stopped")
        await expect(opened.column(letter).locator(".answer")).to_contain_text("word")
    await eventually(lambda: holds(runtime[0].aborted.is_set()))


async def test_a_killed_runtime_is_told_in_the_columns_and_at_the_top(browser: Browser, tmp_path: Path) -> None:
    async with (
        runtime_process(word_seconds=0.2, server_info={"winnow": SERVED}) as runtime,
        console(browser, tmp_path, runtime.address) as shown,
    ):
        await shown.open()
        await expect(shown.page.locator("#status")).to_contain_text("needle")
        await shown.send("word " * 200)
        for letter in "AB":
            await expect(shown.column(letter)).to_contain_text("streaming")
        await runtime.kill()
        for letter in "AB":
            await expect(shown.column(letter).locator(".problem")).to_contain_text(
                "The runtime ended its answer before it was complete"
            )
            await expect(shown.column(letter).locator(".problem")).to_contain_text("runtime_died")
            await expect(shown.column(letter).locator(".answer")).to_contain_text("word")
        await expect(shown.page.locator("#status")).to_contain_text("not ready")
        await shown.send("again")
        await expect(shown.column("A").locator(".problem")).to_contain_text("runtime_unavailable")


async def test_axe_finds_nothing_serious(opened: Console) -> None:
    await opened.open()
    await opened.type_policy("B", '{"decode": {"policy": "quest", "budget": 1}}')
    await opened.page.get_by_role("button", name="Add a column").click()
    await opened.send("one two three")
    await expect(opened.column("B").locator(".problem")).to_be_visible()
    await expect(opened.column("C").locator("ins")).to_be_visible()
    assert await serious_faults(opened.page) == []
