from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.evaluation.text.made_up_packages import debian_package, offer, pages, wheel
from winnow_evaluation.text import TextError, load_text
from winnow_evaluation.text.collecting import collect, is_fetched
from winnow_evaluation.text.documents import KINDS, SPLITS, Document, collection
from winnow_evaluation.text.packages import listed_packages

CODE = {"made_up.py": b"".join(b"def function_%d() -> None: ...\n" % number for number in range(100))}


def everything(folder: Path) -> list[Document]:
    return [document for kind in KINDS for split in SPLITS for document in load_text(split, kind, folder)]


def test_all_packages_are_collected_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = [debian_package(tmp_path, pages(3)), wheel(tmp_path, CODE)]
    offer(tmp_path, monkeypatch)
    folder = tmp_path / "text"
    assert not is_fetched(packages[0], folder)
    assert list(collect(packages, folder)) == packages
    assert is_fetched(packages[0], folder)
    documents = everything(folder)
    assert [(each.source, each.kind) for each in documents] == [("made-up", "prose"), ("made-up", "code")]
    about = collection(folder)
    assert about["packages"] == ["made-up 1.0", "made-up 1.0"]
    assert sum(row["characters"] for row in about["totals"]) == sum(len(each.text) for each in documents)
    assert sum(row["documents"] for row in about["totals"]) == 2
    assert sum(row["long_documents"] for row in about["totals"]) == 0
    assert not list(folder.rglob("*.deb"))


def test_what_was_fetched_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = debian_package(tmp_path, pages(1)), debian_package(tmp_path, pages(2), name="other")
    missing = replace(second, version="2.0")
    offer(tmp_path, monkeypatch)
    folder = tmp_path / "text"
    with pytest.raises(TextError, match=r"other 2\.0"):
        list(collect([first, missing], folder))
    with pytest.raises(TextError, match="winnow text collect"):
        load_text("train", "prose", folder)
    list(collect([first, second], folder))
    digest = collection(folder)["sha256"]
    list(collect([first, second], folder))
    assert collection(folder)["sha256"] == digest
    asked = (tmp_path / "apt-get.log").read_text().split("\n")
    assert [line.split()[-1] for line in asked if line] == ["made-up=1.0", "other=2.0", "other=1.0"]


def test_documents_of_equal_text_are_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = [debian_package(tmp_path, pages(2)), debian_package(tmp_path, pages(2), name="copy")]
    offer(tmp_path, monkeypatch)
    list(collect(packages, tmp_path / "text"))
    [document] = everything(tmp_path / "text")
    assert document.source == "made-up"


def test_a_package_of_which_nothing_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = replace(debian_package(tmp_path, pages(2)), include=("nowhere/*",))
    offer(tmp_path, monkeypatch)
    with pytest.raises(TextError, match=r"made-up 1\.0: no file"):
        list(collect([package], tmp_path / "text"))


def test_the_list_names_each_package_once_with_a_checksum_and_a_free_licence() -> None:
    packages = listed_packages()
    assert len({(package.registry, package.name) for package in packages}) == len(packages)
    assert {package.kind for package in packages} == set(KINDS)
    for package in packages:
        assert len(bytes.fromhex(package.sha256)) == 32
        assert package.licence
        assert package.licence.startswith(
            ("Apache-", "BSD-", "CC-BY-SA-", "GPL-", "LicenseRef-public-domain", "MIT", "MPL-", "PSF-", "PostgreSQL")
        )
        assert package.reads(package.include[0].replace("*", "name"))


def test_what_is_read_of_a_package_decides_whether_it_is_read_anew() -> None:
    package = listed_packages()[0]
    assert replace(package, licence="MIT").digest == package.digest
    for change in ({"version": "0"}, {"include": ("*",)}, {"sha256": "0" * 64}, {"characters": 1}):
        assert replace(package, **change).digest != package.digest
