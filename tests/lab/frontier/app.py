"""The command: what every setting of the methods costs and keeps on a model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from sparseprefill.adapters.calibration.candidates import Candidate
from sparseprefill.adapters.calibration.candidates import settings as space
from sparseprefill.adapters.cli import options, render
from sparseprefill.adapters.cli.demo import GREEDY
from sparseprefill.adapters.cli.group import CommandError, Stop
from sparseprefill.adapters.cli.options import (
    Configs,
    Device,
    Dtype,
    Floor,
    Methods,
    Model,
    Seed,
    Settings,
    Tail,
    Threads,
    Tried,
    Type,
    finite,
    suited,
)
from sparseprefill.adapters.cli.progress import bars
from sparseprefill.adapters.cli.searched import fixed_parameters, with_tables, without_tables
from sparseprefill.adapters.cli.setup import Place, Source, identity_of
from sparseprefill.adapters.demo.tasks import TABLES
from sparseprefill.adapters.evaluation.reading import Sizes
from sparseprefill.adapters.session.defaults import TAIL

from lab.bench.clock import Clock
from lab.bench.dense import fastest_first
from lab.files import Files, JsonFile, MarkdownFile, command
from sparseprefill.method import Method
from sparseprefill.registry import default_registry

from . import results
from .exams import Texts
from .points import Point, Reader, best_settings, configured, in_eight_bits, spread

TOKENS = {"cpu": (4096,), "cuda": (32768,)}
"""Lengths unless told otherwise."""


class On(StrEnum):
    """What a model reads: the embedded model's tasks, or natural text in which passages and facts are restated."""

    TASKS = "tasks"
    TEXTS = "texts"


app = command("Show what settings of the methods cost and keep on a model: answers, fidelity, recall, and time.")


@app.callback(invoke_without_command=True)
def frontier(
    model: Model = None,
    method: Methods = None,
    config: Configs = None,
    tried: Tried = None,
    settings: Settings = None,
    most: Annotated[
        int,
        typer.Option(min=0, help="Settings per method besides its defaults, at most; 0 for the whole search space."),
    ] = 5,
    chosen_by: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="Run the defaults and each method's best setting in this file, --json of another seed's run; repeat "
            "where methods are in several.",
        ),
    ] = None,
    kl: Annotated[
        list[float] | None,
        typer.Option(
            "--kl",
            min=0.0,
            help="With --from: each method's cheapest setting there with at most this KL; repeat for several. Without "
            "it and --copies the cheapest one that keeps 98 % of dense's answers.",
        ),
    ] = None,
    copies: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="With --from: each method's fastest setting there that keeps this share of what dense copies.",
        ),
    ] = None,
    on: Annotated[
        On, typer.Option(help="Read the embedded model's tasks, or natural texts, which any pretrained model can.")
    ] = On.TASKS,
    kind: Annotated[
        list[str] | None, typer.Option(help="Kind of natural text; repeat for several. By default all in turn.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=256, help="Length of the texts in tokens; repeat for several.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, callback=finite, help="Time for the search; by default until everything is tried."),
    ] = None,
    tail: Tail = TAIL,
    recall_floor: Floor = None,
    eight_bits: Annotated[bool, typer.Option("--eight-bits", help="Let the executor compute tiles in 8 bits.")] = False,
    texts: Annotated[int, typer.Option(min=1, help="Texts of each length.")] = 1,
    questions: Annotated[int, typer.Option(min=1, max=16, help="Questions of each family about a text.")] = 4,
    seed: Seed = TABLES,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of the attention; the median counts.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time limit for all runs of one measurement.")] = 1.0,
    markdown: MarkdownFile = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this file: KL and answers by speed-up.")] = None,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 2,
    json: JsonFile = None,
) -> None:
    """Show what settings of the methods cost and keep on a model: answers, fidelity, recall, and time.

    Each method runs at its defaults and at settings spread over its search space. Two things are timed: the attention
    of all layers on the model's own queries and keys, beside dense attention in the same run, and the whole prefill.
    Ctrl-C stops and shows what was measured so far.
    """
    files = Files(plot=plot, markdown=markdown, json=json)
    registry = default_registry()
    methods = options.chosen(registry, method)
    values = options.tried([one.name for one in methods], settings or (), tried or ())
    fixed = fixed_parameters(methods, settings or (), model, recall_floor, values)
    best = None
    if (kl or copies is not None) and not chosen_by:
        raise CommandError("--kl and --copies choose among the settings of a file: pass --from FILE, too")
    if chosen_by:
        found_by = [best_settings(path, seed, texts, kl or (), copies) for path in chosen_by]
        best = {name: settings for one in found_by for name, settings in one.items()}
    files_of_settings = [configured(path) for path in config or ()]
    _candidates(without_tables(methods, fixed), fixed, values, most, best, suited(model))  # all that can be seen
    place = Place.of(device, dtype.value, threads)
    lengths = sorted(set(tokens or TOKENS["cpu" if place.device.type == "cpu" else "cuda"]))
    clock = Clock(place.device, rounds, seconds)
    sizes = Sizes(greedy=GREEDY, repeats=1 if place.device.type == "cpu" else 3)
    found: list[Point] = []
    until = None if minutes is None else time.monotonic() + 60.0 * minutes

    def late() -> bool:
        return until is not None and time.monotonic() >= until

    with place.threaded(), bars(1) as shown:
        source = Source.of(model, place)
        if on == On.TASKS:
            read = Texts.of_tasks(source, lengths, texts, questions, seed, tail, sizes)
        else:
            read = Texts.natural(source, lengths, texts, seed, tail, sizes, kind or ())
        loaded = source.load()
        identity = identity_of(loaded, model)
        methods, left_out = with_tables(methods, fixed, loaded, identity, read.others, shown)
        candidates = _candidates(methods, fixed, values, most, best, suited(model))
        candidates += files_of_settings
        candidates = list(map(in_eight_bits, candidates)) if eight_bits else candidates
        facts: dict[str, Any] = {
            **{"model": model or "embedded", "tail": tail, "recall_floor": recall_floor, "texts": texts},
            **{"questions": questions, "seed": seed, "from": [str(path) for path in chosen_by or ()]},
            **{"minutes": minutes, "rounds": rounds, "dtype": place.dtype_name, "threads": threads},
            **{"left_out": left_out, "eight_bits": eight_bits, "on": str(on), "kinds": kind, "kl": kl},
            **{"copies": copies},
        }
        shown.expect(len(lengths) * len(candidates))
        with Stop() as stop, fastest_first() if place.device.type == "cuda" else nullcontext():
            for length in lengths:
                if found and late():
                    break
                reader = Reader.of(length, read.read(loaded, identity, length), clock)
                for candidate in candidates:
                    if found and late():
                        break
                    with shown.contender(f"{candidate.name}, {length:,} tokens"):
                        found.append(reader.read(candidate))
                    results.keep(found, {**facts, "stopped": True}, place, files)
    stop.check(len(found))
    results.report(found, {**facts, "stopped": stop.heard}, place, files)
    for name, reason in left_out.items():
        render.note(f"{name} is left out: {reason}")
    for one in methods:
        if best is not None and one.search and one.name not in best:
            lack = " or ".join(
                ([f"has a KL of at most {max(kl)}"] if kl else [])
                + ([] if copies is None else [f"keeps {copies:.0%} of what dense copies"])
            )
            lack = lack or "keeps 98 % of dense's answers inside the texts and behind"
            files_read = ", ".join(map(str, chosen_by or ()))
            render.note(f"{one.name} runs only at its defaults: no setting of it in {files_read} {lack}")
    render.broken(registry)
    every = len(lengths) * len(candidates)
    stop.end(len(found), every, "settings")
    if len(found) < every:
        render.note(f"there was no time for {every - len(found)} more settings")
    if any(one.error for one in found):
        raise typer.Exit(1)


def _candidates(
    methods: Sequence[Method],
    fixed: dict[str, dict[str, Any]],
    values: Mapping[str, Mapping[str, list[Any]]],
    most: int,
    best: Mapping[str, Sequence[Mapping[str, Any]]] | None,
    usual: Mapping[str, Any],
) -> list[Candidate]:
    """Each method's defaults, what suits the embedded model, and the best of another run or, where there was none,
    settings spread over the search space. usual: what suits the model, by method."""
    made = []
    for one in methods:
        searched, given = values[one.name], fixed[one.name]
        own: list[dict[str, Any]] = [] if searched else [dict(given)]
        if not searched and one.name in usual:
            own.append({**usual[one.name], **given})
        if best is not None and not searched:
            own += [{**each, **given} for each in best.get(one.name, ())]
        elif searched or set(one.search) - set(given):
            own += spread(space(one, searched, given), 0 if searched else most)
        made += [Candidate(one, each) for index, each in enumerate(own) if each not in own[:index]]
    return made
