"""Chains of assignments in haystacks, in wordings that RULER does not use."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from smollm2_training.needles import Prose, distinct, draw_haystack
from smollm2_training.turns import Conversation, Turn


@dataclass(frozen=True)
class Wording:
    """One way to write assignments down and to ask for a chain.

    Attributes:
        first: a variable gets a value.
        copy: a variable gets what another holds.
        before: what stands before the text.
        question: which variables hold a value.
        given: how the answer begins; empty for an answer that is the names alone.
        separator: what stands between the names of the answer.
    """

    first: str
    copy: str
    before: str
    question: str
    given: str = ""
    separator: str = " "


WORDINGS = (
    Wording(
        "LET {name} = {value}",
        "LET {name} = {source}",
        "Follow the assignments in this text.",
        "Which variables hold {value}?",
        "{value} is held by",
    ),
    Wording(
        "SET {name} TO {value}",
        "SET {name} TO {source}",
        "Below, variables are set. Keep track of them.",
        "List every variable whose value is {value}.",
        "The variables whose value is {value} are:",
        ", ",
    ),
    Wording(
        "ASSIGN {name} := {value}",
        "ASSIGN {name} := {source}",
        "Some lines of this text are assignments, directly or of another variable.",
        "Name all variables that were assigned {value}, directly or through others.",
    ),
    Wording(
        "{name} = {value}",
        "{name} = {source}",
        "A program is scattered over this text.",
        "Question: after the program has run, which variables are equal to {value}?",
        "Answer: {count} variables:",
    ),
    Wording(
        "{name} <- {value}",
        "{name} <- {source}",
        "Statements of the form target <- source are hidden in the text that follows.",
        "Which targets end up with {value}?",
        "With {value} end up",
        ", ",
    ),
    Wording(
        "{name} is {value}.",
        "{name} is the same as {source}.",
        "Read this and work out what each letter group stands for.",
        "What is {value}?",
        "{value} is",
        ", ",
    ),
    Wording(
        "The box {name} holds {value}.",
        "The box {name} holds what the box {source} holds.",
        "There are boxes with numbers in them. Read which box holds what.",
        "Which boxes hold {value}?",
        "These boxes hold {value}:",
        ", ",
    ),
    Wording(
        "export {name}={value}",
        "export {name}=${source}",
        "Here is a shell script with long comments.",
        "Which environment variables have the value {value}?",
    ),
    Wording(
        "int {name} = {value};",
        "int {name} = {source};",
        "C code and prose, mixed.",
        "Find all integers that are initialised with {value}, also through other integers.",
        "The integers are",
        ", ",
    ),
    Wording(
        "Let {name} be {value}.",
        "Let {name} be {source}.",
        "The lemma below contains definitions.",
        "List all symbols that equal {value}.",
        "Equal to {value} are",
    ),
    Wording(
        "DEFINE {name} AS {value}",
        "DEFINE {name} AS {source}",
        "Memorize the definitions in this text.",
        "Which names are defined as {value}, directly or by another name?",
        "As {value} are defined",
    ),
    Wording(
        "store {value} in {name}",
        "copy {source} to {name}",
        "Registers are filled and copied in the course of this text.",
        "Which registers contain {value} at the end?",
        "At the end {value} is contained in",
    ),
    Wording(
        "{name} got number {value}.",
        "{name} got the number of {source}.",
        "Teams and their numbers, among other things:",
        "Which teams have the number {value}?",
        "The {count} teams with the number {value} are",
        ", ",
    ),
    Wording(
        "(setq {name} {value})",
        "(setq {name} {source})",
        "Expressions in Lisp come up in this text.",
        "Which symbols are bound to {value}?",
    ),
    Wording(
        "Account {name} starts with {value} points.",
        "Account {name} takes over the points of account {source}.",
        "Keep the books: accounts and their points.",
        "Which accounts have {value} points?",
        "The accounts with {value} points are",
        ", ",
    ),
    Wording(
        "label {name}: {value}",
        "label {name}: see {source}",
        "This catalogue has cross-references.",
        "Under which labels does one find {value}, following the cross-references?",
        "One finds {value} under",
    ),
    Wording(
        "MOV {name}, {value}",
        "MOV {name}, {source}",
        "Assembler is hidden in noise.",
        "Question: which operands were loaded with {value}?",
        "Answer:",
    ),
    Wording(
        "variable {name} has the value {value}",
        "variable {name} has the value of variable {source}",
        "Track the variables in the following text.",
        "Find the variables with the value {value}.",
        "According to the text, these variables have the value {value}:",
    ),
    Wording(
        "{value} => {name}",
        "{source} => {name}",
        "Arrows say where numbers go.",
        "Where does {value} arrive?",
        "{value} arrives at",
    ),
    Wording(
        "Agent {name} knows the code {value}.",
        "Agent {name} learned the code from agent {source}.",
        "Find out who knows what.",
        "Which agents know the code {value}?",
        "The code {value} is known to",
        ", ",
    ),
    Wording(
        "val {name} = {value}",
        "val {name} = {source}",
        "Text with immutable values in between:",
        "Which values are {value}?",
        "There are {count}:",
    ),
    Wording(
        "#define {name} {value}",
        "#define {name} {source}",
        "Some header files, commented at length.",
        "Which macros expand to {value}?",
        "Macros that expand to {value}:",
    ),
    Wording(
        "{name} was priced at {value}.",
        "{name} was priced like {source}.",
        "An auction report. Note the prices.",
        "Which lots were priced at {value}?",
        "Priced at {value} were",
        ", ",
    ),
    Wording(
        "VARIABLE {name} IS {value}",
        "VARIABLE {name} IS VARIABLE {source}",
        "Memorize the chain or chains of variables in this text.",
        "Question: find every variable that is {value} in the text above.",
        "Answer: in the text above, the {count} variables that are {value} are:",
    ),
)


def make(
    rng: random.Random, size: int, questions: int, prose: Prose, wordings: tuple[Wording, ...] = WORDINGS
) -> Conversation:
    """Build a conversation of about ``size`` words of context with up to ``questions`` questions.

    A question asks for a whole chain or, to train a single step, for the value of one variable. Chains have one to six
    copies; one or two of them run through a text with one question, up to twelve through one with several.
    """
    wording, haystack = rng.choice(wordings), draw_haystack(rng, prose)
    most = max(1, size // 60)
    chain_count = min(most, rng.choice((1, 1, 2) if questions == 1 else (1, 2, 2, 4, 4, 8, 12)))
    own_lines = rng.random() < 0.5
    letters = rng.choice((3, 4, 5, 5, 5, 5, 6))
    hops = [rng.choice((1, 2, 3, 4, 4, 4, 5, 6)) for _ in range(chain_count)]
    names = iter(distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)), sum(hops) + chain_count))
    chains = [[next(names) for _ in range(count + 1)] for count in hops]
    values = rng.sample(range(10_000, 99_999), chain_count)

    parts, separator = haystack(max(1, size - 6 * (sum(hops) + chain_count)))
    if own_lines:
        separator = "\n"
    inserts: list[tuple[int, str]] = []
    for chain, value in zip(chains, values, strict=True):
        lines = [wording.first.format(name=chain[0], value=value)]
        lines += [wording.copy.format(name=name, source=source) for source, name in pairwise(chain)]
        inserts += zip(sorted(rng.randint(0, len(parts)) for _ in lines), lines, strict=True)
    # From the last to the first, so that places stay right and lines that share one stay in order.
    inserts.sort(key=itemgetter(0))
    for place, line in reversed(inserts):
        parts.insert(place, line)

    turns = [
        Turn(
            wording.question.format(value=value),
            wording.given.format(value=value, count=len(chain)),
            " " + wording.separator.join(chain),
        )
        for chain, value in zip(chains, values, strict=True)
    ]
    single = [
        Turn(f"What is the value of {name}?", f"The value of {name} is", f" {value}")
        for chain, value in zip(chains, values, strict=True)
        for name in chain
    ]
    rng.shuffle(turns)
    turns = (turns + rng.sample(single, min(len(single), 16)))[:questions]
    # The first question, which single-turn conversations are left with, stays that for a chain.
    rest = turns[1:]
    rng.shuffle(rest)
    context = wording.before + "\n\n" + separator.join(parts) + "\n\n"
    return Conversation(f"vt_{chain_count}c", context, [turns[0], *rest])
