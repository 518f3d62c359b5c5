"""RULER's tasks in RULER's own wording, with the beginning of the answer given.

The templates, the beginnings of the answers, the needle and the noise are those that RULER publishes
(github.com/NVIDIA/RULER, ``scripts/data/synthetic``, Apache-2.0; Hsieh et al., 2024), character for character. What
fills them differs from RULER in these points:

- Keys and listed words are drawn from this project's word lists, not from wonderwords. Keys are distinct.
- Essays are not Paul Graham's, which have no free licence: the caller brings the text. It starts at another place in
  every sample, where RULER's always starts at the same one. A sentence ends at a full stop, question or exclamation
  mark, where RULER asks NLTK.
- The worked example of ``vt`` has a fixed number of lines. RULER fills 500 tokens of the model's.
- The worked example of ``cwe`` stands in the user's message, as that of ``vt`` does. RULER gives it a turn of its own
  where it applies a chat template.
- RULER's two question answering tasks need datasets and are left out.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from winnow_evaluation.tasks.niah import NEEDLE_TASKS, NeedleTask, draw_distinct, summary_of
from winnow_evaluation.tasks.sample import Question, Sample, Task
from winnow_evaluation.tasks.word_extraction import SHORT_LIST, common_words, frequent_words, numbered
from winnow_evaluation.tasks.words import distinct, inserted

Haystack = Callable[[random.Random, int], Sequence[str]]
"""``haystack(rng, words)`` is running text of about ``words`` words, sentence by sentence; a space joins them."""

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."


@dataclass(frozen=True)
class _Template:
    """A task's message, around its context, and the beginning of the answer to it."""

    before: str
    question: str
    given: str


_NIAH_ONE = _Template(
    before="A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n",
    question="What is the special magic {kind} for {query} mentioned in the provided text?",
    given=" The special magic {kind} for {query} mentioned in the provided text is",
)
_NIAH_SEVERAL = _Template(
    before="Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n",
    question="What are all the special magic {kind} for {query} mentioned in the provided text?",
    given=" The special magic {kind} for {query} mentioned in the provided text are",
)
_VT = _Template(
    before="Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
    question="Question: Find all variables that are assigned the value {query} in the text above.",
    given=" Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
    "assigned the value {query}, they are: ",
)
_CWE = _Template(
    before="Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n",
    question="Question: What are the 10 most common words in the above list?",
    given=" Answer: The top 10 words that appear most often in the list are:",
)
_FWE = _Template(
    before="Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. ",
    question="Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?",
    given=" Answer: According to the coded text above, the three most frequently appeared words are:",
)
_SEPARATOR = "\n"
"""What stands between a context and its question, in all of RULER's templates."""

_NOISE_WORDS = NOISE.count(" ") + 1
_NEEDLE_WORDS = NEEDLE.count(" ") + 1
_DEPTHS = tuple(round(100 * step / 39) for step in range(40))
"""Places of needles in an essay, in percent of its sentences."""

_HOPS = 4
_EXAMPLE_PARAGRAPHS = 14
"""Lines of noise in the worked example of ``vt``: what fits 500 tokens of SmolLM2's tokenizer."""


def make_niah(rng: random.Random, size: int, haystack: Haystack, task: NeedleTask) -> Sample:
    """Build a sample of about ``size`` words whose question asks for ``task.keys_per_question`` of its keys."""
    distractors = max(task.key_count * task.values_per_key, size // _NEEDLE_WORDS) if task.haystack == "needles" else 0
    keys = draw_distinct(rng, task.keys, task.key_count + distractors, "-")
    drawn = iter(draw_distinct(rng, task.values, task.key_count * task.values_per_key + distractors, "-"))
    values = {key: [next(drawn) for _ in range(task.values_per_key)] for key in keys[: task.key_count]}
    needles = [_needle(task, key, value) for key, owned in values.items() for value in owned]
    rng.shuffle(needles)

    if task.haystack == "essay":
        sentences = list(haystack(rng, max(1, size - _NEEDLE_WORDS * len(needles))))
        depths = sorted(rng.sample(_DEPTHS, len(needles)))
        places = [len(sentences) * depth // 100 for depth in depths]
        text = " ".join(inserted(sentences, places, needles))
    else:
        if task.haystack == "noise":
            lines = [NOISE] * max(len(needles), (size - _NEEDLE_WORDS * len(needles)) // _NOISE_WORDS)
        else:
            lines = [_needle(task, key, value) for key, value in zip(keys[task.key_count :], drawn, strict=True)]
        places = sorted(rng.sample(range(len(lines)), len(needles)))
        text = "\n".join(inserted(lines, places, needles))

    asked = rng.sample(list(values), task.keys_per_question)
    answers = [value for key in asked for value in values[key]]
    one = len(answers) == 1
    template = _NIAH_ONE if one else _NIAH_SEVERAL
    kind = task.values[:-1] if one else task.values
    query = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
    return Sample(
        context=template.before.format(kind=kind) + text,
        questions=(
            Question(
                text=template.question.format(kind=kind, query=query),
                given=template.given.format(kind=kind, query=query),
                answer=f" {', '.join(answers)}.",
                references=tuple(answers),
            ),
        ),
        separator=_SEPARATOR,
    )


def make_vt(rng: random.Random, size: int, _haystack: Haystack) -> Sample:
    """Build a sample of about ``size`` words: a worked example, then one chain of five variables in noise."""
    example = _tracking(rng, _EXAMPLE_PARAGRAPHS, name_letters=3)
    solved = example.questions[0]
    worked = f"{example.prompt}{solved.given}{solved.answer}\n"
    words = size - worked.count(" ") - 5 * (_HOPS + 1)
    sample = _tracking(rng, max(_HOPS + 1, words // _NOISE_WORDS), name_letters=5)
    return Sample(f"{worked}\n{sample.context}", sample.questions, _SEPARATOR)


def _tracking(rng: random.Random, paragraphs: int, name_letters: int) -> Sample:
    variables = tuple(distinct(lambda: "".join(rng.choices(string.ascii_uppercase, k=name_letters)), _HOPS + 1))
    value = rng.randint(10_000, 99_998)
    # RULER's lines that copy a variable end in a space.
    chain = [f"VAR {variables[0]} = {value}", *(f"VAR {copy} = VAR {source} " for source, copy in pairwise(variables))]
    places = sorted(rng.sample(range(paragraphs), len(chain)))
    question = Question(
        text=_VT.question.format(query=value),
        given=_VT.given.format(query=value, count=len(variables)),
        answer=" " + " ".join(variables),
        references=variables,
    )
    text = "\n".join(inserted([NOISE] * paragraphs, places, chain))
    return Sample(_VT.before + text, (question,), _SEPARATOR)


def make_cwe(rng: random.Random, size: int, _haystack: Haystack) -> Sample:
    """Build a sample of about ``size`` listed words: a worked example, then the list that is asked about."""
    short = size < SHORT_LIST
    # 20 or 40 words, ten of which come 3 or 10 times.
    example = _common(rng, 40 if short else 190, common_times=3 if short else 10, other_times=1 if short else 3)
    solved = example.questions[0]
    sample = _common(rng, size, common_times=6 if short else 30, other_times=1 if short else 3)
    worked = f"{example.prompt}{solved.given}{solved.answer}"
    return Sample(f"{worked}\n{sample.context}", sample.questions, _SEPARATOR)


def _common(rng: random.Random, size: int, common_times: int, other_times: int) -> Sample:
    listed, common = common_words(rng, size, common_times, other_times)
    answer = " " + numbered(common)
    question = Question(_CWE.question, answer, tuple(common), given=_CWE.given)
    return Sample(_CWE.before + numbered(listed), (question,), _SEPARATOR)


def make_fwe(rng: random.Random, size: int, _haystack: Haystack) -> Sample:
    """Build a sample of about ``size`` coded words and dots."""
    listed, answers = frequent_words(rng, size)
    question = Question(_FWE.question, " " + ", ".join(answers), tuple(answers), given=_FWE.given)
    return Sample(_FWE.before + " ".join(listed), (question,), _SEPARATOR)


@dataclass(frozen=True)
class RulerTask:
    """One of RULER's tasks.

    Attributes:
        make: ``make(rng, size, haystack)`` builds a sample of about ``size`` words, or of the task's smallest size.
        answer_tokens: how many output tokens RULER allows.
        reads_text: whether the haystack is used at all.
    """

    name: str
    summary: str
    make: Callable[[random.Random, int, Haystack], Sample]
    answer_tokens: int
    reads_text: bool = False


def _needle_task(name: str, task: NeedleTask) -> RulerTask:
    make = partial(make_niah, task=task)
    return RulerTask(name, summary_of(task, essay="real text"), make, 128, reads_text=task.haystack == "essay")


_TASKS = (
    *(_needle_task(name, task) for name, task in NEEDLE_TASKS.items()),
    RulerTask("vt", "one chain of five variables in noise, after a worked example", make_vt, 30),
    RulerTask("cwe", "the 10 most common words of a numbered list, after a worked example", make_cwe, 120),
    RulerTask("fwe", "the 3 most frequent words of a coded text", make_fwe, 50),
)
RULER_TASKS: dict[str, RulerTask] = {task.name: task for task in _TASKS}


def ruler_tasks(haystack: Haystack) -> dict[str, Task]:
    """RULER's tasks by name, their needles hidden in what ``haystack`` gives."""

    def bound(task: RulerTask) -> Task:
        return Task(
            task.name,
            task.summary,
            lambda rng, size: task.make(rng, size, haystack),
            answer_tokens=lambda _size: task.answer_tokens,
        )

    return {name: bound(task) for name, task in RULER_TASKS.items()}


def _needle(task: NeedleTask, key: str, value: str) -> str:
    return NEEDLE.format(kind=task.values, key=key, value=value)
