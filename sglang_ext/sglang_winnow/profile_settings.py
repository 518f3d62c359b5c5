"""The settings of a server that chooses policies: its profile, the quality of requests that name none, and load."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

from sglang_winnow.quality_profile import Profile
from winnow_kernels.policies.quality import MAX_KL

PROFILE: Final = "WINNOW_PROFILE"
QUALITY: Final = "WINNOW_QUALITY_KL"
UNDER_LOAD: Final = "WINNOW_QUALITY_UNDER_LOAD_KL"
LOAD: Final = "WINNOW_LOAD_REQUESTS"
# Of the presets, balanced stays below it at 32K of prose, and fast is just above.
DEFAULT_KL: Final = 0.02


@cache
def profile() -> Profile | None:
    """Return the profile that the environment names; None if it names none.

    Raises:
        ValueError: it cannot be read.
    """
    path = os.environ.get(PROFILE)
    if not path:
        return None
    try:
        return Profile.read(Path(path))
    except ValueError as error:
        raise ValueError(f"{PROFILE}: {error}") from error


def served_profile(folder: Path, key_bits: int) -> Profile | None:
    """Return the server's profile; None if it has none.

    Args:
        folder: the served model's.
        key_bits: bits of a channel in the codes of keys.

    Raises:
        ValueError: it cannot be read, or is of another model.
    """
    found = profile()
    if found is not None:
        try:
            found.check_model(folder, key_bits)
        except ValueError as error:
            raise ValueError(f"{PROFILE}: {error}") from error
    return found


@cache
def default_kl() -> float:
    """Return the bound on KL, in nats, of requests that leave the quality to the server.

    Raises:
        ValueError: the environment sets what is no such bound.
    """
    return _kl(QUALITY, os.environ.get(QUALITY, str(DEFAULT_KL)))


@cache
def under_load_kl() -> float | None:
    """Return the same bound while the server is under load; None if it stays what it is.

    Raises:
        ValueError: the environment sets what is no such bound, or one that is never used.
    """
    text = os.environ.get(UNDER_LOAD)
    if text is None:
        return None
    bound = _kl(UNDER_LOAD, text)
    if bound < default_kl():
        raise ValueError(
            f"{UNDER_LOAD}: must be at least {default_kl():g}, the KL without load ({QUALITY}); it is {text}"
        )
    if load_requests() is None:
        raise ValueError(f"{UNDER_LOAD}: needs {LOAD}, the number of requests from which on the server is under load")
    return bound


@cache
def load_requests() -> int | None:
    """Return from how many other requests on, running or waiting, the server is under load; None if it never is.

    Raises:
        ValueError: the environment sets what is no such number.
    """
    text = os.environ.get(LOAD)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise ValueError(f"{LOAD}: must be a number of requests from 1 on; it is {text}")
    return int(text)


def _kl(name: str, text: str) -> float:
    try:
        bound = float(text)
    except ValueError:
        bound = 0.0
    if not 0 < bound <= MAX_KL:
        raise ValueError(f"{name}: must be a KL in nats, more than 0 and at most {MAX_KL:g}; it is {text}")
    return bound
