"""The console in Debian's Chromium, in front of a fake runtime."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, BrowserContext, Locator, Page, async_playwright, expect
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tests.ports import free_port
from tests.service.control import ADMIN_KEY, bearer, make_key, replica
from tests.service.fake_runtime import FakeRuntime
from tests.service.runtime_process import runtime_process
from tests.service.servers import serving
from tests.service.test_attention import SERVED
from tests.service.test_profile import PROFILE
from tests.service.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHROMIUM = shutil.which("chromium")
PANELS = ("playground", "explain", "frontier", "live", "policies", "keys")
DESKTOP, PHONE = (1440, 900), (390, 844)
SHOWN_MS = 15_000
HOSTILE = "<img src=x onerror=alert(1)> <b>bold</b> &amp; \"quoted\" 'words' slow."
PROMPT = HOSTILE + " again" * 9
# What a runtime tells that explains, and that has a profile.
TOLD = {"winnow": SERVED | {"explains": True, "kv_heads": 2, "profile": PROFILE}}
POLICY = '{"decode": {"policy": "quest", "budget": 1024}, "audit": 0.1}'

expect.set_options(timeout=SHOWN_MS)


@dataclass
class Console:
    """A page at the console of a service.

    Attributes:
        service: a client of it, without a key.
        faults: what the browser reports: errors of scripts, and what the security policy has kept from happening.
        asked: every address that the page has asked for.
    """

    page: Page
    service: httpx.AsyncClient
    faults: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

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


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser() -> AsyncIterator[Browser]:
    assert CHROMIUM is not None, "Debian's chromium is not installed: make packages"
    # Chromium's own sandbox needs a user that is not root.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        await browser.close()


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
        opened: BrowserContext = await browser.new_context(
            viewport={"width": size[0], "height": size[1]}, **(context or {})
        )
        page = await opened.new_page()
        shown = Console(page, service)
        page.on("pageerror", lambda error: shown.faults.append(str(error)))
        page.on("request", lambda request: shown.asked.append(request.url))
        # Answers that are errors are part of the tests.
        page.on(
            "console",
            lambda message: (
                shown.faults.append(message.text)
                if message.type == "error" and "Failed to load resource" not in message.text
                else None
            ),
        )
        yield shown
        await opened.close()
        assert shown.faults == []
        origin = str(service.base_url)
        assert {address for address in shown.asked if not address.startswith(origin)} == set()


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


async def test_two_policies_stream_side_by_side_and_text_stays_text(
    opened: Console, runtime: tuple[FakeRuntime, str]
) -> None:
    await opened.open()
    fake = runtime[0]
    fake.gates_words = True
    await opened.send(HOSTILE)
    first, second = opened.column("A"), opened.column("B")
    await expect(first.locator(".badge")).to_have_text("waiting")
    await eventually(lambda: _true(len(fake.asked) == 2))
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
    await eventually(lambda: _true(runtime[0].aborted.is_set()))


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
    await page.get_by_label("Layer", exact=True).select_option("7")
    await page.get_by_label("KV head", exact=True).select_option("1")
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
        await expect(shown.page.locator("#panel-explain .problem")).to_contain_text("it must run on a CPU")


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


async def test_live_figures_are_asked_for_as_long_as_the_page_is_visible(opened: Console) -> None:
    page = opened.page
    await opened.open()
    await opened.send("one two three four")
    await expect(opened.column("B").locator(".badge")).to_have_text("done")
    await opened.open("live")
    row = page.get_by_role("row", name="lowbit_top_p decode")
    await expect(row).to_contain_text("13 %")
    await expect(page.locator("#figures")).to_contain_text("KV read56 %")
    await expect(page.locator(".chart canvas").first).to_be_visible()
    assert await page.locator(".chart canvas").count() == 6
    await set_hidden(page, True)
    await page.wait_for_timeout(500)
    before = scrapes(opened)
    await page.wait_for_timeout(2500)
    assert scrapes(opened) == before
    await set_hidden(page, False)
    await eventually(lambda: _true(scrapes(opened) > before))


async def test_metrics_are_read_as_prometheus_reads_them(opened: Console) -> None:
    registry = CollectorRegistry()
    times = Histogram("times", "", ["kind"], buckets=(0.1, 1, 10), registry=registry)
    counted = Counter("counted", "", ["kind"], registry=registry)
    hostile = 'a "quoted" \\ back\nslash}'
    counted.labels(hostile).inc(3)
    for seconds in (0.05, 0.5, 0.5, 20):
        times.labels("one").observe(seconds)
    first = generate_latest(registry).decode()
    counted.labels(hostile).inc(4)
    for seconds in (0.5, 0.5, 0.5, 5):
        times.labels("one").observe(seconds)
    await opened.open()
    found = await opened.page.evaluate(
        """async ([first, second]) => {
            const { Reading, NOTHING } = await import("/console/js/metrics.js");
            const [before, after] = [new Reading(first, 0), new Reading(second, 60)];
            return {
                kinds: after.values("counted_total", "kind"),
                sum: after.sum("counted_total"),
                increase: after.increase(before, "counted_total"),
                restarted: before.increase(after, "counted_total"),
                median: after.quantile(before, "times", 0.5, {kind: "one"}),
                highest: after.quantile(NOTHING, "times", 0.99),
                other: after.quantile(before, "times", 0.5, {kind: "two"}),
                mean: after.ratio(before, "times_sum", "times_count"),
            };
        }""",
        [first, generate_latest(registry).decode()],
    )
    # Of four observations three are between 0.1 and 1; above the last bound there is nothing to interpolate to.
    expected = {"kinds": [hostile], "sum": 7, "increase": 4, "restarted": 3, "highest": 10, "other": None}
    assert {name: found[name] for name in expected} == expected
    assert found["median"] == pytest.approx(0.1 + 0.9 * 2 / 3)
    assert found["mean"] == pytest.approx(6.5 / 4)


async def test_axe_finds_nothing_serious_in_either_theme(opened: Console) -> None:
    page = opened.page
    await opened.open()
    await opened.type_policy("B", '{"decode": {"policy": "quest", "budget": 1}}')
    await page.get_by_role("button", name="Add a column").click()
    await opened.send("one two three")
    await expect(opened.column("B").locator(".problem")).to_be_visible()
    await expect(opened.column("C").locator("ins")).to_be_visible()
    assert await serious_faults(page) == []
    await opened.open("live")
    await expect(page.get_by_role("row", name="lowbit_top_k decode")).to_be_visible()
    assert await serious_faults(page) == []
    await opened.open("explain")
    await page.get_by_label("Layers", exact=True).fill("none")
    await page.get_by_role("button", name="Explain", exact=True).click()
    await expect(page.locator("#panel-explain [aria-invalid]")).to_be_visible()
    assert await serious_faults(page) == []
    await page.get_by_label("Layers", exact=True).fill("")
    await page.get_by_role("button", name="Explain", exact=True).click()
    await expect(page.locator(".strip")).to_have_count(2)
    assert await serious_faults(page) == []
    await opened.open("frontier")
    await expect(page.locator(".scatter canvas")).to_be_visible()
    assert await serious_faults(page) == []
    for panel, button in (("policies", "New policy"), ("keys", "New key")):
        await opened.open(panel)
        await page.get_by_role("button", name=button).click()
        await page.get_by_role("button", name="Save").click()
        await expect(page.locator(f"#panel-{panel} [aria-invalid]")).to_be_visible()
        assert await serious_faults(page) == []


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


def explained(prompt: str) -> dict[str, Any]:
    """An explanation of what one head of each layer reads of a prompt, whose tokens are its words: the first two."""
    ends = [index for index, letter in enumerate(prompt) if letter == " "] + [len(prompt)]
    offsets = list(zip([0, *ends], ends, strict=False))
    rest = len(offsets) - 1
    weights = [0.6875, 0.1975, *[round(0.115 / rest, 6)] * rest]
    entry = {"step": 1, "dense": False, "attended_tokens": 2, "share": 0.75, "weights": weights}
    read: dict[int, list[list[int]]] = {0: [[0, 2]], 1: [[1, 2]]}
    entries = [
        entry | {"layer": layer, "head": head, "attended": read[head]} for layer in (0, 4, 7, 11) for head in (0, 1)
    ]
    attention = {
        "decode": {"policy": "quest", "steps": 1},
        "explain": {
            "decode_steps": 1,
            "missing_steps": [8],
            "entries": entries,
            "prompt": {"text": prompt, "offsets": offsets},
            "output": {"text": " yes", "offsets": [[0, 4]]},
        },
    }
    return {"text": " yes", "meta_info": {"attention": attention}, "attention": attention}


async def serious_faults(page: Page) -> list[str]:
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


async def stored(page: Page) -> list[str]:
    values: list[str] = await page.evaluate("Object.values(sessionStorage)")
    return values


async def set_hidden(page: Page, hidden: bool) -> None:
    await page.evaluate(
        """hidden => {
            Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def scrapes(shown: Console) -> int:
    return sum(address.endswith("/metrics") for address in shown.asked)


async def _true(found: bool) -> bool | None:
    return found or None
