"""Retrieval tasks: a context with needles in it, and questions about them.

Four families follow the needle tasks of RULER:

- ``single``: one needle, one question;
- ``multikey``: many needles with different keys, each question asks one;
- ``multivalue``: one key has several needles, a question asks all its values, in ascending order (the first digits of a
  key's values differ);
- ``multiquery``: a question asks the values of several keys.

A prompt is ``task.context + question.text``; the context can be prefilled once for all questions. Tasks are
deterministic: the same tokenizer, text, arguments and seed give the same task.

Which seeds are for what is said here, so that no table comes from tasks that something was chosen on. Training makes
its own text and uses none of these: its values, keys and places come from another generator.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from attrs import frozen

from . import formats
from .formats import ADJECTIVES, NOUNS, Key
from .text import haystack_of

TUNING = 1_000
"""First seed of the tasks that settings of methods are chosen on (`python -m lab.frontier`, run in tests)."""

SELECTION = 1_000_000
"""First seed of the tasks at the end of a training run: they compare recipes and pick the run that ships."""

TABLES = 2_000_000
"""First seed of the tasks of published tables: those of the demo, and of `evaluate`."""

Family = Literal["single", "multikey", "multivalue", "multiquery"]
FAMILIES: tuple[Family, ...] = get_args(Family)
"""All families, in the order of the tables."""
Wording = Literal["short", "long"]
"""Form of a question."""

_VALUES: dict[Family, int] = {"single": 1, "multikey": 1, "multivalue": 4, "multiquery": 4}
_DISTRACTORS: dict[Family, int] = {"single": 0, "multikey": 15, "multivalue": 4, "multiquery": 4}
_MORE = 512
# Tokens of a longer text where a context is cut to an exact length.


@frozen
class Question:
    """One question about a context.

    text: what follows the context in the prompt; ends in a space. answer: the whole expected continuation, up to its
    full stop. values: the numbers of the answer, in order.
    """

    text: str
    answer: str
    values: tuple[str, ...]


@frozen
class Task:
    """A context and the questions about it, each to be put after the context alone.

    family: `linked` is made by `exam` alone. length: the most tokens of a prompt together with its answer. context:
    lines of filler text and needles; ends in a line break. needles: their lines, in the order in which they appear.
    """

    family: Family | Literal["linked"]
    length: int
    seed: int
    context: str
    needles: tuple[str, ...]
    questions: tuple[Question, ...]

    def prompt(self, index: int = 0) -> str:
        """Return the prompt of the question at ``index``."""
        return self.context + self.questions[index].text


def make_task(
    tokenizer: Callable[..., Any],
    family: Family,
    length: int,
    seed: int,
    *,
    questions: int = 1,
    distractors: int | None = None,
    wording: Wording = "short",
    lines: tuple[str, ...] | None = None,
) -> Task:
    """Make the task of a family, length and seed.

    length: tokens of the longest prompt with its answer, the start token included. seed: chooses the text, keys, values
    and places. questions: how many; 1 for ``single``. distractors: needles with keys that no question asks; by default
    0 for ``single``, 15 for ``multikey``, 4 for the other two. wording: ``long`` asks as a person would, in 20 to 60
    tokens; for ``single`` and ``multikey``. lines: filler text instead of the built-in one (`text`).

    Raises ValueError where the arguments contradict each other, or the needles and questions alone are longer.
    """
    distractors = _DISTRACTORS[family] if distractors is None else distractors
    if questions < 1 or (family == "single" and questions > 1):
        raise ValueError(f"{questions} questions do not fit the family {family!r}")
    if wording == "long" and family not in ("single", "multikey"):
        raise ValueError(f"the family {family!r} has no long questions")
    rng = random.Random(f"{family}/{length}/{seed}")
    keys = _keys(rng, questions * (_VALUES[family] if family == "multiquery" else 1) + distractors)
    made, needles = _questions(rng, family, questions, keys, wording)
    spots = [(rng.random(), line) for line in needles]
    for key in keys[len(keys) - distractors :]:
        spots.append((rng.random(), formats.needle(key, _values(rng, 1)[0])))
    rng.shuffle(spots)
    hay = haystack_of(tokenizer, lines)
    longest = max(hay.tokens(question.text + question.answer) for question in made)
    context = hay.bury(rng, spots, length - 1 - longest)
    wanted = {line for _, line in spots}
    order = tuple(line for line in context.splitlines() if line in wanted)
    return Task(family, length, seed, context, order, made)


def key_value_prompts(tokenizer: Callable[..., Any], tokens: int, count: int, seed: int) -> list[list[int]]:
    """Token ids of `count` contexts of the task `multikey`, each of exactly `tokens` tokens.

    Any tokenizer of transformers will do. Raises ValueError where the needles alone need more tokens.
    """
    prompts: list[list[int]] = []
    length = tokens + _MORE
    while len(prompts) < count:
        task = make_task(tokenizer, "multikey", length, seed + len(prompts))
        ids = list(tokenizer(task.context)["input_ids"])[:tokens]
        if len(ids) == tokens:
            prompts.append(ids)
        else:  # a tokenizer that merges across line breaks needs more text
            length += tokens - len(ids) + _MORE
    return prompts


def score(task: Task, answers: Sequence[str]) -> tuple[int, int]:
    """The number of right values, and of values asked. answers: the text generated after each question's prompt.

    A value is right when it stands, whole, at its place in the first line of the text, before the first full stop.
    """
    right = 0
    for question, text in zip(task.questions, answers, strict=True):
        found = re.findall(r"\d+", re.split(r"[.\n]", text, maxsplit=1)[0])
        right += sum(a == b for a, b in zip(question.values, found, strict=False))
    return right, sum(len(question.values) for question in task.questions)


def _keys(rng: random.Random, count: int) -> list[Key]:
    total = len(ADJECTIVES) * len(NOUNS)
    if count > total:
        raise ValueError(f"there are only {total} keys, but {count} are needed")
    picked = rng.sample(range(total), count)
    return [(ADJECTIVES[i // len(NOUNS)], NOUNS[i % len(NOUNS)]) for i in picked]


def _values(rng: random.Random, count: int) -> list[str]:
    tail = 10 ** (formats.DIGITS - 1)
    return [str(d * tail + rng.randrange(tail)) for d in sorted(rng.sample(range(1, 10), count))]


def _questions(
    rng: random.Random, family: Family, count: int, keys: list[Key], wording: Wording
) -> tuple[tuple[Question, ...], list[str]]:
    made: list[Question] = []
    needles: list[str] = []
    asked = _VALUES[family]
    for index in range(count):
        if family == "multiquery":
            named = keys[index * asked : (index + 1) * asked]
            values = [_values(rng, 1)[0] for _ in named]
            text = formats.keys_question(named)
        elif family == "multivalue":
            named = [keys[index]] * asked
            values = _values(rng, asked)
            text = formats.values_question(keys[index], asked)
        else:
            named = [keys[index]]
            values = _values(rng, 1)
            text = formats.one_question(keys[index])
            if wording == "long":
                text = formats.long_question(keys[index], rng.choice(formats.openings()), rng.choice(formats.ASKED))
        made.append(Question(text, formats.answer(named, values), tuple(values)))
        needles += [formats.needle(key, value) for key, value in zip(named, values, strict=True)]
    return tuple(made), needles
