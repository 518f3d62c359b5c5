"""The Δ-layers that were calibrated for a model: where profiles lie, and which of them is a model's own.

A profile that ``winnow calibrate delta`` wrote lies in the model's folder and names the configuration that it was
measured on. Those that ship with this package are the DELTA paper's, and those of the models that ``winnow models``
gets; they have no configuration's hash and belong to the models of their name that have as many layers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

PROFILE_FILE: Final = "delta_profile.json"
_CONFIG_FILE: Final = "config.json"
_SHIPPED: Final = "delta_profile_data"
# What tools write into a configuration without the model's becoming another.
_IRRELEVANT: Final = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})


class DeltaProfile(BaseModel):
    """The Δ-layers of one model, and how they were found.

    Attributes:
        model: its name.
        layers: how many it has.
        config_sha256: hash of its configuration; None in profiles that go by the name.
        delta_layers: numbers of the Δ-layers, ascending.
        full_layers: how many of the first layers were taken as dense.
        source: where the numbers come from.
        samples: prompts that were decoded; None if the source does not say.
        words: their length in English words.
        steps: decode steps observed.
        coverage: the share of each layer's token scores on the pages selected for it; 1 where it attends to all,
            None where it has a sliding window.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    layers: int = Field(ge=1)
    config_sha256: str | None = None
    delta_layers: tuple[int, ...] = Field(min_length=1)
    full_layers: int = Field(ge=0)
    source: str
    samples: int | None = None
    words: int | None = None
    steps: int | None = None
    coverage: tuple[float | None, ...] | None = None


def delta_profile(model_path: Path) -> tuple[int, ...] | None:
    """Return the Δ-layers calibrated for a model; None if there are none, or ``model_path`` is no folder of a model.

    Args:
        model_path: the model's folder, with its ``config.json``.

    Raises:
        ValueError: a profile in the folder cannot be read, or belongs to another model.
    """
    config_file = model_path / _CONFIG_FILE
    if not config_file.is_file():
        return None
    config = json.loads(config_file.read_text())
    own = model_path / PROFILE_FILE
    if own.is_file():
        return _own_profile(own, config).delta_layers
    names = _names(model_path, config)
    layers = layer_count(config)
    for profile in shipped_profiles():
        if profile.model.lower() in names and profile.layers == layers:
            return profile.delta_layers
    return None


def shipped_profiles() -> Iterator[DeltaProfile]:
    """Yield the profiles that ship with this package."""
    for entry in sorted(files("sglang_winnow").joinpath(_SHIPPED).iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            yield DeltaProfile.model_validate_json(entry.read_text())


def config_hash(config: dict[str, Any]) -> str:
    """Return the SHA-256 of a configuration, in hexadecimal; neither the keys' order nor what tools add counts."""
    relevant = {key: value for key, value in config.items() if key not in _IRRELEVANT}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def layer_count(config: dict[str, Any]) -> int | None:
    """Return how many layers a configuration names; None if it does not say."""
    count = config.get("num_hidden_layers", config.get("text_config", {}).get("num_hidden_layers"))
    return count if isinstance(count, int) else None


def _own_profile(path: Path, config: dict[str, Any]) -> DeltaProfile:
    try:
        profile = DeltaProfile.model_validate_json(path.read_text())
    except ValidationError as error:
        raise ValueError(f"{path} is not a profile: {error}") from error
    if profile.config_sha256 != config_hash(config):
        raise ValueError(
            f"{path} was calibrated on another configuration ({profile.model}): run `winnow calibrate delta` again"
        )
    return profile


def _names(model_path: Path, config: dict[str, Any]) -> set[str]:
    """Return what the model may be called: the folders it lies in, and its name in its configuration, in lower case.

    A folder of the Hugging Face cache, ``models--owner--name``, gives ``name``.
    """
    named = Path(str(config.get("_name_or_path", "")))
    return {part.split("--")[-1].lower() for part in (*model_path.absolute().parts, *named.parts)}
