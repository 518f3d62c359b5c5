"""What SGLang's endpoints are given of requests that have ``attention`` at the top."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st

from sglang_winnow.attention_field import FORMS, NATIVE, AttentionField, placed_policies
from winnow_kernels.contract.fields import PolicyError

POLICY: Final = {"decode": {"policy": "snapkv", "budget": 1024}}
TEXT: Final = json.dumps(POLICY, separators=(",", ":"))
OTHERS: Final = sorted(FORMS - {NATIVE})


def placed(body: Any, *, is_native: bool = False) -> Any:
    return json.loads(placed_policies(json.dumps(body).encode(), is_native=is_native))


def test_the_field_goes_where_sglang_carries_it() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "custom_params": {"a": 1}}
    assert placed(body | {"attention": POLICY}) == body | {"custom_params": {"a": 1, "attention": TEXT}}
    native = {"text": "a", "attention": POLICY}
    assert placed(native, is_native=True) == {"text": "a", "sampling_params": {"custom_params": {"attention": TEXT}}}


def test_each_prompt_of_a_batch_can_have_its_own() -> None:
    body = {"text": ["a", "b"], "attention": [POLICY, {}], "sampling_params": {"temperature": 0}}
    parameters = placed(body, is_native=True)["sampling_params"]
    assert parameters == [
        {"temperature": 0, "custom_params": {"attention": TEXT}},
        {"temperature": 0, "custom_params": {"attention": "{}"}},
    ]
    both = body | {"attention": POLICY, "sampling_params": [{}, {"top_p": 0.5}]}
    assert [each["custom_params"]["attention"] for each in placed(both, is_native=True)["sampling_params"]] == [
        TEXT
    ] * 2


def test_a_name_stays_a_name() -> None:
    """It is refused as one where it is read."""
    assert placed({"attention": "balanced"})["custom_params"] == {"attention": "balanced"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'["attention"]',
        b'{"prompt": "a"}',
        b'{"attention": null}',
        b'{"custom_params": {"attention": "{}"}}',
        rb'{"prompt": "say \"attention\""}',
    ],
)
def test_other_bodies_are_left_as_they_are(content: bytes) -> None:
    for is_native in (False, True):
        assert placed_policies(content, is_native=is_native) is content


@given(
    st.dictionaries(
        st.text(max_size=8).filter(lambda name: name not in ("attention", "custom_params")),
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
        max_size=5,
    )
)
def test_nothing_else_changes(others: dict[str, Any]) -> None:
    assert placed(others | {"attention": POLICY}) == others | {"custom_params": {"attention": TEXT}}


@pytest.mark.parametrize(
    ("body", "is_native", "message"),
    [
        (
            {"attention": POLICY, "custom_params": {"attention": "{}"}},
            False,
            "attention: give this or custom_params.attention, not both",
        ),
        (
            {"attention": POLICY, "sampling_params": {"custom_params": {"attention": "{}"}}},
            True,
            "attention: give this or sampling_params.custom_params.attention, not both",
        ),
        ({"attention": POLICY, "custom_params": "a"}, False, "custom_params: must be an object"),
        ({"attention": [POLICY], "sampling_params": [{}, {}]}, True, "sampling_params: 2 values for 1 prompts"),
    ],
)
def test_what_cannot_be_placed_is_refused(body: Any, is_native: bool, message: str) -> None:
    with pytest.raises(PolicyError, match=f"^{message.replace('.', '[.]')}$"):
        placed(body, is_native=is_native)


def asked(path: str, content: bytes) -> httpx.Response:
    """Return what an application behind the middleware answers: the body and the length that it was given."""
    app = FastAPI()

    @app.post("/{path:path}")
    async def answer(request: Request) -> Any:
        body = await request.body()
        return {"body": body.decode(), "length": request.headers["content-length"], "actual": len(body)}

    app.add_middleware(AttentionField)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.post(path, content=content)

    return asyncio.run(ask())


@pytest.mark.parametrize("path", [NATIVE, *OTHERS])
def test_an_endpoint_gets_the_body_that_was_made(path: str) -> None:
    content = json.dumps({"prompt": "a", "attention": POLICY}).encode()
    told = asked(path, content).json()
    assert told["body"].encode() == placed_policies(content, is_native=path == NATIVE)
    assert int(told["length"]) == told["actual"] != len(content)


@pytest.mark.parametrize(("path", "content"), [("/v1/embeddings", b'{"attention": 1}'), (NATIVE, b'{"text": "a"}')])
def test_other_requests_pass(path: str, content: bytes) -> None:
    assert asked(path, content).json()["body"].encode() == content


@pytest.mark.parametrize("path", [NATIVE, *OTHERS])
def test_a_refusal_says_why_in_every_form(path: str) -> None:
    where = (
        {"sampling_params": {"custom_params": {"attention": "{}"}}}
        if path == NATIVE
        else {"custom_params": {"attention": "{}"}}
    )
    answer = asked(path, json.dumps(where | {"attention": POLICY}).encode())
    assert answer.status_code == 400
    told = answer.json()
    assert told["error"]["message"] == told["message"]
    assert told["message"].startswith("attention: give this or ")
