"""The console's files: how they are served, and that they are in the package."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from scripts.vendor_console import FILES, LICENCE, VENDOR
from tests.service.conftest import Deployment
from winnow_service.console.files import PAGE, page_files

ROOT = Path(__file__).resolve().parents[2]
PATHS = sorted(path.relative_to(PAGE).as_posix() for path in PAGE.rglob("*") if path.is_file())
OWN = [path for path in PATHS if not path.startswith("vendor/")]
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
MAX_OWN_BYTES = 16 * 1024


async def test_the_page_needs_no_key_and_runs_nothing_but_its_own_files(deployment: Deployment) -> None:
    answer = await deployment.client.get("/console")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert not re.search(r"unsafe|https?:|\*", answer.headers["content-security-policy"])


async def test_files_are_served_with_their_types_and_revalidated(deployment: Deployment) -> None:
    for path in PATHS:
        answer = await deployment.client.get(f"/console/{path}")
        assert (answer.status_code, answer.content) == (200, (PAGE / path).read_bytes()), path
        expected = TYPES.get(PurePosixPath(path).suffix, "")
        assert answer.headers["content-type"].startswith(expected), path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        again = await deployment.client.get(f"/console/{path}", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == answer.headers["etag"]
        other = await deployment.client.get(f"/console/{path}", headers={"if-none-match": '"another"'})
        assert other.status_code == 200


async def test_nothing_else_is_served(deployment: Deployment) -> None:
    for path in (
        "nothing.js",
        "js",
        "%2e%2e/files.py",
        "js/%2e%2e/%2e%2e/files.py",
        "..%2f__init__.py",
        "%2fetc%2fpasswd",
    ):
        answer = await deployment.client.get(f"/console/{path}")
        assert answer.status_code == 404, path
        assert answer.json()["error"]["code"] == "not_found"


async def test_a_slash_leads_to_the_page(deployment: Deployment) -> None:
    answer = await deployment.client.get("/console/", follow_redirects=True)
    assert answer.url.path == "/console"
    assert answer.status_code == 200


async def test_the_page_is_read_only(deployment: Deployment) -> None:
    answer = await deployment.client.post("/console", json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


def test_what_the_page_names_is_there() -> None:
    index = (PAGE / "index.html").read_text()
    named = re.findall(r'(?:src|href)="console/([^"]+)"', index)
    assert len(named) > 5
    assert set(named) <= set(page_files())
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=|//", index.replace("<!doctype html>", ""))


@pytest.mark.parametrize("path", [path for path in OWN if path.endswith(".js")])
def test_modules_import_what_is_there_and_parse_no_html(path: str) -> None:
    text = (PAGE / path).read_text()
    for imported in re.findall(r'from "([^"]+)"', text):
        assert imported.startswith(("./", "../"))
        assert (PAGE / path).parent.joinpath(imported).resolve().is_file(), imported
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|https?://", text
    )


@pytest.mark.parametrize("path", OWN)
def test_own_files_are_small(path: str) -> None:
    assert (PAGE / path).stat().st_size <= MAX_OWN_BYTES


def test_libraries_are_what_was_taken_from_npm() -> None:
    record = json.loads((VENDOR / "vendored.json").read_text())
    assert set(record) == set(FILES)
    for name, facts in record.items():
        assert set(facts["sha256"]) == {*(path.partition("/")[2] for path in FILES[name]), LICENCE}
        assert re.fullmatch(r"\d+\.\d+\.\d+", facts["version"])
        assert facts["integrity"].startswith("sha512-")
        for path, expected in facts["sha256"].items():
            assert hashlib.sha256((VENDOR / name / path).read_bytes()).hexdigest() == expected
    listed = {f"{name}/{path}" for name, facts in record.items() for path in facts["sha256"]} | {"vendored.json"}
    assert {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.is_file()} == listed


def test_a_wheel_has_the_page(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source)
    # The other source roots need only be there.
    for name in ("kernels", "sglang_ext", "evaluation"):
        (source / name).mkdir()
    shutil.copytree(ROOT / "service", source / "service", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "import sys, setuptools.build_meta as build; build.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True, timeout=120
    )
    [wheel] = tmp_path.glob("*.whl")
    prefix = "winnow_service/console/page/"
    packed = {name.removeprefix(prefix) for name in zipfile.ZipFile(wheel).namelist() if name.startswith(prefix)}
    assert packed == set(PATHS)
