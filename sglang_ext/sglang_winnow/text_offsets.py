"""Where a prompt's and an answer's tokens lie in their texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


def text_and_offsets(tokenizer: Any, ids: Sequence[int], text: str | None) -> dict[str, Any]:
    """Return the text of tokens, and where each begins and ends in it, in characters, as the tokenizer tells.

    Tokens that make up one character together all have its place. Tokens that are in no text, such as one that a
    tokenizer puts before every prompt, begin and end at one place.

    Args:
        tokenizer: of transformers; None if the server has none.
        ids: of the tokens.
        text: which the tokens were made from; None if they came as ids.

    Returns:
        ``text`` and ``offsets``; both None without a tokenizer that tells of places.
    """
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        return {"text": text, "offsets": None}
    tokens = list(ids)
    decoded = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    for candidate, special in ((text, True), (decoded, False)):
        if candidate is None:
            continue
        encoded = tokenizer(candidate, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
        if list(encoded["input_ids"]) == tokens:
            return {"text": candidate, "offsets": [list(place) for place in encoded["offset_mapping"]]}
    # Another way to write the same text in tokens than the tokenizer's own.
    return _one_by_one(tokenizer.backend_tokenizer, tokens)


def _one_by_one(tokenizer: Any, tokens: Sequence[int]) -> dict[str, Any]:
    stream = DecodeStream(skip_special_tokens=False)
    text = ""
    offsets: list[list[int]] = []
    begun = 0
    for token in tokens:
        piece = stream.step(tokenizer, token)
        offsets.append([len(text), len(text)])
        if piece is None:
            continue
        for place in offsets[begun:]:
            place[1] = len(text) + len(piece)
        text += piece
        begun = len(offsets)
    return {"text": text, "offsets": offsets}
