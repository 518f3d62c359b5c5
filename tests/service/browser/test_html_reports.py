"""The reports in HTML that commands write, as files in a browser: whole, readable, and nothing in them is obeyed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from tests import profiles
from tests.service.browser.browsing import DESKTOP, PHONE, Watched, page_of, serious_faults, width
from tests.service.test_explain_command import HOSTILE, explained
from winnow_evaluation.calibration.report import write_report
from winnow_service.cli.explain_page import page as explanation_page

pytestmark = pytest.mark.asyncio(loop_scope="module")

NEEDLE = Path(__file__).parents[3] / "models" / "needle"
LENGTHS = (1024, 4096)
CURVES = [
    profiles.curve(
        {"decode": {"policy": "lowbit_top_p", "p": 0.9}}, {1024: (0.004, 0.99, 0.6), 4096: (0.01, 0.98, 0.3)}
    ),
    profiles.curve({"decode": {"policy": "lowbit_top_k", "budget": 512}}, {4096: (0.06, 0.9, 0.2)}),
    profiles.curve({"decode": {"policy": "lowbit_top_k", "budget": 2048}}, {4096: (0.008, 0.98, 0.55)}),
    profiles.curve({"prefill": {"policy": "quoka"}}, {4096: (0.02, 0.95, 0.3)}),
]


@contextlib.asynccontextmanager
async def read(browser: Browser, file: Path, size: tuple[int, int] = DESKTOP) -> AsyncIterator[Page]:
    """A report that was opened from a disk. It asks for nothing else."""
    async with page_of(browser, size=size) as page:
        watched = Watched(page)
        await page.goto(file.as_uri())
        yield page
        assert watched.faults == []
        assert watched.asked == [file.as_uri()]


@pytest.fixture
def explanation(tmp_path: Path) -> Path:
    file = tmp_path / "explanation.html"
    written = explained(f"\N{ROCKET}{HOSTILE}", tokens=4)
    # A second policy with what the first has, and of a name that is markup.
    written["policies"].append(written["policies"][0] | {"policy": HOSTILE})
    file.write_text(explanation_page(written), encoding="utf-8")
    return file


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    """The report on a profile with a model's name and a source that are markup."""
    profile = profiles.profile(NEEDLE, LENGTHS, CURVES)
    model = profile.model.model_copy(update={"name": HOSTILE})
    data = profile.data.model_copy(update={"source": HOSTILE})
    write_report(profile.model_copy(update={"model": model, "data": data}), tmp_path / "profile.html")
    return tmp_path / "profile.html"


async def test_an_explanation_draws_the_tokens_of_what_is_chosen(browser: Browser, explanation: Path) -> None:
    async with read(browser, explanation) as page:
        policies = page.locator("#policies > section")
        await expect(policies).to_have_count(2)
        first = policies.first
        first_token = first.locator(".strip .read")
        await expect(first_token).to_have_count(1)
        await expect(first.locator(".strip .missed")).to_have_count(4)
        shown = await first.locator(".strip").text_content()
        assert shown == f"\N{ROCKET}{HOSTILE}four"
        await expect(first).to_contain_text("Not explained: step 8")
        await expect(page.locator("#shown")).to_contain_text("step 1, layer: mean of all")
        await expect(first_token).to_have_attribute("title", "token 0: weight 0.500000, read by 2 of 2")
        await page.get_by_role("combobox", name="Layer").select_option("5")
        await expect(page.locator("#shown")).to_contain_text("layer: 5")
        await expect(first_token).to_have_attribute("title", "token 0: weight 0.500000, read by 1 of 1")
        assert await page.locator("body :is(img, iframe)").count() == 0
        assert await serious_faults(page) == []


async def test_a_profiles_report_has_a_plot_and_a_table_of_each_length(browser: Browser, calibration: Path) -> None:
    async with read(browser, calibration) as page:
        assert "</script><script>alert(1)" in await page.title()
        await expect(page.get_by_role("heading", level=1)).to_contain_text("<img src=x")
        plots = page.get_by_role("img")
        await expect(plots).to_have_count(len(LENGTHS))
        for length, policies in zip(LENGTHS, (1, 4), strict=True):
            table = page.get_by_role("region", name=f"Policies at {length:,} tokens").get_by_role("table")
            await expect(table.get_by_role("row")).to_have_count(1 + policies)
        await expect(page.get_by_role("row", name="lowbit_top_k budget 2,048")).to_contain_text("0.0080 [to 0.0080]")
        # The plot is drawn, and has its labels.
        box = await plots.last.bounding_box()
        assert box is not None
        assert min(box["width"], box["height"]) > 300
        await expect(plots.last).to_contain_text("KV cache and index read")
        assert await page.locator("body > :is(img, script, iframe)").count() == 0
        assert await serious_faults(page) == []


@pytest.mark.parametrize("report", ["explanation", "calibration"])
async def test_a_phone_scrolls_in_one_direction(browser: Browser, report: str, request: pytest.FixtureRequest) -> None:
    async with read(browser, request.getfixturevalue(report), size=PHONE) as page:
        assert await width(page) == PHONE[0]
        assert await serious_faults(page) == []
