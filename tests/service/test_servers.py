"""The tests' own servers."""

from __future__ import annotations

import socket

import pytest

from tests.ports import free_port
from tests.service.fake_runtime import FakeRuntime
from tests.service.servers import serving


async def test_a_port_that_is_taken_fails_one_test_alone() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"nothing listens on port {port}"):
            async with serving(FakeRuntime().app(), port):
                pass
    async with serving(FakeRuntime().app(), port) as address:
        assert address.endswith(str(port))


def test_a_port_is_not_given_out_twice() -> None:
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == len(ports)
