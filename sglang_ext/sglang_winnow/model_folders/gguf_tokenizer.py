"""The tokenizer of a GGUF file, made from the vocabulary that the file has.

transformers' own conversion leaves out how a text is split before its pairs are merged, takes the wrong token for the
end of a turn, and reads SentencePiece's BPE as a unigram model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges

_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_PRE_TOKENIZERS: Final = {
    "gpt-2": _BYTES,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES]),
}
"""By ``tokenizer.ggml.pre``, llama.cpp's name of how a text is split."""
_SPACE: Final = "▁"
"""What SentencePiece has for a space."""
_FIRST: Final = 1.0
"""The score of tokens that are merged before all others, whose scores are at most 0."""


def read_tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a GGUF file, with its special tokens and, if the file has one, its chat template.

    Raises:
        ValueError: it is of a kind, or treats texts in a way, that is not known here.
    """
    kind = read_field(reader, "tokenizer.ggml.model")
    tokens: list[str] = read_field(reader, "tokenizer.ggml.tokens")
    types: list[int] = read_field(reader, "tokenizer.ggml.token_type")
    if kind == "gpt2":
        tokenizer = _byte_level(reader, tokens)
    elif kind == "llama":
        # The file has the tokens that are looked for before anything else with plain spaces.
        tokens = [
            token.replace(" ", _SPACE) if of == TokenType.USER_DEFINED else token
            for token, of in zip(tokens, types, strict=True)
        ]
        tokenizer = _sentence_piece(reader, tokens, types)
    else:
        raise ValueError(f"tokenizer.ggml.model: must be gpt2 (byte-level BPE) or llama (SentencePiece), not {kind}")
    tokenizer.add_special_tokens(_added(tokens, types, TokenType.CONTROL))
    tokenizer.add_tokens(_added(tokens, types, TokenType.USER_DEFINED))
    ids = {
        f"{name}_token": read_field(reader, f"tokenizer.ggml.{field}_token_id")
        for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **{name: tokens[index] for name, index in ids.items() if index is not None},
    )
    whole.chat_template = read_field(reader, "tokenizer.chat_template")
    return whole


def read_field(reader: GGUFReader, name: str) -> Any:
    """Return a field of the file's header; None if it has none of that name."""
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def _byte_level(reader: GGUFReader, tokens: Sequence[str]) -> Tokenizer:
    split = read_field(reader, "tokenizer.ggml.pre")
    if split not in _PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre: must be one of {', '.join(_PRE_TOKENIZERS)}, not {split}")
    merges = [tuple(pair.split(" ")) for pair in read_field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(tokens), merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[split]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(reader: GGUFReader, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """A BPE that merges the two parts of the token with the highest score, and falls back to bytes."""
    if read_field(reader, "tokenizer.ggml.add_space_prefix") is not False:
        raise ValueError(
            "tokenizer.ggml.add_space_prefix: must be false; texts that get a space in front are not known"
        )
    vocabulary = _vocabulary(tokens)
    scores = [
        (token, _FIRST if of == TokenType.USER_DEFINED else score)
        for token, of, score in zip(tokens, types, read_field(reader, "tokenizer.ggml.scores"), strict=True)
        if of in (TokenType.NORMAL, TokenType.USER_DEFINED)
    ]
    unknown = tokens[read_field(reader, "tokenizer.ggml.unknown_token_id")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=generate_merges(vocabulary, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    if read_field(reader, "tokenizer.ggml.add_bos_token"):
        index = read_field(reader, "tokenizer.ggml.bos_token_id")
        begin = tokens[index]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin}:1 $B:1", special_tokens=[(begin, index)]
        )
    return tokenizer


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _added(tokens: Sequence[str], types: Sequence[int], kind: TokenType) -> list[AddedToken]:
    special = kind == TokenType.CONTROL
    return [
        AddedToken(token, normalized=False, special=special)
        for token, of in zip(tokens, types, strict=True)
        if of == kind
    ]
