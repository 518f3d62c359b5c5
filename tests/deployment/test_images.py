from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.deployment.dockerfiles import DOCKERFILES, copied_from_repository, stage, stages
from tests.deployment.repository import ROOT, has_pinned_tag
from tests.ports import free_port

HADOLINT = Path(sys.executable).parent / "hadolint"
HEALTHCHECK = ROOT / "docker/healthcheck.py"


def hadolint(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HADOLINT, "--no-color", "--config", ROOT / ".hadolint.yaml", *arguments],
        input=text,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_hadolint_has_nothing_to_say() -> None:
    linted = hadolint(*DOCKERFILES)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_hadolint_is_set_to_object() -> None:
    linted = hadolint("-", text="FROM python\nRUN cd /tmp\n")
    assert linted.returncode == 1
    assert "DL3006" in linted.stdout


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_bases_are_pinned(dockerfile: str) -> None:
    bases = [each.base for each in stages(dockerfile) if each.base != "${VARIANT}"]
    assert bases
    assert all(map(has_pinned_tag, bases)), bases


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_images_run_as_a_number_that_is_not_root(dockerfile: str) -> None:
    # By number: Kubernetes cannot tell of a name that it is not root.
    assert stage(dockerfile, "").values("USER") == ["10001:10001"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_images_are_asked_for_their_health(dockerfile: str) -> None:
    final = stage(dockerfile, "")
    [port] = final.values("EXPOSE")
    [check] = final.values("HEALTHCHECK")
    assert f'CMD ["healthcheck", "http://127.0.0.1:{port}/health' in check
    assert any("docker/healthcheck.py /usr/local/bin/healthcheck" in copy for copy in final.values("COPY"))
    assert HEALTHCHECK.stat().st_mode & 0o111 == 0o111


@pytest.mark.parametrize("dockerfile", DOCKERFILES)
def test_the_build_context_has_what_is_copied(dockerfile: str) -> None:
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in allowed
    for source in copied_from_repository(dockerfile):
        assert f"!{source}" in allowed
        assert (ROOT / source).exists()


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/healthz"
        finally:
            server.shutdown()
            thread.join()


def healthcheck(address: str) -> tuple[int, str]:
    checked = subprocess.run(
        [sys.executable, HEALTHCHECK, address], capture_output=True, text=True, timeout=30, check=False
    )
    return checked.returncode, checked.stderr.strip()


def test_healthcheck_passes_a_server_that_is_well() -> None:
    with answering(200) as address:
        assert healthcheck(address) == (0, "")


def test_healthcheck_fails_a_server_that_is_not() -> None:
    with answering(503) as address:
        assert healthcheck(address) == (1, "status 503")


def test_healthcheck_fails_where_nothing_answers() -> None:
    status, message = healthcheck(f"http://127.0.0.1:{free_port()}/healthz")
    assert status == 1
    assert message.startswith("no answer")
