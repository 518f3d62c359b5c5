"""Documents as packed tokens: rows of running text for training, sentences for haystacks."""

from __future__ import annotations

import io
import lzma
import random
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

END_OF_TEXT = 0
"""``<|endoftext|>``, which stood between documents when the base model was trained."""
_SENTENCE_END = re.compile(r"(?<=[.?!])\s+")
_WHOLE_SHARE = 0.7
"""How often a row is a piece of one document, where any is long enough; otherwise it is several in a row."""


@dataclass(frozen=True)
class PackedText:
    """Documents one after another.

    Attributes:
        tokens: uint16 [tokens of all documents].
        starts: int64 [documents + 1]; document i is ``tokens[starts[i] : starts[i + 1]]``.
        code: bool [documents]; program text, the others are prose.
    """

    tokens: npt.NDArray[np.uint16]
    starts: npt.NDArray[np.int64]
    code: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, documents: list[tuple[npt.NDArray[np.uint16], bool]]) -> PackedText:
        """From each document's tokens and whether it is code."""
        lengths = np.array([0, *(len(tokens) for tokens, _ in documents)], np.int64)
        tokens = np.concatenate([tokens for tokens, _ in documents])
        return cls(tokens, np.cumsum(lengths), np.array([code for _, code in documents], np.bool_))

    def save(self, path: Path) -> None:
        """Write one xz file."""
        buffer = io.BytesIO()
        np.savez(buffer, tokens=self.tokens, starts=self.starts, code=self.code)
        path.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))

    @classmethod
    def load(cls, path: Path) -> PackedText:
        """Read what ``save`` wrote."""
        arrays = np.load(io.BytesIO(lzma.decompress(path.read_bytes())))
        return cls(arrays["tokens"], arrays["starts"], arrays["code"])

    def unpack(self, folder: Path) -> None:
        """Write plain arrays that processes can map instead of each holding a copy."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("tokens", "starts", "code"):
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def mapped(cls, folder: Path) -> PackedText:
        """Map what ``unpack`` wrote."""
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "starts", "code")))

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.starts)

    def document(self, number: int) -> npt.NDArray[np.uint16]:
        """The tokens of one document."""
        return self.tokens[self.starts[number] : self.starts[number + 1]]

    def prose(self) -> PackedText:
        """The documents that are not code."""
        return PackedText.of([(self.document(i), False) for i in np.flatnonzero(~self.code)])

    def row(self, rng: random.Random, length: int) -> npt.NDArray[np.uint16]:
        """``length`` tokens: a piece of one long document, or several documents with ``END_OF_TEXT`` between them.

        Raises:
            ValueError: all documents together are shorter.
        """
        if rng.random() < _WHOLE_SHARE:
            piece = self._piece(rng, np.flatnonzero(self.lengths >= length), length)
            if piece is not None:
                return piece
        if len(self.tokens) < length:
            raise ValueError(f"a row of {length} tokens was asked for, all documents together have {len(self.tokens)}")
        parts: list[npt.NDArray[np.uint16]] = []
        missing = length
        while missing > 0:
            document = self.document(rng.randrange(len(self.code)))[:missing]
            parts.append(document)
            missing -= len(document)
            if missing > 0:
                parts.append(np.array([END_OF_TEXT], np.uint16))
                missing -= 1
        return np.concatenate(parts)

    def sentences(self, rng: random.Random, words: int, tokenizer: Tokenizer) -> list[str]:
        """About ``words`` words of prose in sentences: what needles are hidden in."""
        found: list[str] = []
        missing = words
        prose = np.flatnonzero(~self.code)
        while missing > 0:
            wanted = 2 * missing + 64
            long_enough = prose[self.lengths[prose] >= wanted]
            piece = self._piece(rng, long_enough, wanted)
            if piece is None:
                piece = self.document(int(rng.choice(prose)))
            # The ends of a piece may be parts of characters and of sentences.
            parts = _SENTENCE_END.split(tokenizer.decode(piece.tolist(), skip_special_tokens=False))
            for sentence in parts[1:-1] or parts:
                found.append(" ".join(sentence.split()))
                missing -= sentence.count(" ") + 1
                if missing <= 0:
                    break
        return found

    def _piece(
        self, rng: random.Random, documents: npt.NDArray[np.int64], length: int
    ) -> npt.NDArray[np.uint16] | None:
        """A piece of one of ``documents``, each as likely as it has tokens; None if there are none."""
        if not len(documents):
            return None
        ends = np.cumsum(self.lengths[documents])
        chosen = int(documents[int(np.searchsorted(ends, rng.randrange(int(ends[-1])), side="right"))])
        start = rng.randint(0, int(self.lengths[chosen]) - length)
        return self.document(chosen)[start : start + length]
