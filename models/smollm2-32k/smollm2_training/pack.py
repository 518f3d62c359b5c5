"""Pack the collected text (``winnow text collect``) for training and for the evaluation.

    python -m smollm2_training.pack --base BASE --collected FOLDER --output PACKED

Training takes the split ``train``; ``test.xz`` holds prose of the split ``test`` alone.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from smollm2_training.packed import PackedText
from winnow_evaluation.text.documents import Document, Kind, load_text

_AT_ONCE = 64
_SHORTEST = 200
"""Documents of fewer tokens teach nothing of long text."""


def tokenized(documents: list[Document], tokenizer: Tokenizer, most: int) -> list[tuple[npt.NDArray[np.uint16], bool]]:
    """Documents as tokens with whether each is code, in their order, until there are ``most`` tokens."""
    packed: list[tuple[npt.NDArray[np.uint16], bool]] = []
    total = 0
    for start in range(0, len(documents), _AT_ONCE):
        if total >= most:
            break
        chosen = documents[start : start + _AT_ONCE]
        encoded = tokenizer.encode_batch_fast([document.text for document in chosen], add_special_tokens=False)
        for document, encoding in zip(chosen, encoded, strict=True):
            if len(encoding.ids) >= _SHORTEST and total < most:
                packed.append((np.array(encoding.ids[: most - total], np.uint16), document.kind == "code"))
                total += len(packed[-1][0])
    return packed


def ordered(documents: tuple[Document, ...]) -> list[Document]:
    """Long documents first, the others in a fixed random order."""
    shuffled = sorted(documents, key=lambda document: random.Random(f"{document.source}/{document.name}").random())
    return sorted(shuffled, key=lambda document: not document.long)


def main() -> None:
    """Write ``train.xz`` and ``test.xz``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--collected", type=Path, required=True, help="folder of the collected text")
    parser.add_argument("--output", type=Path, required=True, help="folder of the two files")
    parser.add_argument("--prose", type=int, default=14_000_000, help="tokens at most (default: %(default)s)")
    parser.add_argument("--code", type=int, default=7_000_000, help="tokens at most (default: %(default)s)")
    parser.add_argument("--test", type=int, default=3_000_000, help="tokens at most (default: %(default)s)")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.base / "tokenizer.json"))
    options.output.mkdir(parents=True, exist_ok=True)
    most = {"prose": options.prose, "code": options.code}
    train = [
        packed
        for kind in get_args(Kind)
        for packed in tokenized(ordered(load_text("train", kind, options.collected)), tokenizer, most[kind])
    ]
    test = tokenized(ordered(load_text("test", "prose", options.collected)), tokenizer, options.test)
    for name, documents in (("train", train), ("test", test)):
        packed = PackedText.of(documents)
        packed.save(options.output / f"{name}.xz")
        size = (options.output / f"{name}.xz").stat().st_size / 2**20
        long = int((packed.lengths >= 32_768).sum())
        code = int(packed.lengths[packed.code].sum())
        print(
            f"{name}: {len(documents)} documents ({long} of 32K or more), {len(packed.tokens):,} tokens "
            f"({code:,} of code), {size:.1f} MiB"
        )


if __name__ == "__main__":
    main()
