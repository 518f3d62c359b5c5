"""What the results were made with: versions and commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict

_DISTRIBUTIONS = ("sglang-winnow", "openai", "httpx", "sglang")


class Commit(BaseModel):
    """The commit of the checkout that ran; ``modified`` if tracked files differed from it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    modified: bool


def installed_versions(*more: str) -> dict[str, str]:
    """Versions of Python and of the distributions that matter, and of ``more``, as far as they are installed here."""
    installed = [name for name in (*_DISTRIBUTIONS, *more) if any(metadata.distributions(name=name))]
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in installed}


def checkout_commit() -> Commit | None:
    """The commit of the checkout that this very file belongs to.

    Outside of a checkout, and without git, the commit that the variable ``WINNOW_COMMIT`` names, or None.
    """
    here = Path(__file__).resolve()
    # A virtual environment may lie in somebody else's checkout: only a tracked file tells the commit.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        named = os.environ.get("WINNOW_COMMIT")
        return Commit(id=named, modified=False) if named else None
    commit = _git(here.parent, "rev-parse", "HEAD")
    if commit is None:
        return None
    return Commit(id=commit, modified=bool(_git(here.parent, "status", "--porcelain", "--untracked-files=no")))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
