"""The command `fit`, which writes a profile: the best method and setting by the length of prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from attrs import evolve

from ..session.defaults import TAIL
from . import options
from .group import CommandError, check_writable

if TYPE_CHECKING:
    from ..calibration.search import Rows
    from ..evaluation.prompts import Prompt, Text
    from .progress import Bars
    from .setup import Source

TOKENS = {"cpu": (2048, 8192), "cuda": (4096, 16384, 65536)}
"""Lengths of the built-in prompts unless told otherwise, as far as the model reads them."""
AGREEMENT = COPIES = 0.99
"""Share of rows with dense's token, and of the tokens that dense copies, that a setting must keep, unless told
otherwise."""
LEAST = 256
"""Tokens of the shortest prompt worth fitting to."""


def fit(
    model: options.Model = None,
    prompts: options.Prompts = None,
    agreement: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Lowest share of rows with dense's token; by default 0.99."),
    ] = None,
    kl: Annotated[
        float | None, typer.Option(min=0.0, callback=options.finite, help="Highest mean KL(dense || sparse), in nats.")
    ] = None,
    copies: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Lowest share of the tokens that dense copies from far above; 0 for no limit."
        ),
    ] = COPIES,
    recall: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Lowest recall: share of the attention mass kept.")
    ] = None,
    end: Annotated[
        bool,
        typer.Option(
            "--end-only", help="Aim at the prompt's end alone, for prompts that are asked about behind their last row."
        ),
    ] = False,
    method: options.Methods = None,
    settings: options.Settings = None,
    tried: options.Tried = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=256, help="Length of the texts in tokens; repeat for several.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Maximum number of prompts of each length.")] = 4,
    as_is: options.AsIs = False,
    seed: options.Seed = 0,
    tail: options.Tail = TAIL,
    recall_floor: options.Floor = None,
    minutes: Annotated[float, typer.Option(min=0.01, callback=options.finite, help="Time for the search.")] = 20.0,
    by: Annotated[
        options.Cost, typer.Option("--by", help="What to minimise; by default seconds on a GPU, density on a CPU.")
    ] = options.Cost.AUTO,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the profile to this file.")] = Path(
        "model.profile.json"
    ),
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    dtype: options.Type = options.Dtype.AUTO,
    threads: options.Threads = 2,
    json: Annotated[bool, typer.Option("--json", help="Print every trial as JSON and nothing else.")] = False,
) -> None:
    """Find the best method and setting for a model, and write it as a profile for `attach`, `build` and vLLM.

    For each length, searches all methods and their settings, and keeps the cheapest one whose effect on the model's
    next tokens stays within the target, in rows of the whole prompt and at its end. Ctrl-C stops and writes the best
    found so far.
    """
    from ..evaluation.prompts import read

    texts = None if prompts is None else read(prompts)  # before the imports that take their time

    from sparseprefill.registry import default_registry

    from ..calibration.candidates import candidates
    from ..calibration.fit import SIZES, ModelReadings
    from ..calibration.search import Target
    from ..evaluation.comparison import check_length
    from .progress import bars
    from .searched import Run, fixed_parameters, with_tables, without_tables
    from .setup import Place, Source, identity_of

    check_writable("--output", output)
    default = AGREEMENT if (agreement, kl, recall) == (None, None, None) else agreement
    rows: Rows = "end" if end else "all"
    target = Target(agreement=default, kl=kl, copies=None if end else copies or None, recall=recall, rows=rows)
    methods = options.chosen(default_registry(), method)
    values = options.tried([one.name for one in methods], settings or (), tried or ())
    fixed = fixed_parameters(methods, settings or (), model, recall_floor, values)
    candidates(without_tables(methods, fixed), fixed, values)  # all that can be seen of settings that do not fit
    place = Place.of(device, dtype.value, threads)
    cost = by.of(place.device.type)
    until = time.monotonic() + 60.0 * minutes
    with bars(1) as shown, place.threaded():
        source = Source.of(model, place, device_map)
        sizes = evolve(SIZES, repeats=1 if place.device.type == "cpu" or cost == "density" else 3)
        groups = _prompts(prompts, texts, source, tokens or (), count, sizes.greedy, seed, shown, as_is=as_is)
        for one in chain.from_iterable(groups.values()):
            check_length(one, sizes)
        loaded = source.load()
        identity = identity_of(loaded, model)
        first = next(iter(groups.values()))
        methods, left_out = with_tables(methods, fixed, loaded, identity, first, shown)
        names, every = [one.name for one in methods], candidates(methods, fixed, values)
        how = {
            **{
                "seed": seed,
                "tail": tail,
                "recall_floor": recall_floor,
                "left_out": left_out,
                "minutes": minutes,
                "by": cost,
            },
            **{"settings": len(every), "target": str(target), "device": str(place.device), "dtype": place.dtype_name},
        }
        run = Run(target=target, by=cost, methods=names, identity=identity, output=output, place=place, how=how)

        def readings(length: int) -> ModelReadings:
            return ModelReadings(loaded, identity, groups[length], sizes, tail, shown.doing)

        stop = run.over(list(groups), readings, every, until, shown)
        if cost == "seconds" and not stop.heard:
            run.time(shown)
    run.report(f"{identity.name}: {target}", stop, len(groups), json=json)


def _prompts(
    path: Path | None,
    texts: Sequence[Text] | None,
    source: Source,
    tokens: Sequence[int],
    count: int,
    greedy: int,
    seed: int,
    shown: Bars,
    *,
    as_is: bool,
) -> dict[int, list[Prompt]]:
    """The prompts by length in tokens, ascending; CommandError or ParameterError for what does not fit."""
    from ..evaluation.prompts import tokenized
    from ..evaluation.texts import built_in, with_copies

    most, tokenizer = source.positions, source.tokenizer
    room = None if most is None else most - greedy
    lengths = sorted({source.fitted(one, greedy, shown.finished) for one in tokens})
    if texts is None:
        usual = TOKENS[source.place.kind]
        lengths = lengths or [one for one in usual if room is None or one <= room] or [room or usual[0]]
        return {length: built_in(tokenizer, length, count, seed) for length in lengths}
    if lengths:
        groups = {length: _of_length(tokenized(texts, tokenizer, length), length, path)[:count] for length in lengths}
    else:
        found = tokenized(texts, tokenizer)
        for one in found:
            source.check_greedy(f"the prompt {one.name} has {len(one.ids)} tokens", len(one.ids), greedy)
        groups = _grouped(found, count)
    if as_is:
        return groups
    rooms = {key: key if lengths and (room is None or key < room) else room for key in groups}
    return {key: [with_copies(one, rooms[key], seed) for one in own] for key, own in groups.items()}


def _of_length(found: list[Prompt], length: int, path: Path | None) -> list[Prompt]:
    """The prompts that have about so many tokens once they are cut."""
    near = [one for one in found if 4 * len(one.ids) >= 3 * length]
    if not near:
        longest = max(len(one.ids) for one in found)
        raise CommandError(f"--tokens {length}: the longest prompt of {path} has {longest}; pass about that, or less")
    return near


def _grouped(found: list[Prompt], count: int) -> dict[int, list[Prompt]]:
    """Prompts whose lengths are within a factor of two of each other, under the median of their lengths."""
    groups: dict[int, list[Prompt]] = {}
    for one in found:
        groups.setdefault(len(one.ids).bit_length(), []).append(one)
    long = {size: own for size, own in groups.items() if max(len(one.ids) for one in own) >= LEAST}
    if not long:
        raise CommandError(
            f"no prompt has {LEAST} tokens or more, and shorter ones have nothing to gain: pass longer ones"
        )
    return {int(median(len(one.ids) for one in own)): own[:count] for _, own in sorted(long.items())}
