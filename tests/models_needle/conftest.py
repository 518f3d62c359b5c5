"""The model that ships, its tokenizer, and a network that nothing compiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer


@pytest.fixture(scope="session")
def folder() -> Path:
    """The folder of the model that ships."""
    return Path(__file__).resolve().parents[2] / "models" / "needle"


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that ships."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
def eager() -> Iterator[None]:
    """Run compiled functions as they are written, for compiling takes minutes on a CPU, and on one thread: several gain
    nothing on tensors this small, and wait for each other on a busy machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.compiler.set_stance("force_eager"):
        yield
    torch.set_num_threads(threads)
