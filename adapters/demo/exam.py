"""One context with the needles of every family, the questions about it, and answers that stand inside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
from attrs import evolve, frozen

from sparseprefill.profiles.table import Progress

from ..evaluation.comparison import Ask, Decoding
from ..evaluation.prompts import Prompt, spans_of
from ..evaluation.reading import Answers, threads
from ..session.defaults import MIN_QUERY
from . import formats
from .formats import ADJECTIVES, NOUNS, Key
from .inside import SHORTEST, Passage, Place, make_passages, places_of
from .tasks import FAMILIES, Family, Question, Task, make_task, score
from .text import haystack_of

MOST = 16
"""The most questions of one family."""

SHORT = MIN_QUERY - 1
"""Tokens of one step of decoding, at most."""

_DISTRACTORS: Mapping[Family, int] = {"single": 0, "multikey": 8, "multivalue": 0, "multiquery": 0}
# Tokens within which a family's own task is made, before its needles move into the shared context.
_ROOM = 1 << 13


@frozen
class Exam:
    """Tasks of all families that share one context, so that one prefill serves every question.

    inside: answers in the context itself, which the prefill's own rows must look up; none where the context is shorter
    than `inside.SHORTEST`. The task `linked` asks for the last keys of their chains.
    """

    context: str
    tasks: tuple[Task, ...]
    inside: tuple[Place, ...] = ()

    @property
    def questions(self) -> int:
        """The number of questions."""
        return sum(len(task.questions) for task in self.tasks)


def make_exam(tokenizer: Callable[..., Any], tokens: int, seed: int, questions: int) -> Exam:
    """Bury the needles of all families in one text of the Python at hand.

    tokens: of the longest prompt with its answer. questions: of each family (one for `single`, which has one needle).
    Raises ValueError where the needles and questions alone need more tokens, or `questions` is not from 1 to MOST.
    """
    if not 1 <= questions <= MOST:
        raise ValueError(f"questions is {questions}: pass 1 to {MOST}")
    tasks: list[Task] = []
    stems: set[str] = set()
    for family in FAMILIES:
        task = _apart(tokenizer, family, seed, questions, stems)
        stems |= _stems(task)
        tasks.append(task)
    haystack, rng = haystack_of(tokenizer, None), random.Random(f"exam/{tokens}/{seed}")
    spots = [(rng.random(), line) for task in tasks for line in task.needles]
    passages: list[Passage] = []
    if tokens >= SHORTEST:
        passages = make_passages(_unused(rng, stems), rng, tokens)
        spots += [(one.depth, one.text) for one in passages]
        tasks.append(_linked(passages, tokens, seed, questions))
    longest = max(haystack.tokens(one.text + one.answer) for task in tasks for one in task.questions)
    context = haystack.bury(rng, spots, tokens - 1 - longest)
    whole = tuple(evolve(task, context=context, length=tokens) for task in tasks)
    return Exam(context, whole, places_of(context, passages))


def prompt_of(exam: Exam, tokenizer: Any) -> tuple[Prompt, int]:
    """The context with the first question and its answer behind it, and how many tokens these two have.

    Raises ParameterError where the tokenizer cannot tell which tokens an answer inside the context is.
    """
    first = exam.tasks[0].questions[0]
    context, spans = spans_of(exam.context, exam.inside, tokenizer)
    behind = tokenizer(first.text + first.answer, add_special_tokens=False)["input_ids"]
    return Prompt("exam", (*context, *behind), spans), len(behind)


def take(exam: Exam, answer: Callable[[str, str], str]) -> dict[str, tuple[int, int]]:
    """Ask every question, ``answer(question, expected answer)``; values right and asked by family."""
    return {task.family: score(task, [answer(one.text, one.answer) for one in task.questions]) for task in exam.tasks}


def asker(model: Any, tokenizer: Any, exam: Exam) -> Ask:
    """Asks the exam's questions of the context that a cache holds: ``ask(cache, progress, decoding)``; see `Ask`.

    Each question is one more chunk of the prompt, read by whatever reads the model's prefill, so that what it needs of
    the text must pass the method's mask. The cache is left as it was.
    """

    def ask(cache: Any, progress: Progress, decoding: Decoding) -> Answers:
        done = 0

        def answer(question: str, expected: str) -> str:
            nonlocal done
            progress("questions", done, exam.questions)
            done += 1
            prompt, draft = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (question, expected))
            found: str = tokenizer.decode(greedy(model, cache, prompt, draft, decoding))
            return found

        # Decoding on a CPU is many small operations, where more threads cost more than they bring.
        with threads(1) if model.device.type == "cpu" else nullcontext():
            answers = take(exam, answer)
        progress("questions", done, exam.questions)
        return answers

    return ask


def greedy(model: Any, cache: Any, prompt: list[int], draft: list[int], decoding: Decoding | None = None) -> list[int]:
    """Decode as many tokens as `draft` has, greedily, after the cache and `prompt`; the cache is left as it was. See
    `answered`."""
    if _forgets(cache):
        return answered(model, deepcopy(cache), prompt, draft, decoding)
    length = cache.get_seq_length()
    found = answered(model, cache, prompt, draft, decoding)
    _drop(cache, cache.get_seq_length() - length)
    return found


@torch.inference_mode()
def answered(
    model: Any, cache: Any, prompt: list[int], draft: list[int], decoding: Decoding | None = None
) -> list[int]:
    """Decode as many tokens as `draft` has, greedily, after the cache and `prompt`. The cache then holds these, too,
    but for the last of them, as after any decoding.

    The prompt is one forward pass, as a chunk of prefill is. The draft saves time and changes nothing: a forward pass
    over a part of it gives the model's own choice at each place, choices are taken as long as they agree with it, and
    where one departs decoding goes on from that choice. An adapter takes these steps for decoding: in a block
    of `decoding` whatever their length, and without it since they are short.
    """
    found: list[int] = []
    forgets = _forgets(cache)
    if forgets:
        cache.activate_past_recording()
    most = SHORT if decoding is None else len(draft)
    pending, step = prompt, 1
    while len(found) < len(draft):
        ahead = draft[len(found) :][:step]
        ids = torch.tensor([[*pending, *ahead[:-1]]], dtype=torch.int64, device=model.device)
        with decoding() if decoding is not None and found else nullcontext():
            chosen = model(ids, past_key_values=cache, logits_to_keep=len(ahead)).logits[0].argmax(-1).tolist()
        departed = next((i for i, (a, b) in enumerate(zip(chosen, ahead, strict=True)) if a != b), None)
        taken = len(ahead) if departed is None else departed + 1
        step = most if departed is None else 2
        if forgets:
            cache.crop(taken - len(ahead))  # of none, too: until then a window is not cut to its size
        else:
            _drop(cache, len(ahead) - taken)
        found += chosen[:taken]
        pending = found[-1:]
    return found


def _forgets(cache: Any) -> bool:
    """True if a layer of the cache keeps a sliding window alone, so that nothing can be taken out of it again."""
    return any(getattr(layer, "is_sliding", False) for layer in getattr(cache, "layers", ()))


def _drop(cache: Any, tokens: int) -> None:
    if tokens > 0:
        cache.crop(-tokens)


def _apart(tokenizer: Callable[..., Any], family: Family, seed: int, questions: int, stems: set[str]) -> Task:
    """A task whose keys no other task has."""
    asked = 1 if family == "single" else questions
    attempt = seed
    while True:
        task = make_task(tokenizer, family, _ROOM, attempt, questions=asked, distractors=_DISTRACTORS[family])
        if not stems & _stems(task):
            return task
        attempt += 1_000_003


def _stems(task: Task) -> set[str]:
    return {needle.rpartition(" is ")[0] for needle in task.needles}


def _unused(rng: random.Random, stems: set[str]) -> Callable[[], Key]:
    """Draws keys that no needle has, each once."""
    every = [(adjective, noun) for adjective in ADJECTIVES for noun in NOUNS]
    rng.shuffle(every)
    return iter([key for key in every if formats.needle(key, "").rpartition(" is ")[0] not in stems]).__next__


def _linked(passages: Sequence[Passage], tokens: int, seed: int, questions: int) -> Task:
    """Asks for the last keys of chains, which have their value by way of the keys before them."""
    ends = [one.ends for one in passages if one.ends is not None][:questions]
    made = tuple(Question(formats.one_question(key), formats.answer([key], [value]), (value,)) for key, value in ends)
    return Task("linked", tokens, seed, "", (), made)
