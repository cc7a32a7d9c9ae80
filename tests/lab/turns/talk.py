"""Conversations with a model: the text is prefilled once, by a method or densely, and the cache is read every turn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from re import findall
from statistics import fmean
from typing import Any

import torch
from attrs import define, field, frozen
from sparseprefill.adapters.demo.exam import answered
from sparseprefill.adapters.evaluation.outcome import Contender
from sparseprefill.adapters.evaluation.reading import Reader
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.huggingface.handle import Handle

from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError, SparsePrefillError
from sparseprefill.plan import Result

from .words import Ids, Words

Answer = tuple[str, tuple[bool, ...]]
"""What a column shows of one question: whether its value is right, or each of its tokens."""
Scores = Mapping[str, tuple[bool, ...]]
"""All of it, by column, in the order in which it was asked."""
EXACT, FIRST = "exact", 12
"""Ends the name of the score of answers of which greedy decoding gives the first tokens, and so many."""


@frozen
class Turn:
    """A question and what it is to be answered with.

    family: column of its score. prompt: tokens from the end of the answer before it to the first of its own. answer:
    the right one. value: what of it counts as a word of its own; empty where every token does.
    """

    family: str
    prompt: Ids
    answer: Ids
    value: str = ""


@frozen
class Talk:
    """A conversation. ids: what is prefilled. turns: the questions, which stay in the cache with their right answers.

    forced: instead, every question is asked right behind what was prefilled, and its answer is read rather than
    decoded (teacher forcing).
    """

    name: str
    ids: Ids
    turns: tuple[Turn, ...]
    forced: bool = False

    @property
    def tokens(self) -> int:
        """How long the conversation gets."""
        each = [len(one.prompt) + len(one.answer) + 1 for one in self.turns]
        return len(self.ids) + (max(each) if self.forced else sum(each))


@frozen
class Played:
    """What one contender made of one conversation.

    scores: what is right and what is not, so that contenders can be paired. density: of the prefill, over all layers;
    one that ran dense counts as 1. reasons: why layers ran dense, with counts. error: what stopped it; the other
    figures are then empty.
    """

    task: str
    text: str
    contender: Contender
    tokens: int = 0
    scores: Scores = field(factory=dict)
    density: float = 1.0
    reasons: Mapping[str, int] = field(factory=dict)
    error: str = ""


@define
class Densities:
    """Observer: pairs computed / causal pairs of the last call of every layer. Each call waits for the device."""

    layers: int
    found: dict[int, float] = field(factory=dict, init=False)
    on: bool = field(default=True, init=False)

    def __call__(self, call: AttentionCall, result: Result) -> None:
        """Take the density of one layer."""
        if self.on:
            self.found[call.layer] = min(1.0, result.density)

    def take(self) -> float:
        """The mean over all layers since the last time; a layer that was not called sparse counts as 1."""
        made = fmean([*self.found.values(), *[1.0] * (self.layers - len(self.found))])
        self.found = {}
        return made


@contextmanager
def attached(model: Any, contender: Contender, observe: Densities | None = None) -> Iterator[Handle | None]:
    """The model with a contender; its own attention, and None, for the stock model."""
    if contender.pipeline is None:
        yield None
        return
    with attach(
        model, contender.pipeline, gate=None, tail=contender.dense_tail, recall_every=0, observe=observe
    ) as handle:
        yield handle


def layers_of(model: Any) -> int:
    """How many layers a model has."""
    return int(model.config.get_text_config().num_hidden_layers)


def play(reader: Reader, tokenizer: Any, task: str, talk: Talk, contender: Contender) -> Played:
    """Let a contender prefill a conversation and answer its questions; decoding is dense.

    An error ends the contender alone.
    """
    try:
        return _play(reader, tokenizer, task, talk, contender)
    except Exception as error:  # whatever a kernel or a compiler raises: the others are worth having
        return Played(task, talk.name, contender, error=told(error))


def told(error: Exception) -> str:
    """An error in one line, the library's own and lack of memory in their own words."""
    line = next(iter(str(error).splitlines()), "")
    own = isinstance(error, SparsePrefillError | torch.OutOfMemoryError)
    return line if own and line else f"{type(error).__name__}: {line or 'no message'}"


@torch.inference_mode()
def _play(reader: Reader, tokenizer: Any, task: str, talk: Talk, contender: Contender) -> Played:
    watch = Densities(layers_of(reader.model))
    with attached(reader.model, contender, watch) as handle:
        rows, cache = reader.prefill(torch.tensor([talk.ids], device=reader.device))
        del rows
        density = 1.0 if handle is None else watch.take()
        watch.on = False
        if talk.forced:
            scores = [one for turn in talk.turns for one in _forced(reader, cache, turn, handle)]
        else:
            scores = list(_went_on(reader, tokenizer, cache, talk))
        reasons = {} if handle is None else dict(handle.report().fallbacks)
    return Played(task, talk.name, contender, len(talk.ids), added(scores), density, reasons)


def _went_on(reader: Reader, tokenizer: Any, cache: Any, talk: Talk) -> Iterator[Answer]:
    """One question after the other, each behind those before it and their right answers, so that what one contender
    gets wrong counts once, and all read the same conversation."""
    pending: list[int] = []
    for turn in talk.turns:
        answer = list(turn.answer)
        found = answered(reader.model, cache, [*pending, *turn.prompt], answer)
        yield turn.family, (turn.value in findall(r"\w+", tokenizer.decode(found)),)
        if found != answer and len(answer) > 1:  # the last token of an answer is not in the cache yet
            cache.crop(1 - len(answer))
            reader.follow(cache, torch.tensor([answer[:-1]], device=reader.device))  # so short that it is decoding
        pending = answer[-1:]


def _forced(reader: Reader, cache: Any, turn: Turn, handle: Handle | None) -> Iterator[Answer]:
    """Which tokens of the right answer are the likeliest, and whether the first ones all are, so that greedy decoding
    gives them; the cache is left as it was."""
    length = cache.get_seq_length()
    device, answer = reader.device, torch.tensor(turn.answer)
    first = reader.follow(cache, torch.tensor([turn.prompt], device=device))[-1:].argmax(-1)
    if handle is None:
        others = reader.follow(cache, answer[None, :-1].to(device)).argmax(-1)
    else:
        with handle.decoding():
            others = reader.follow(cache, answer[None, :-1].to(device)).argmax(-1)
    cache.crop(length - cache.get_seq_length())
    right = torch.cat([first, others]).cpu() == answer
    yield turn.family, tuple(right.tolist())
    yield f"{turn.family}, {EXACT}", (bool(right[:FIRST].all()),)


def added(answers: Iterable[Answer]) -> Scores:
    """Answers by column, in the order in which they came."""
    made: dict[str, tuple[bool, ...]] = {}
    for column, right in answers:
        made[column] = (*made.get(column, ()), *right)
    return made


def text_of(words: Words, document: Ids) -> Ids:
    """A conversation's begin: a document that the user hands over, and that the model says it has read."""
    before = words.ids("Read this text. Questions about it follow.\n\n")
    after = words.ids("\n\nThat was the text.")
    return (*words.begin, *before, *document, *after, *words.answer, *words.ids("I have read it."))


def turn_of(words: Words, family: str, question: str, lead: str, answer: str, value: str) -> Turn:
    """A question, with the beginning of its answer put into the model's mouth, so that what follows is short."""
    prompt = (*words.again, *words.ids(question), *words.answer, *words.ids(lead))
    return Turn(family, prompt, words.ids(answer), value)


def closed(words: Words, turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns, with a full stop behind the answer in front of each."""
    stop = words.ids(".")
    behind = [Turn(one.family, (*stop, *one.prompt), one.answer, one.value) for one in turns[1:]]
    return (*turns[:1], *behind)


def cut(words: Words, natural: Ids, tokens: int, turns: Sequence[Turn], lines: Sequence[Ids]) -> Ids:
    """So much of a natural text that, with lines in it, a conversation about it has so many tokens.

    ParameterError where that leaves less text than lines.
    """
    around = Talk("", text_of(words, ()), tuple(turns)).tokens + sum(map(len, lines))
    least = around + sum(map(len, lines))
    if tokens < least:
        raise ParameterError(f"tokens is {tokens}: questions and lines need more; pass {least} or more")
    return words.bare(natural)[: tokens - around]


def woven(text: Ids, lines: Sequence[Ids]) -> tuple[Ids, list[int]]:
    """The text with lines spread evenly over it, and at which token each begins."""
    edges = [len(text) * index // len(lines) for index in range(len(lines) + 1)]
    made: list[int] = []
    starts = []
    for line, (first, last) in zip(lines, pairwise(edges), strict=True):
        half = (first + last) // 2
        made += text[first:half]
        starts.append(len(made))
        made += [*line, *text[half:last]]
    return tuple(made), starts


def spread(count: int, of: int) -> list[int]:
    """`count` of `of` indices, from the first to the last, evenly."""
    return [round(index * (of - 1) / max(1, count - 1)) for index in range(count)]
