"""What every store promises, on SQLite and on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.service.redis_servers import redis_server
from tests.service.waiting import eventually
from winnow_service.store.documents import KEPT_REVISIONS, Conflict, Document, Expected, Store
from winnow_service.store.mirror import Mirror
from winnow_service.store.open import open_store, parse_store_url
from winnow_service.store.redis_connection import RedisAddress, StoreAddressError

OpenStore = Callable[[], Store]
KINDS = ["sqlite", "redis"]


@pytest_asyncio.fixture(params=KINDS)
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenStore]:
    """Opens the same store again and again, as several processes would."""
    stores: list[Store] = []
    async with AsyncExitStack() as stack:
        url = f"sqlite:///{tmp_path}/new/control.db"
        if request.param == "redis":
            url = (await stack.enter_async_context(redis_server(tmp_path))).url

        def opened() -> Store:
            stores.append(open_store(parse_store_url(url), "test"))
            return stores[-1]

        yield opened
        for store in stores:
            await store.close()


def state(documents: list[Document]) -> dict[str, tuple[int, Any]]:
    return {document.name: (document.revision, document.value) for document in documents}


async def test_documents_survive_and_go_on_counting(opened: OpenStore) -> None:
    first = opened()
    made = await first.write("policies", "a", {"n": 1, "text": "é\n\x00'"}, "absent", "me")
    assert (made.revision, made.value, made.author) == (1, {"n": 1, "text": "é\n\x00'"}, "me")
    changed = await first.write("policies", "a", {"n": 2}, 1, "you")
    deleted = await first.write("policies", "a", None, 2, "you")
    assert (deleted.revision, deleted.value) == (3, None)
    again = await first.write("policies", "a", {"n": 4}, "absent", "me")
    assert made.version < changed.version < deleted.version < again.version
    second = opened()
    assert list((await second.changes(0)).documents) == [again]
    assert await second.revisions("policies", "a") == [again, deleted, changed, made]
    assert await second.revisions("policies", "b") == []
    assert made.written["updated_at"].year > 2000


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], 1),
        ([], "present"),
        ([{}], "absent"),
        ([{}], 2),
        ([{}, {}], 1),
        ([{}, None], 1),
        ([{}, None], 2),
        ([{}, None], "present"),
    ],
)
async def test_a_write_that_expects_another_state_changes_nothing(
    opened: OpenStore, states: list[dict[str, Any] | None], expected: Expected
) -> None:
    store = opened()
    for number, value in enumerate(states):
        await store.write("policies", "a", value, "absent" if number == 0 else "present", "me")
    before = await store.changes(0)
    with pytest.raises(Conflict) as caught:
        await store.write("policies", "a", {"other": 1}, expected, "me")
    assert await store.changes(0) == before
    current = before.documents[0] if states else None
    assert caught.value.current == current
    assert caught.value.headers == ({"etag": current.etag} if current and current.value is not None else {})


async def test_changes_are_those_since_a_version(opened: OpenStore) -> None:
    writer, reader = opened(), opened()
    await writer.write("policies", "a", {"n": 1}, "absent", "me")
    seen = await reader.changes(0)
    assert seen.complete
    await writer.write("keys", "b", {"n": 1}, "absent", "me")
    await writer.write("policies", "a", None, "present", "me")
    later = await reader.changes(seen.version)
    assert not later.complete
    assert state(list(later.documents)) == {"b": (1, {"n": 1}), "a": (2, None)}
    assert (await reader.changes(later.version)).documents == []


async def test_only_the_last_revisions_are_kept(opened: OpenStore) -> None:
    store = opened()
    last = await store.write("policies", "a", {"n": 1}, "absent", "me")
    for number in range(2, KEPT_REVISIONS + 3):
        last = await store.write("policies", "a", {"n": number}, last.revision, "me")
    kept = await store.revisions("policies", "a")
    assert [document.revision for document in kept] == list(range(KEPT_REVISIONS + 2, 2, -1))


async def test_no_update_is_lost(opened: OpenStore) -> None:
    stores = [opened(), opened()]
    await stores[0].write("policies", "sum", {"n": 0}, "absent", "me")

    async def add(store: Store) -> None:
        while True:
            current = (await store.revisions("policies", "sum"))[0]
            assert current.value is not None
            try:
                await store.write("policies", "sum", {"n": current.value["n"] + 1}, current.revision, "me")
            except Conflict:
                continue
            return

    await asyncio.gather(*(add(stores[number % 2]) for number in range(40)))
    [document] = (await stores[0].changes(0)).documents
    assert (document.value, document.revision) == ({"n": 40}, 41)


async def test_a_new_file_may_be_opened_by_several_at_once(tmp_path: Path) -> None:
    for number in range(80):
        url = parse_store_url(f"sqlite:///{tmp_path}/{number}.db")
        stores = [open_store(url, "test") for _ in range(6)]
        for changes in await asyncio.gather(*(store.changes(0) for store in stores)):
            assert changes.documents == []
        await asyncio.gather(*(store.close() for store in stores))


async def test_a_mirror_sees_what_another_process_writes(opened: OpenStore) -> None:
    store = opened()
    mirror = Mirror(opened())
    assert not mirror.loaded
    following = asyncio.create_task(mirror.run())
    try:
        for value in ({"n": 1}, {"n": 2}, None):
            written = await store.write("policies", "a", value, "absent" if value == {"n": 1} else "present", "me")

            async def seen(expected: Document = written) -> bool | None:
                return (mirror.get("policies", "a") == (None if expected.value is None else expected)) or None

            await eventually(seen)
            assert mirror.all("policies") == ([] if value is None else [written])
            assert mirror.has_had("policies")
        assert mirror.health.healthy
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_mirror_looks_several_times_a_second_whether_it_is_told_of_changes_or_not(
    opened: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it sees a change within a second; how long a busy machine takes is not for a test to say."""
    store, waited = opened(), asyncio.Queue[float]()

    async def wait_for_change(timeout_seconds: float) -> None:
        await waited.put(timeout_seconds)

    monkeypatch.setattr(store, "wait_for_change", wait_for_change)
    following = asyncio.create_task(Mirror(store).run())
    try:
        assert max([await waited.get() for _ in range(3)]) <= 0.25
    finally:
        following.cancel()


async def test_a_mirror_sees_its_own_write_at_once_and_keeps_it(opened: OpenStore) -> None:
    mirror = Mirror(opened())
    await mirror.refresh()
    fetching = asyncio.create_task(mirror.refresh())
    for number in range(20):
        written = await mirror.write("policies", f"p{number}", {"n": number}, "absent", "me")
        assert mirror.get("policies", f"p{number}") == written
    await fetching
    await mirror.refresh()
    assert [document.name for document in mirror.all("policies")] == sorted(f"p{number}" for number in range(20))
    with pytest.raises(Conflict):
        await mirror.write("policies", "p0", {"n": 1}, "absent", "me")


operations = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.none() | st.fixed_dictionaries({"n": st.integers(0, 9)}),
        st.sampled_from(["absent", "present"]) | st.integers(1, 4),
    ),
    max_size=12,
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations)
async def test_a_store_behaves_as_a_dictionary_with_revisions(
    opened: OpenStore, asked: list[tuple[str, dict[str, int] | None, Expected]]
) -> None:
    store = opened()
    start = await store.changes(0)
    model = {document.name: (document.revision, document.value) for document in start.documents}
    for name, value, expected in asked:
        revision, current = model.get(name, (0, None))
        fits = {"absent": current is None, "present": current is not None}.get(
            str(expected), current is not None and revision == expected
        )
        if fits:
            model[name] = (revision + 1, value)
            written = await store.write("policies", name, value, expected, "me")
            assert (written.revision, written.value) == model[name]
        else:
            with pytest.raises(Conflict):
                await store.write("policies", name, value, expected, "me")
    everything = await store.changes(0)
    assert state(list(everything.documents)) == model
    replayed = dict(state(list(start.documents)))
    replayed |= state(list((await store.changes(start.version)).documents))
    assert replayed == model


@pytest.mark.parametrize(
    ("url", "hosts", "service", "options"),
    [
        ("redis://localhost", (("localhost", 6379),), "", {}),
        ("redis://u:p%40%2F@h:1/3", (("h", 1),), "", {"db": 3, "username": "u", "password": "p@/"}),
        ("redis://[::1]:7/0", (("::1", 7),), "", {"db": 0}),
        ("rediss://h?ssl_ca_certs=/ca.pem", (("h", 6379),), "", {"ssl": True, "ssl_ca_certs": "/ca.pem"}),
        (
            "redis+sentinel://:p@a,b:2/main/1",
            (("a", 26379), ("b", 2)),
            "main",
            {"db": 1, "password": "p"},
        ),
        ("rediss+cluster://a:1,b:2", (("a", 1), ("b", 2)), "", {"ssl": True}),
    ],
)
def test_addresses_of_redis(
    url: str, hosts: tuple[tuple[str, int], ...], service: str, options: dict[str, Any]
) -> None:
    address = parse_store_url(url)
    assert isinstance(address, RedisAddress)
    assert (address.hosts, address.service) == (hosts, service)
    assert {name: value for name, value in address.options.items() if name != "db" or value} == {
        name: value for name, value in options.items() if name != "db" or value
    }
    assert "p@/" not in repr(address)
    replaced = parse_store_url(url, "other")
    assert isinstance(replaced, RedisAddress)
    assert replaced.options["password"] == "other"


def test_paths_of_sqlite() -> None:
    assert parse_store_url("sqlite:///a/b%20c.db") == Path("a/b c.db")
    assert parse_store_url("sqlite:////var/x.db") == Path("/var/x.db")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "must begin with sqlite:///"),
        ("sqlite:///", "must begin with sqlite:///"),
        ("http://h", "must begin with sqlite:///"),
        ("redis://", "host is missing"),
        ("redis://a,b", "several hosts need"),
        ("redis://a:99999", "port"),
        ("redis://a:x", "port"),
        ("redis://a/x", "number of a database"),
        ("redis+cluster://a/1", "in a cluster 0"),
        ("redis+sentinel://a", "name that the sentinels know"),
        ("redis://a?hello=1", "unknown option 'hello'"),
        ("redis://:secret@a?ssl_check_hostname=perhaps&x=1", "unknown option 'x'"),
    ],
)
def test_addresses_that_cannot_be_used(url: str, says: str) -> None:
    with pytest.raises(StoreAddressError, match=says) as caught:
        parse_store_url(url)
    assert "secret" not in str(caught.value)
