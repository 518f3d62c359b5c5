"""Conversations as rows of tokens, in the model's own chat template, and which of those tokens are learned."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenizers import Tokenizer

from smollm2_training import needles, ruler, variables
from smollm2_training.needles import Prose
from smollm2_training.turns import Conversation, Turn

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What SmolLM2's chat template says where a conversation has no system message."""
_SYSTEMS = (
    "You are a helpful assistant.",
    "Answer from the text alone.",
    "You answer questions about long documents.",
    "Be brief and exact.",
)
RULER_WEIGHTS = {
    "niah_single_1": 0.05,
    "niah_single_2": 0.06,
    "niah_single_3": 0.07,
    "niah_multikey_1": 0.07,
    "niah_multikey_2": 0.07,
    "niah_multikey_3": 0.06,
    "niah_multivalue": 0.07,
    "niah_multiquery": 0.07,
    "vt": 0.13,
    "cwe": 0.01,
    "fwe": 0.01,
}
"""Shares of RULER's tasks in RULER's wording."""
OTHER_WEIGHTS = {"niah": 0.16, "vt": 0.17}
"""Shares of the other wordings; with those above they are 1."""

_PLAIN_SHARE = 0.15
_GIVEN_SHARE = 0.6
_ONE_QUESTION_SHARE = 0.25
_SHORTENED_SHARE = 0.3
_ESTIMATED_FROM = 2048
_ESTIMATE_SIZES = (150, 500)
"""Words of the two small samples from which a long one's size is reckoned."""
_ANSWER_ROOM = 120
_GIVEN_WEIGHT = 0.2
"""What a token of an answer's beginning weighs beside one of what was asked for, where the model writes both."""


@dataclass(frozen=True)
class Row:
    """A tokenized conversation.

    Attributes:
        kind: what it was made from, for statistics.
        tokens: its tokens.
        weights: for each token how much it counts as a target; 0 for all but answers.
        first_answer: half-open range of the first answer's tokens after its given beginning.
    """

    kind: str
    tokens: list[int]
    weights: list[float]
    first_answer: tuple[int, int]


class Rows:
    """Makes rows with one tokenizer and one source of real text."""

    def __init__(self, tokenizer: Tokenizer, prose: Prose) -> None:
        self._tokenizer, self._prose = tokenizer, prose
        self._start = tokenizer.token_to_id("<|im_start|>")
        self._end = tokenizer.token_to_id("<|im_end|>")
        self._newline = self.encode("\n")

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``, none added; special tokens' names in it are plain text."""
        # A document that spells <|im_end|> must not end a turn.
        text = text.replace("<|", "< |")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def message(self, role: str, content: str) -> list[int]:
        """One whole message as the chat template writes it."""
        return [*self.opening(role), *self.encode(content), self._end, *self._newline]

    def opening(self, role: str) -> list[int]:
        """A message's head; the assistant's is the generation prompt."""
        return [self._start, *self.encode(f"{role}\n")]

    def prompt(self, user: str, given: str) -> list[int]:
        """What an evaluation asks with: one user message and the beginning of the answer."""
        opened = self.message("system", DEFAULT_SYSTEM) + self.message("user", user) + self.opening("assistant")
        return opened + self.encode(given)

    def draw(self, rng: random.Random, length: int) -> Row:
        """A conversation of some kind that fits ``length`` tokens; of the long ones some are shorter, down to half."""
        if length >= 2048 and rng.random() < _SHORTENED_SHARE:
            length = rng.randint(length // 2, length)
        weights = {**{f"ruler {name}": share for name, share in RULER_WEIGHTS.items()}, **OTHER_WEIGHTS}
        kind = rng.choices(list(weights), list(weights.values()))[0]
        questions = 1 if rng.random() < _ONE_QUESTION_SHARE else rng.randint(6, 40)
        seed = rng.getrandbits(64)
        system = DEFAULT_SYSTEM if rng.random() < 0.85 else rng.choice(_SYSTEMS)
        plain = questions == 1 and rng.random() < _PLAIN_SHARE / _ONE_QUESTION_SHARE
        gives = rng.random() < _GIVEN_SHARE
        stripped = rng.random() < 0.5

        def head(words: int) -> tuple[Conversation, list[int]]:
            conversation = self._make(random.Random(seed), kind, words, questions)
            return conversation, self._head(conversation, system, plain)

        words = int(length * 0.8)
        if length >= _ESTIMATED_FROM:
            few, more = (len(head(size)[1]) for size in _ESTIMATE_SIZES)
            slope = max(0.5, (more - few) / (_ESTIMATE_SIZES[1] - _ESTIMATE_SIZES[0]))
            words = int((length - _ANSWER_ROOM - more) / slope) + _ESTIMATE_SIZES[1]
        while True:
            conversation, opened = head(words)
            row = self._row(conversation, opened, length, plain=plain, gives=gives, stripped=stripped)
            if row is not None:
                return row
            if words <= 32:
                # RULER's worked examples may leave no room for a task.
                kind, words = "vt", int(length * 0.8)
                continue
            ratio = length / (len(opened) + _ANSWER_ROOM)
            words = max(32, int(words * (ratio if ratio < 0.7 else min(0.97, (1 + ratio) / 2))))

    def _make(self, rng: random.Random, kind: str, words: int, questions: int) -> Conversation:
        if kind == "niah":
            return needles.make(rng, words, questions, self._prose)
        if kind == "vt":
            return variables.make(rng, words, questions, self._prose)
        return ruler.make(rng, kind.removeprefix("ruler "), words, questions, self._prose)

    def _head(self, conversation: Conversation, system: str, plain: bool) -> list[int]:
        """Everything up to the first answer or its given beginning."""
        first = conversation.context + conversation.turns[0].question
        if plain:
            return self.encode(first)
        return self.message("system", system) + self.message("user", first) + self.opening("assistant")

    def _row(
        self, conversation: Conversation, head: list[int], length: int, *, plain: bool, gives: bool, stripped: bool
    ) -> Row | None:
        """The row with as many turns as it has room for; None if not even the first fits."""
        tokens, weights = list(head), [0.0] * len(head)
        first: tuple[int, int] | None = None
        for number, turn in enumerate(conversation.turns):
            opening = []
            if number:
                opening = [*self._newline, *self.message("user", turn.question), *self.opening("assistant")]
            begun, rest = self._answer(turn, plain=plain, stripped=stripped)
            if len(tokens) + len(opening) + len(begun) + len(rest) > length:
                break
            given_weight = 0.0 if gives or plain else _GIVEN_WEIGHT
            tokens += opening + begun
            weights += [0.0] * len(opening) + [given_weight] * len(begun)
            first = first or (len(tokens), len(tokens) + len(rest))
            tokens += rest
            weights += [1.0] * len(rest)
        if first is None:
            return None
        scale = sum(weights) ** -0.5
        return Row(conversation.kind, tokens, [weight * scale for weight in weights], first)

    def _answer(self, turn: Turn, *, plain: bool, stripped: bool) -> tuple[list[int], list[int]]:
        """Tokens of an answer's given beginning, and of the rest with the end of the turn."""
        given, answer = turn.given, turn.answer
        if plain:
            given = f"\n{given}" if given and not given[0].isspace() else given or "\n"
        elif stripped:
            given = given.lstrip()
        if not given.strip() and not plain:
            answer = answer.lstrip()
        if given.endswith("\n"):
            answer = answer.lstrip()
        return self.encode(given) if given else [], [*self.encode(answer), self._end]
