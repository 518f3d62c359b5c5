"""What later turns of a conversation wait for their first token on a CPU, with ``keep`` and without.

    python -m benchmarks.cpu.conversations --output conversations.json

A conversation begins with a prompt of the evaluation's; each turn adds the answer that the server has just given, and
new tokens. Contestants hold the same conversations, each in a part of the prefix cache that is its own, and take turns,
so that whatever else the machine does slows all of them. The policy acts at every length.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.markdown import Markdown
from transformers import AutoTokenizer

from benchmarks.cpu.answer_timing import Timing, read_timing
from benchmarks.cpu.conversation_figures import DENSE, Turn, markdown
from benchmarks.generate_stream import GenerateClient, answer_of, request_body
from benchmarks.needle_prompt import needle_prompt
from sglang_winnow.crossover import ENVIRONMENT
from tests.runtime import runtime_server
from winnow_evaluation.machine import surroundings
from winnow_evaluation.writing import write_json

_MAX_TOKENS: Final = 131_072
_WARM_UP_TOKENS: Final = 600

console = Console(width=150)


@dataclass
class Conversation:
    """One contestant's side of a conversation.

    Attributes:
        contestant: its name.
        attention: its policy; None for dense attention.
        key: what parts its prefixes from those of others.
        tokens: the prompt of its next turn.
    """

    contestant: str
    attention: Mapping[str, Any] | None
    key: str
    tokens: list[int]

    def take_turn(self, server: GenerateClient, answer_tokens: int, message: Sequence[int]) -> Timing:
        """Ask for an answer, and go on with it and ``message``."""
        body = request_body(self.tokens, answer_tokens, self.attention) | {"extra_key": self.key}
        sent = time.perf_counter()
        lines = [(seconds - sent, line) for seconds, line in server.events(json.dumps(body))]
        self.tokens = [*self.tokens, *answer_of(line for _, line in lines), *message]
        return read_timing(lines)


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model to serve.")] = Path("models/needle"),
    policy: Annotated[str, typer.Option(help="Decode policy, with its defaults.")] = "quest",
    length: Annotated[int, typer.Option(help="Tokens of the first prompt.")] = 8192,
    turns: Annotated[int, typer.Option(min=2, help="Turns of a conversation.")] = 8,
    tokens: Annotated[int, typer.Option(min=3, help="Tokens of an answer.")] = 128,
    message: Annotated[int, typer.Option(min=1, help="New tokens of each later turn.")] = 32,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations with each contestant.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Where to write JSON, after each conversation.")] = None,
) -> None:
    """Measure, print a table, write JSON."""
    asked = {"decode": {"policy": policy}}
    contestants: dict[str, Mapping[str, Any] | None] = {
        DENSE: None,
        policy: asked,
        f"{policy}, kept": asked | {"keep": True},
    }
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    record = surroundings() | {"model": model.name, "answer_tokens": tokens, "message_tokens": message, "turns": []}
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("--attention-backend", "winnow", "--max-total-tokens", str(_MAX_TOKENS))
        log = Path(folder) / "log"
        with (
            runtime_server(model, *arguments, log=log, **{ENVIRONMENT: "0"}) as runtime,
            GenerateClient(runtime.url) as server,
        ):
            for name, attention in contestants.items():
                warm_up = Conversation(name, attention, f"{name}: warm-up", [10] * _WARM_UP_TOKENS)
                for _ in range(2):
                    warm_up.take_turn(server, 4, [10])
            for number in range(conversations):
                console.print(f"Conversation {number + 1} of {conversations}")
                begin = needle_prompt(tokenizer, length, number)[0]
                sides = [Conversation(name, of, f"{name}: {number}", begin) for name, of in contestants.items()]
                record["turns"] += [asdict(turn) for turn in hold(server, sides, turns, tokens, message, number)]
                if output:
                    write_json(output, record)
    console.print(Markdown(markdown(record)))


def hold(
    server: GenerateClient, sides: Sequence[Conversation], turns: int, tokens: int, message: int, number: int
) -> list[Turn]:
    """Hold conversation ``number`` with all contestants, another of whom begins each turn."""
    held = []
    for turn in range(turns):
        new = random.Random(f"{number}/{turn}").choices(range(100, 1000), k=message)
        first = turn % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            prompt = len(side.tokens)
            timing = side.take_turn(server, tokens, new)
            held.append(Turn(turn + 1, side.contestant, number, prompt, timing.cached_tokens, timing.ttft))
    return held


if __name__ == "__main__":
    typer.run(main)
