"""The user's own prompts: a file with a text or a request in each line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from winnow_evaluation.offline_model import OfflineModel


def read_texts(path: Path, model: OfflineModel) -> list[str]:
    """Return what the lines of a JSONL file say, as the model reads it.

    A line is a text in quotes, or an object with ``text`` or ``prompt`` (a text) or ``messages`` (those of a chat
    request, which get the model's chat template). Its other fields are not looked at, so that logged requests will do.

    Raises:
        ValueError: a line is something else, or there are none; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8") from error
    texts = [_text_of(line, f"{path}, line {number}", model) for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise ValueError(f"{path} has no lines")
    return texts


def _text_of(line: str, where: str, model: OfflineModel) -> str:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON") from error
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        for name in ("text", "prompt"):
            if isinstance(text := value.get(name), str):
                return text
        if isinstance(messages := value.get("messages"), list):
            try:
                return model.conversation(messages)
            except (ValueError, TypeError, TemplateError) as error:
                raise ValueError(f"{where}: messages: the model's chat template does not take them") from error
    raise ValueError(f"{where}: must be a text, or an object with text, prompt or messages")
