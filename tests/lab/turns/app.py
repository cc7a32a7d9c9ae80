"""The command: what methods do to several turns of a real model, beside its own dense attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from enum import StrEnum
from typing import Annotated, Any

import typer
from sparseprefill.adapters.cli import options, render
from sparseprefill.adapters.cli.group import CommandError, Stop
from sparseprefill.adapters.cli.options import (
    Configs,
    Device,
    Dtype,
    Methods,
    Model,
    Seed,
    Settings,
    Tail,
    Threads,
    Type,
)
from sparseprefill.adapters.cli.progress import Bars, bars
from sparseprefill.adapters.cli.setup import Place, Source
from sparseprefill.adapters.evaluation.outcome import Contender
from sparseprefill.adapters.evaluation.prompts import Prompt
from sparseprefill.adapters.evaluation.reading import Reader
from sparseprefill.adapters.evaluation.texts import built_in
from sparseprefill.adapters.session.defaults import TAIL

from lab.bench.dense import fastest_first
from lab.files import Files, JsonFile, MarkdownFile, command
from sparseprefill.errors import ParameterError
from sparseprefill.registry import default_registry

from . import chain, lookups, requests, results
from .agents import Dense, Shape, texts_of
from .results import Found
from .talk import Talk, play
from .words import Words

METHODS = ("rowmax", "skip-softmax", "xattention", "flexprefill", "bfla", "vertical-slash")
"""Methods unless told otherwise."""
TOKENS = {"cpu": 4096, "cuda": 32768}
"""Tokens of a conversation unless told otherwise."""


class Task(StrEnum):
    """What is measured."""

    LOOKUPS = "lookups"
    REQUESTS = "requests"
    CHAIN = "chain"
    AGENTS = "agents"


MAKERS: dict[Task, Callable[[Words, Prompt, int, int, int], Talk]] = {
    Task.LOOKUPS: lookups.talk_of,
    Task.REQUESTS: requests.talk_of,
    Task.CHAIN: chain.talk_of,
}
"""What makes the conversations of the tasks that ask."""
app = command("Show what methods do to several turns of a real model, whose cache is read again each turn.")


@app.callback(invoke_without_command=True)
def turns(
    model: Model = None,
    task: Annotated[
        list[Task] | None, typer.Option(help="What to measure; repeat for several. By default all.")
    ] = None,
    method: Methods = None,
    settings: Settings = None,
    config: Configs = None,
    tail: Tail = TAIL,
    tokens: Annotated[
        int | None, typer.Option(min=256, help="Tokens of a conversation, but for agents; by default 4096 or 32768.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, max=24, help="Questions in a conversation.")] = 12,
    prefix: Annotated[int, typer.Option(min=1, help="Agents: tokens in front of the turns.")] = 24576,
    turn: Annotated[int, typer.Option(min=1, help="Agents: tokens of a turn.")] = 8192,
    turns: Annotated[int, typer.Option(min=1, help="Agents: turns.")] = 5,
    texts: Annotated[int, typer.Option(min=1, help="Texts of each task.")] = 4,
    kind: Annotated[
        list[str] | None, typer.Option(help="Kind of natural text; repeat for several. By default all in turn.")
    ] = None,
    seed: Seed = 0,
    markdown: MarkdownFile = None,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 2,
    json: JsonFile = None,
) -> None:
    """Show what methods do to several turns of a real model, whose cache is read again each turn.

    A method prefills; decoding is dense. Every method reads the same texts and questions as the model's own dense
    attention. Tasks: lookups asks for lines of a long text, one turn after the other; requests wants one of many
    answers that look alike again; chain asks about what was just answered; agents prefills one long turn after the
    other behind the cache. What dense itself gets less than half right is left out by name. Ctrl-C stops and shows what
    was measured so far.
    """
    files = Files(markdown=markdown, json=json)
    registry = default_registry()
    names = method or (() if config else METHODS)
    compared = options.contenders(registry, names, settings or (), model, tail, configs=config or ())
    place = Place.of(device, dtype.value, threads)
    chosen = list(dict.fromkeys(task or Task))
    length = tokens or TOKENS["cpu" if place.device.type == "cpu" else "cuda"]
    shape, found, kinds = Shape(prefix, turn, turns), Found(title=f", {place}"), kind or ()
    with place.threaded(), bars(1) as shown:
        source = Source.of(model, place)
        words = Words.of(source.tokenizer)
        if set(chosen) - {Task.AGENTS}:
            _check_asked(source, length)
        if Task.AGENTS in chosen:
            _check_agents(source, shape)
        try:
            asked = [
                (one, talk)
                for one in chosen
                if one in MAKERS
                for talk in _talks(one, words, length, texts, seed, questions, kinds)
            ]
        except ParameterError as error:
            raise CommandError(f"--tokens {length}: {error}") from error
        read = texts_of(source.tokenizer, shape, texts, seed, kinds) if Task.AGENTS in chosen else []
        loaded = source.load()
        facts: dict[str, Any] = {
            **{"model": model or "embedded", "tasks": chosen, "tail": tail, "texts": texts, "questions": questions},
            **{"tokens": length, "prefix": prefix, "turn": turn, "turns": turns, "kinds": kind, "seed": seed},
            **{"chat_template": words.chat, "dtype": place.dtype_name, "threads": threads},
        }
        every = (len(asked) + len(read)) * (1 + len(compared))
        shown.expect(every)
        with Stop() as stop, fastest_first() if place.device.type == "cuda" else nullcontext():
            for _ in _measured(loaded, words, asked, read, shape, compared, found, shown):
                results.keep(found, {**facts, "stopped": True}, place, files)
    stop.check(found.count)
    results.report(found, {**facts, "stopped": stop.heard}, place, files)
    if not words.chat:
        render.note("the tokenizer has no chat template that shows its turns: questions and answers are plain text")
    render.broken(registry)
    stop.end(found.count, every, "readings", failed=found.failed)


def _talks(
    task: Task, words: Words, tokens: int, texts: int, seed: int, questions: int, kinds: Sequence[str]
) -> list[Talk]:
    """The conversations of a task, each about another text."""
    natural = built_in(words.tokenizer, tokens, texts, seed, kinds, copies=0, facts=0)
    return [MAKERS[task](words, one, tokens, questions, seed) for one in natural]


def _measured(
    model: Any,
    words: Words,
    asked: Sequence[tuple[Task, Talk]],
    read: Sequence[Prompt],
    shape: Shape,
    compared: Sequence[Contender],
    found: Found,
    shown: Bars,
) -> Iterator[None]:
    """The stock model and every contender on each conversation and text; pauses as soon as one more is found."""
    stock = Contender("stock")
    for task, talk in asked:
        for one in (stock, *compared):
            with shown.contender(f"{task}, {talk.name}, {one.label}"):
                found.played.append(play(Reader(model), words.tokenizer, task, talk, one))
            yield
    for prompt in read:
        with shown.contender(f"agents, {prompt.name}, dense"):
            dense = Dense.of(model, prompt, shape)
        found.runs.append(dense.stock)
        yield
        for one in compared:
            with shown.contender(f"agents, {prompt.name}, {one.label}"):
                found.runs.append(dense.run(one))
            yield


def _check_asked(source: Source, tokens: int) -> None:
    """CommandError where the model does not read a conversation, or keeps a cache that cannot be cut back."""
    source.check_tokens(tokens)
    kinds = sorted(set(getattr(source.config.get_text_config(), "layer_types", None) or ()) - {"full_attention"})
    if kinds:
        raise CommandError(
            f"--model {source.path}: it has layers of {', '.join(kinds)}, whose cache cannot be cut back between "
            "questions: pass --task agents, or another model"
        )


def _check_agents(source: Source, shape: Shape) -> None:
    """CommandError where the model does not read the prefix and all turns."""
    most = source.positions
    if most is not None and shape.tokens > most:
        raise CommandError(
            f"--prefix {shape.prefix} --turn {shape.turn} --turns {shape.turns}: the model reads at most {most}, and "
            f"these are {shape.tokens} tokens; pass fewer, or leave --task agents out"
        )
