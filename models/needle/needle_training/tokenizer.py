"""Train the byte-level BPE tokenizer on the tasks' own texts and write it, with its chat template, beside the model.

python -m needle_training.tokenizer models/needle
"""

from __future__ import annotations

import json
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from winnow_evaluation.tasks import TASKS, filler_text, words

VOCABULARY_SIZE = 6272
PAD, BEGIN, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|pad|>",
    "<|begin|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('a role is one of system, user and assistant') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONTEXT_LENGTH = 32_768

_PIECES = r" ?\p{Lu}?\p{Ll}+| ?\p{Lu}{1,2}| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
"""Words with the space before them, capitals in pairs, digits in threes, punctuation, white space."""


def _corpus(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(200):
        for task in TASKS.values():
            if task.name not in ("niah_multikey_3", "vt", "fwe"):
                sample = task.make(rng, 400)
                yield sample.prompt + "\n" + sample.questions[0].answer
        yield " ".join(filler_text.essay(rng, 400))
    # Every word with a space before it, every group of digits and pair of capitals is worth a token of its own.
    pairs = [first + second for first in string.ascii_uppercase for second in string.ascii_uppercase]
    for _ in range(200):
        yield "".join(pairs) + " " + " ".join(pairs)
        yield " " + " ".join((*words.vocabulary(), *words.NAMES))
        yield " ".join(
            [*(f"{n}" for n in range(100, 1000)), *(f"{n:03}" for n in range(100)), *(f"{n:02}" for n in range(100))]
        )


def train(seed: int = 0) -> Tokenizer:
    """Train the tokenizer; the same seed gives the same vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` as transformers and SGLang read them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    save(train(), Path(sys.argv[1]))
