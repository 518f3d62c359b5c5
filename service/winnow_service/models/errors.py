"""What goes wrong with a model by name."""

from __future__ import annotations


class ModelError(Exception):
    """There is no such model, or it cannot be had; the message is one sentence."""
