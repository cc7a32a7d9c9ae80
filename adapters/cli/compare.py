"""The command `compare`: what every method does to a model of the user's own, on prompts of the user's own."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..session.defaults import TAIL
from . import options, render
from .group import CommandError, Stop, check_writable

if TYPE_CHECKING:
    from sparseprefill.registry import Registry

    from ..evaluation.outcome import Outcome
    from ..evaluation.prompts import Prompt, Text
    from .setup import Source

BUILT_IN = 4096
"""Tokens of a built-in prompt unless told otherwise."""


def compare(
    model: options.Model = None,
    prompts: options.Prompts = None,
    method: options.Methods = None,
    settings: options.Settings = None,
    config: options.Configs = None,
    profile: options.Profiles = None,
    tokens: Annotated[
        int | None, typer.Option(min=128, help="Maximum tokens of a prompt; built-in prompts have exactly as many.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of prompts: built-in ones, or the first of a file.")] = 4,
    as_is: options.AsIs = False,
    seed: options.Seed = 0,
    tail: options.Tail = TAIL,
    recall_floor: options.Floor = None,
    held_back: Annotated[
        int, typer.Option(min=2, help="Tokens held back from each prompt's end, for the model to predict.")
    ] = 32,
    greedy: Annotated[int, typer.Option(min=1, help="Tokens of dense attention's own continuation.")] = 64,
    rows: Annotated[int, typer.Option(min=1, help="Query rows on which recall is sampled.")] = 64,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Timed prefills; the median counts. By default 1 on a CPU, else 3.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with the table and pictures to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write a picture of one head's masks to this file.")] = None,
    layer: options.Layer = 0,
    head: options.Head = 0,
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    dtype: options.Type = options.Dtype.AUTO,
    threads: options.Threads = 2,
    json: options.Json = False,
) -> None:
    """Compare every method with a model's own dense prefill: what it can still copy, next tokens, attention and speed.

    You need no tasks and no labels: passages of each text are restated far below, and any pretrained model goes on with
    what it has read. Ctrl-C stops and shows what was measured so far.
    """
    from ..evaluation.prompts import read

    texts = None if prompts is None else read(prompts)  # before the imports that take their time

    from sparseprefill.registry import default_registry

    from ..evaluation.comparison import check_length, outcomes
    from ..evaluation.outcome import Contender
    from ..evaluation.reading import Sizes
    from . import page, results
    from . import picture as pictures
    from .progress import bars
    from .setup import Place, Source

    check_writable("--picture", picture, ".png")
    check_writable("--html", html)
    registry = default_registry()
    names, left_out = _names(registry, method or (), settings or (), model)
    compared = options.contenders(
        registry, names, settings or (), model, tail, recall_floor, config or (), profile or ()
    )
    place = Place.of(device, dtype.value, threads)
    if options.DENSE not in names and place.dtype.itemsize == 2:  # how far 16 bits alone move next tokens
        compared.append(Contender(options.DENSE, registry.build(options.DENSE), {}, tail))
    repeats = repeats or (1 if place.device.type == "cpu" else 3)
    sizes = Sizes(tail=held_back, greedy=greedy, rows=rows, repeats=repeats)
    found: list[Outcome] = []
    with place.threaded():
        source = Source.of(model, place, device_map)
        source.check_layers(layer, head)
        chosen = _prompts(texts, source, tokens, count, greedy, seed, as_is=as_is)
        for prompt in chosen:
            check_length(prompt, sizes)
        loaded = source.load()
        readings = len(chosen) * (len(compared) + 1)
        with bars(readings) as shown, Stop() as stop:
            for outcome in outcomes(loaded, chosen, compared, sizes, shown, (layer, head)):
                found.append(outcome)
    stop.check(len(found))
    title = f"{model or 'the embedded model'}: {_described(chosen)}, {place}"
    title += "" if tail == TAIL else f", tail {tail}"
    facts: dict[str, Any] = {
        "model": model or "embedded",
        "prompts": [{"name": prompt.name, "tokens": len(prompt.ids)} for prompt in chosen],
        "seed": seed,
        **place.facts,
        **{"tail": tail, "recall_floor": recall_floor, "left_out": left_out, "stopped": stop.heard},
    }
    if picture is not None:
        pictures.draw([one for one in found if one.prompt == chosen[0].name], layer, head, picture)
    if html is not None:
        page.write(html, found, title, shlex.join(["sparseprefill", *sys.argv[1:]]), sizes)
    results.report(found, sizes, place, title, facts, {"picture": picture, "page": html}, json=json)
    for name, reason in left_out.items():
        render.note(f"{name} is left out: {reason}")
    render.broken(registry)
    stop.end(len(found), readings, "readings", failed=any(one.error for one in found))


def _names(
    registry: Registry, named: Sequence[str], settings: Sequence[str], model: str | None
) -> tuple[list[str], dict[str, str]]:
    """The methods that run: those that are named, else all that can; and the others, with the reason."""
    names = list(named) or options.every(registry)
    if named or model is None:
        return names, {}
    given = {options.setting(text)[:2] for text in settings}
    left_out = {}
    for name in names:
        table = registry.get(name).table
        if table is not None and (name, table.parameter) not in given:
            then = f"--set {name}.{table.parameter}={table.parameter}.json"
            remedy = f"sparseprefill {table.command} --model {model}, then {then}"
            left_out[name] = f"it needs a table of this model's {table.of}: {remedy}"
    return [name for name in names if name not in left_out], left_out


def _prompts(
    texts: Sequence[Text] | None,
    source: Source,
    tokens: int | None,
    count: int,
    greedy: int,
    seed: int,
    *,
    as_is: bool,
) -> list[Prompt]:
    from ..evaluation.prompts import tokenized
    from ..evaluation.texts import built_in, with_copies

    most = source.positions
    if most is not None and greedy >= most:
        raise CommandError(f"--greedy {greedy}: the model reads at most {most} tokens, the prompt included; pass fewer")
    if tokens is not None:
        tokens = source.fitted(tokens, greedy, render.note)
    if texts is not None:
        found = tokenized(texts[:count], source.tokenizer, tokens)
        for prompt in found:
            source.check_greedy(f"the prompt {prompt.name} has {len(prompt.ids)} tokens", len(prompt.ids), greedy)
        rooms = [one for one in (None if most is None else most - greedy, tokens) if one is not None]
        return found if as_is else [with_copies(one, min(rooms, default=None), seed) for one in found]
    tokens = tokens or min(BUILT_IN, (most or BUILT_IN) - greedy)
    return built_in(source.tokenizer, tokens, count, seed)


def _described(prompts: list[Prompt]) -> str:
    sizes = sorted({len(prompt.ids) for prompt in prompts})
    span = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    return f"{len(prompts)} prompt{'s' if len(prompts) > 1 else ''} of {span} tokens"
