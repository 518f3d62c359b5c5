"""Running text in which something can be hidden."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable

from winnow_evaluation.text.documents import Document

_SENTENCE_END = re.compile(r"(?<=[.?!])\s+")


class TextHaystack:
    """Sentences of documents from a random place on; the first follow the last, however many are asked for."""

    def __init__(self, documents: Iterable[Document]) -> None:
        """Raises ValueError if the documents have no words."""
        self._sentences = [
            " ".join(sentence.split())
            for document in documents
            for sentence in _SENTENCE_END.split(document.text)
            if sentence.strip()
        ]
        if not self._sentences:
            raise ValueError("documents: none has a word")

    def __call__(self, rng: random.Random, words: int) -> list[str]:
        """Return text of ``words`` words, sentence by sentence; the last may be cut."""
        chosen = []
        for place in itertools.count(rng.randrange(len(self._sentences))):
            split = self._sentences[place % len(self._sentences)].split(" ", words)
            chosen.append(" ".join(split[:words]))
            words -= min(len(split), words)
            if words == 0:
                break
        return chosen
