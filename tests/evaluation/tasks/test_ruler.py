"""RULER's tasks in its own wording: the published text around what varies, and answers read back from the text."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from winnow_evaluation.tasks import TASKS
from winnow_evaluation.tasks.niah import NEEDLE_TASKS
from winnow_evaluation.tasks.ruler import NOISE, RULER_TASKS, ruler_tasks
from winnow_evaluation.tasks.sample import Question, Sample
from winnow_evaluation.tasks.scoring import found_fraction

seeds = st.integers(0, 2**64 - 1)
sizes = st.integers(1, 1500)
names = st.sampled_from(sorted(RULER_TASKS))

_FORMS = {
    "numbers": r"[1-9]\d{6}",
    "words": r"[a-z]+-[a-z]+",
    "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}


def haystack(rng: random.Random, words: int) -> list[str]:
    """Sentences of five words."""
    return [f"Sentence {rng.randrange(1000)} of the essay." for _ in range(max(1, words // 5))]


def made(name: str, seed: int, size: int) -> tuple[Sample, Question]:
    sample = RULER_TASKS[name].make(random.Random(seed), size, haystack)
    [question] = sample.questions
    return sample, question


def test_the_tasks_are_those_of_ruler_that_need_no_dataset() -> None:
    assert list(RULER_TASKS) == [name for name in TASKS if name != "records"]
    assert {name: task.answer_tokens for name, task in RULER_TASKS.items()} == {
        **dict.fromkeys(NEEDLE_TASKS, 128),
        "vt": 30,
        "cwe": 120,
        "fwe": 50,
    }


@given(names, seeds, sizes)
def test_the_same_state_gives_the_same_sample_and_its_answer_full_marks(name: str, seed: int, size: int) -> None:
    sample, question = made(name, seed, size)
    assert made(name, seed, size)[0] == sample
    assert found_fraction(question.answer, question.references) == 1.0
    assert question.given.startswith(" ")
    assert question.answer.startswith(" ")


@settings(max_examples=50)
@given(names, seeds, st.integers(400, 3000))
def test_a_sample_has_about_the_words_that_were_asked_for(name: str, seed: int, size: int) -> None:
    sample, _ = made(name, seed, size)
    words = sample.prompt.split()
    if name == "cwe":
        # The worked example beside the list, whose numbers do not count.
        words = [word for word in words if not re.fullmatch(r"\d+\.", word)][180:]
    assert 0.8 * size - 60 < len(words) < 1.1 * size + 130


@given(st.sampled_from(sorted(NEEDLE_TASKS)), seeds, sizes)
def test_needles_are_hidden_and_asked_for_in_rulers_words(name: str, seed: int, size: int) -> None:
    task = NEEDLE_TASKS[name]
    sample, question = made(name, seed, size)
    needle = rf"One of the special magic {task.values} for ({_FORMS[task.keys]}) is: ({_FORMS[task.values]})\."
    values: dict[str, list[str]] = {}
    for key, value in re.findall(needle, sample.prompt):
        values.setdefault(key, []).append(value)
    assert len(values) == task.key_count if task.haystack != "needles" else len(values) > task.key_count

    kind: str = task.values
    if len(question.references) == 1:
        singular = kind.removesuffix("s")
        before = f"A special magic {singular} is hidden within the following text. Make sure to memorize it. "
        before += f"I will quiz you about the {singular} afterwards."
        after = f"What is the special magic {singular} for (.+) mentioned in the provided text?"
        begun = " The special magic {} for {} mentioned in the provided text is"
        kind = singular
    else:
        before = f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
        before += f"I will quiz you about the {kind} afterwards."
        after = f"What are all the special magic {kind} for (.+) mentioned in the provided text?"
        begun = " The special magic {} for {} mentioned in the provided text are"
    first, *context, last = sample.prompt.split("\n")
    assert first == before
    query = last[len(after.split("(.+)", maxsplit=1)[0]) : -len(after.split("(.+)")[1])]
    assert last == after.replace("(.+)", query)
    assert question.given == begun.format(kind, query)

    asked = re.split(r", and |, ", query)
    assert len(asked) == task.keys_per_question
    assert Counter(question.references) == Counter(value for key in asked for value in values[key])
    assert len(question.references) == task.keys_per_question * task.values_per_key
    if task.haystack == "noise":
        assert set(context) - {NOISE} == {re.search(needle, sample.prompt)[0]}  # type: ignore[index]
    elif task.haystack == "essay":
        assert len(context) == 1
        assert re.fullmatch(r"(Sentence \d+ of the essay\. ?)*", re.sub(rf"{needle} ?", "", context[0]))


@given(seeds, sizes)
def test_a_chain_is_tracked_after_a_worked_example(seed: int, size: int) -> None:
    sample, question = made("vt", seed, size)
    example, main = sample.prompt.split("\n\nMemorize and track")
    begin = " the chain(s) of variable assignment hidden in the following text.\n\n"
    for text, letters, answer in ((example, 3, None), (main, 5, question.answer)):
        body = text.removeprefix("Memorize and track")
        assert body.startswith(begin)
        lines = body.removeprefix(begin).split("\n")
        chain = [line for line in lines[:-1] if line != NOISE]
        first = re.fullmatch(rf"VAR ([A-Z]{{{letters}}}) = (\d{{5}})", chain[0])
        assert first is not None
        variables = [first[1]]
        for line in chain[1:]:
            assert re.fullmatch(rf"VAR [A-Z]{{{letters}}} = VAR {variables[-1]} ", line)
            variables.append(line.split()[1])
        assert len(set(variables)) == 5
        asked = f"Question: Find all variables that are assigned the value {first[2]} in the text above."
        begun = " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned "
        begun += f"the value {first[2]}, they are: "
        if answer is None:
            assert lines[-1] == f"{asked}{begun} {' '.join(variables)}"
        else:
            assert lines[-1] == asked
            assert (question.given, answer) == (begun, " " + " ".join(variables))
            assert question.references == tuple(variables)


@pytest.mark.parametrize(("size", "example", "times"), [(300, (3, 1), (6, 1)), (2000, (10, 3), (30, 3))])
def test_common_words_are_asked_for_after_a_worked_example(
    size: int, example: tuple[int, int], times: tuple[int, int]
) -> None:
    sample, question = made("cwe", 5, size)
    begun = " Answer: The top 10 words that appear most often in the list are:"
    asked = "Question: What are the 10 most common words in the above list?"
    before = "Below is a numbered list of words. In these words, some appear more often than others. "
    before += "Memorize the ones that appear most often."
    lines = sample.prompt.split("\n")
    assert [lines[0], lines[3], lines[5]] == [before, before, asked]
    worked = lines[2].removeprefix(asked + begun)
    assert question.given == begun
    for listed, answer, (common, other) in ((lines[1], worked, example), (lines[4], question.answer, times)):
        counts = Counter(re.findall(r"\d+\. (\S+)", listed))
        most = re.findall(r" (\d+)\. (\S+)", answer)
        assert [int(number) for number, _ in most] == list(range(1, 11))
        assert {word: counts.pop(word) for _, word in most} == {word: common for _, word in most}
        assert set(counts.values()) == {other}


def test_coded_words_are_asked_for_in_rulers_words() -> None:
    sample, question = made("fwe", 5, 900)
    context, asked = sample.prompt.split("\n")
    before = "Read the following coded text and track the frequency of each coded word. "
    before += "Find the three most frequently appeared coded words. "
    assert context.startswith(before)
    counts = Counter(context.removeprefix(before).split(" ")).most_common(5)
    assert counts[0][0] == "..."
    assert [word for word, _ in counts[1:4]] == list(question.references)
    assert all(more > fewer for (_, more), (_, fewer) in pairwise(counts))
    assert asked == (
        "Question: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
    )
    begun = " Answer: According to the coded text above, the three most frequently appeared words are:"
    assert question.given == begun


def test_tasks_read_the_haystack_that_they_say_they_read() -> None:
    read: list[str] = []

    def recorded(rng: random.Random, words: int) -> list[str]:
        read.append("read")
        return haystack(rng, words)

    for name, task in ruler_tasks(recorded).items():
        read.clear()
        task.make(random.Random(0), 100)
        assert bool(read) == RULER_TASKS[name].reads_text
