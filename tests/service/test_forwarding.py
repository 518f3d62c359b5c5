"""Requests that are answered whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from http.client import HTTPConnection

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.service.conftest import BODY_LIMIT_BYTES, SILENCE_SECONDS, Deployment
from tests.service.waiting import eventually

POST_ROUTES = ["/generate", "/tokenize", "/v1/completions", "/v1/chat/completions", "/v1/tokenize"]
JSON = {"content-type": "application/json"}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def samples(client: httpx.AsyncClient) -> Samples:
    """Every sample that /metrics gives."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


@pytest.mark.parametrize("route", POST_ROUTES)
async def test_bytes_headers_and_query_reach_the_runtime_unchanged(service: Deployment, route: str) -> None:
    body = b'{ "text" : "caf\xc3\xa9",\n "temperature":0.10 }'
    headers = {**JSON, "x-mine": "yes", "x-request-id": "abc-1", "authorization": "Bearer t", "te": "trailers"}
    answer = await service.client.post(route + "?a=1&b=%20", content=body, headers=headers)

    assert answer.status_code == 200
    assert answer.json() == {"path": route, "text": "an answer"}
    [asked] = service.runtime.asked
    assert asked.body == body
    assert (asked.method, asked.path, asked.query) == ("POST", route, "a=1&b=%20")
    assert asked.headers["x-mine"] == "yes"
    assert asked.headers["authorization"] == "Bearer t"
    assert asked.headers["x-request-id"] == "abc-1"
    assert asked.headers["accept-encoding"] == "identity"
    assert "te" not in asked.headers


@pytest.mark.parametrize(
    "path",
    ["/v1/models/../../server_info", "/v1/models/./x", "/v1/models/%2e%2e/%2E%2E/flush_cache", "/v1/models/a%2f..%2fb"],
)
async def test_no_path_leads_out_of_what_is_passed_on(service: Deployment, path: str) -> None:
    url = service.client.base_url

    def ask() -> int:
        connection = HTTPConnection(str(url.host), url.port)
        try:
            # Unlike httpx, it sends the path as it is.
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    assert await asyncio.to_thread(ask) == 404
    assert service.runtime.asked == []


async def test_headers_of_any_encoding_are_passed_on(service: Deployment) -> None:
    headers = {b"content-type": b"application/json", b"x-title": "caf\u00e9".encode()}
    answer = await service.client.post("/generate", content=b"{}", headers=headers)
    assert answer.status_code == 200
    assert service.runtime.asked[0].headers["x-title"].encode("latin-1") == "caf\u00e9".encode()


async def test_headers_that_connection_names_are_dropped(service: Deployment) -> None:
    headers = {**JSON, "connection": "keep-alive, X-Private", "x-private": "1"}
    await service.client.post("/generate", content=b"{}", headers=headers)
    assert "x-private" not in service.runtime.asked[0].headers


async def test_answer_headers_come_back_once(service: Deployment) -> None:
    answer = await service.client.post("/generate", json={}, headers={"x-request-id": "abc-1"})
    assert answer.headers["x-from-runtime"] == "1"
    assert answer.headers["content-type"] == "application/json"
    for name in ("date", "server", "content-length", "x-request-id"):
        assert len(answer.headers.get_list(name)) == 1, name
    assert answer.headers["x-request-id"] == "abc-1"


@pytest.mark.parametrize("unusable", ["", "a b", "x" * 200])
async def test_a_request_without_a_usable_id_gets_one(service: Deployment, unusable: str) -> None:
    answer = await service.client.post("/generate", json={}, headers={"x-request-id": unusable})
    request_id = answer.headers["x-request-id"]
    assert len(request_id) == 32
    assert service.runtime.asked[0].headers["x-request-id"] == request_id


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/needle", "/v1/models/org/name%20x"])
async def test_models_are_the_runtimes(service: Deployment, path: str) -> None:
    answer = await service.client.get(path)
    assert answer.status_code == 200
    assert service.runtime.asked[0].path == path


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500])
async def test_the_runtimes_errors_are_passed_on(service: Deployment, status: int) -> None:
    for stream in (False, True):
        answer = await service.client.post("/generate", json={"fake": {"status": status}, "stream": stream})
        assert answer.status_code == status
        assert answer.json() == {"error": {"message": "no"}}


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (b"", "invalid_json", "line 1 column 0"),
        (b'{"a": 1,\n "b": }', "invalid_json", "line 2 column 7"),
        (b'{"a": NaN}', "invalid_json", "line 1 column 7"),
        (b"{} {}", "invalid_json", "line 1 column 4"),
        (b"[" * 100_000, "invalid_json", "recursion limit"),
        (b'{"a": "\xff"}', "invalid_json", "line 1 column"),
        (b"[1]", "not_an_object", "not an array"),
        (b'"text"', "not_an_object", "not a string"),
        (b"null", "not_an_object", "not null"),
        (b"true", "not_an_object", "not a boolean"),
        (b"1.5", "not_an_object", "not a number"),
    ],
)
@pytest.mark.parametrize("route", POST_ROUTES)
async def test_a_body_that_is_no_json_object_is_refused(
    service: Deployment, route: str, body: bytes, code: str, says: str
) -> None:
    answer = await service.client.post(route, content=body, headers=JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert says in error["message"]
    assert service.runtime.asked == []


async def test_a_megabyte_of_garbage_is_refused(service: Deployment) -> None:
    garbage = bytes(range(256)) * 4096
    answer = await service.client.post("/v1/chat/completions", content=garbage, headers=JSON)
    assert answer.status_code == 400
    assert "line 1 column 1" in answer.json()["error"]["message"]
    assert (await service.client.post("/generate", json={})).status_code == 200


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_refused(service: Deployment, declared: bool) -> None:
    def chunks() -> list[bytes]:
        return [b" " * 65536] * (BODY_LIMIT_BYTES // 65536 + 1)

    async def undeclared() -> AsyncIterator[bytes]:
        for chunk in chunks():
            yield chunk

    content = b"".join(chunks()) if declared else undeclared()
    answer = await service.client.post("/generate", content=content, headers=JSON)
    assert answer.status_code == 413
    assert str(BODY_LIMIT_BYTES) in answer.json()["error"]["message"]
    assert service.runtime.asked == []


async def test_a_body_at_the_limit_is_served(service: Deployment) -> None:
    body = b'{"text": "' + b"x" * (BODY_LIMIT_BYTES - 12) + b'"}'
    assert len(body) == BODY_LIMIT_BYTES
    assert (await service.client.post("/generate", content=body, headers=JSON)).status_code == 200


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("PUT", "/generate", 405)])
async def test_unknown_routes_and_methods_have_the_one_shape(
    service: Deployment, method: str, path: str, status: int
) -> None:
    answer = await service.client.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_runtime_that_is_away_is_503(deployment: Deployment, stream: bool) -> None:
    answer = await deployment.client.post("/generate", json={"stream": stream})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error"]["code"] == "runtime_unavailable"
    assert (await samples(deployment.client))[key("winnow_runtime_errors_total", kind="runtime_unavailable")] == 1


async def test_a_silent_runtime_is_504(service: Deployment) -> None:
    answer = await service.client.post("/v1/completions", json={"stream": True, "fake": {"hang": True}})
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert error["code"] == "first_token_timeout"
    assert f"{SILENCE_SECONDS:g} seconds" in error["message"]
    await asyncio.wait_for(service.runtime.aborted.wait(), 5)
    assert (await samples(service.client))[key("winnow_runtime_errors_total", kind="first_token_timeout")] == 1


async def test_a_runtime_that_dies_in_an_answer_is_502(service: Deployment) -> None:
    answer = await service.client.post("/generate", json={"fake": {"die": True}})
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "runtime_died"


@pytest.mark.parametrize("route", POST_ROUTES)
async def test_a_client_that_leaves_aborts_its_request(service: Deployment, route: str) -> None:
    waiting = asyncio.create_task(service.client.post(route, json={"fake": {"hang": True}}))
    await asyncio.wait_for(service.runtime.answering.wait(), 5)
    waiting.cancel()
    await asyncio.wait_for(service.runtime.aborted.wait(), 0.8 * SILENCE_SECONDS)
    assert (await samples(service.client))[key("winnow_client_disconnects_total", route=route)] == 1


async def test_two_hundred_requests_are_in_the_runtime_together(service: Deployment) -> None:
    body = {"fake": {"together": 200}}
    answers = await asyncio.gather(*(service.client.post("/generate", json=body) for _ in range(200)))
    assert [answer.status_code for answer in answers] == [200] * 200
    assert service.runtime.most_concurrent == 200


async def test_readiness_follows_the_runtime(deployment: Deployment) -> None:
    async def readiness(wanted: int) -> dict[str, object]:
        async def look() -> dict[str, object] | None:
            answer = await deployment.client.get("/readyz")
            return answer.json() if answer.status_code == wanted else None

        return await eventually(look)

    async def ready_by_metrics() -> list[float]:
        return [
            value for (name, _), value in (await samples(deployment.client)).items() if name == "winnow_runtime_ready"
        ]

    assert "cannot be reached" in str((await readiness(503))["reason"])
    for _ in range(2):
        await deployment.start_runtime()
        assert (await readiness(200))["ready"] is True
        assert await ready_by_metrics() == [1]
        assert (await deployment.client.post("/generate", json={})).status_code == 200
        deployment.runtime.healthy = False
        assert "status 503" in str((await readiness(503))["reason"])
        deployment.runtime.healthy = True
        await readiness(200)
        await deployment.stop_runtime()
        assert "cannot be reached" in str((await readiness(503))["reason"])
        assert await ready_by_metrics() == [0]
        assert (await deployment.client.get("/healthz")).status_code == 200


async def test_metrics_count_by_route_template_method_and_status_class(service: Deployment) -> None:
    client = service.client
    await client.post("/generate", json={})
    await client.post("/generate", json={"fake": {"status": 404}})
    await client.get("/v1/models/one")
    await client.get("/v1/models/two")
    await client.get("/no/such/path")
    await client.request("BREW", "/generate")
    found = await samples(client)

    def requests(route: str, method: str, status: str) -> float | None:
        return found.get(key("winnow_http_requests_total", route=route, method=method, status=status))

    assert requests("/generate", "POST", "2xx") == 1
    assert requests("/generate", "POST", "4xx") == 1
    assert requests("/v1/models/{model:path}", "GET", "2xx") == 2
    assert requests("unmatched", "GET", "4xx") == 1
    assert found[key("winnow_http_request_duration_seconds_count", route="/generate", method="POST")] == 2
    assert found[key("winnow_http_time_to_first_byte_seconds_count", route="/generate", method="POST")] == 2
    assert found[key("winnow_http_requests_in_flight")] == 1
    assert all(name.startswith("winnow_") for name, _ in found)
    assert {dict(labels).get("method") for _, labels in found} <= {None, "GET", "POST", "other"}
    assert any(name == "winnow_build_info" and dict(labels)["version"] for name, labels in found)
