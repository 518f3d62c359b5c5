"""The folder in which fetched models lie: each appears there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationError

ENVIRONMENT: Final = "WINNOW_CACHE_DIR"
RECORD_FILE: Final = "winnow.json"
"""In each folder: what it was made from."""
_PARTIAL = ".partial-"


class Record(BaseModel):
    """What a folder was made from: another fingerprint means that it is to be made again."""

    fingerprint: str


def models_folder() -> Path:
    """Where models lie: below ``WINNOW_CACHE_DIR``, or below ``winnow`` in the user's cache folder."""
    if own := os.environ.get(ENVIRONMENT):
        return Path(own).absolute() / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "winnow" / "models"


def is_there(name: str, fingerprint: str) -> bool:
    """Whether the folder called ``name`` was made from what ``fingerprint`` stands for."""
    try:
        record = Record.model_validate_json((models_folder() / name / RECORD_FILE).read_text())
    except (OSError, ValidationError):
        return False
    return record.fingerprint == fingerprint


@contextmanager
def locked(name: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock on the model ``name``; ``on_wait`` is called if another process has it.

    The kernel drops the lock however its holder ends.
    """
    folder = models_folder()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def partial_folder(name: str) -> Iterator[Path]:
    """A folder beside the models, which is gone afterwards; so is what a killed process left of the model ``name``.

    Hold the lock on ``name``.
    """
    folder = models_folder()
    for left in folder.glob(f"{_PARTIAL}{name}=*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{_PARTIAL}{name}=", dir=folder, ignore_cleanup_errors=True) as partial:
        yield Path(partial)


def put(made: Path, name: str, fingerprint: str) -> Path:
    """Move the whole folder ``made``, which a ``partial_folder`` holds, to its place; return that."""
    (made / RECORD_FILE).write_text(Record(fingerprint=fingerprint).model_dump_json() + "\n")
    for file in made.iterdir():
        # safetensors writes files that only their owner reads, and this folder may be for several users.
        file.chmod(0o644)
        _write_to_disk(file)
    place = models_folder() / name
    if place.exists():
        # Whoever reads the old one keeps the files that it has open.
        place.rename(made.with_name("replaced"))
    made.rename(place)
    return place


def _write_to_disk(file: Path) -> None:
    # A rename may outlive a power failure that the files do not.
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
