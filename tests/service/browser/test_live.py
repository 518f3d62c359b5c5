"""The console's live figures of a service."""

from __future__ import annotations

import pytest
from playwright.async_api import Page, expect
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from tests.service.browser.browsing import Console, holds, serious_faults
from tests.service.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
    assert await serious_faults(page) == []
    await set_hidden(page, True)
    await page.wait_for_timeout(500)
    before = scrapes(opened)
    await page.wait_for_timeout(2500)
    assert scrapes(opened) == before
    await set_hidden(page, False)
    await eventually(lambda: holds(scrapes(opened) > before))


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
