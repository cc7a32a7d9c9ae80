"""The command `tune`: search one method's parameters by answers, and write the profile."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..session.defaults import TAIL
from . import render
from .files import check_writable
from .group import CommandError
from .kept import Stop
from .options import floored, value_of
from .shared_options import SEEDS, AtEnd, Device, Dtype, Floor, Model, Tail, Threads, Type

if TYPE_CHECKING:
    from sparseprefill.method import Method

    from ..calibration.search import By, Search
    from .setup import Place

TOKENS = (4096, 8192, 16384)


class Cost(StrEnum):
    """What a setting should have little of; AUTO is seconds on a GPU, density on a CPU."""

    AUTO = "auto"
    DENSITY = "density"
    SECONDS = "seconds"

    def of(self, place: Place) -> By:
        """What it is where the model runs."""
        if self == Cost.AUTO:
            return "density" if place.device.type == "cpu" else "seconds"
        return "density" if self == Cost.DENSITY else "seconds"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(tune)


def tune(
    method: Annotated[str, typer.Option(help="The method to tune.")],
    model: Model = None,
    tokens: Annotated[list[int] | None, typer.Option(min=256, help="Length to tune at; repeat for several.")] = None,
    tried: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="PARAMETER=V1,V2", help="Values to search instead of the method's own."),
    ] = None,
    fixed: Annotated[
        list[str] | None, typer.Option("--set", metavar="PARAMETER=VALUE", help="Fix a parameter for every setting.")
    ] = None,
    loss: Annotated[float, typer.Option(min=0.0, max=0.99, help="Share of dense's accuracy that you can lose.")] = 0.01,
    end: AtEnd = False,
    by: Annotated[
        Cost, typer.Option(help="What to minimise; by default seconds on a GPU, density on a CPU.")
    ] = Cost.AUTO,
    tail: Tail = TAIL,
    recall_floor: Floor = None,
    texts: Annotated[int, typer.Option(min=1, help="Texts of each length.")] = 2,
    questions: Annotated[int, typer.Option(min=1, max=16, help="Questions of each family about a text.")] = 4,
    seed: Annotated[
        int, typer.Option(min=0, max=SEEDS, help="Chooses the texts; `demo` uses others by default.")
    ] = 1000,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the profile to this file; by default METHOD.profile.json."),
    ] = None,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 1,
    json: Annotated[bool, typer.Option("--json", help="Print every trial as JSON and nothing else.")] = False,
) -> None:
    """Find the cheapest parameters of a method that lose no more than a stated accuracy.

    Every combination of the method's search space answers the tasks of each length, inside the prompt and behind it.
    The cheapest one whose accuracy stays within the loss in both goes into a profile, which `build` and `attach` load.
    Ctrl-C stops and writes the best found so far.
    """
    from sparseprefill.profiles.profile import Profile
    from sparseprefill.registry import default_registry

    from ..calibration.candidates import Candidate
    from ..calibration.fit import ranges, versions
    from ..calibration.search import Searcher
    from ..calibration.target import Target
    from . import fitted
    from .progress import bars
    from .setup import Place, Source, exams_of, identity_of, readings_of

    found = default_registry().get(method)
    path = Path(f"{method}.profile.json") if output is None else output
    check_writable("--output", path)
    candidates = [Candidate(found, one) for one in _settings(found, model, tried or (), fixed or (), recall_floor)]
    lengths = sorted(set(tokens or TOKENS))
    place = Place.of(device, dtype.value, threads)
    cost = by.of(place)
    target = Target(loss=loss, rows="end" if end else "all")
    with bars(len(lengths)) as shown, place.threaded():
        source = Source.of(model, place)
        exams = exams_of(source, lengths, texts, questions, seed)
        loaded = source.load()
        identity = identity_of(loaded, model)
        own = readings_of(loaded, source.tokenizer, identity, exams, tail)
        searches: list[Search] = []
        stop = Stop()
        for length in lengths:
            readings = own[length]
            searcher = Searcher(length, candidates, readings, target, cost, rungs=(readings.count,), repair=False)
            stop = Stop()
            with stop, shown.contender(f"{length:,} tokens") as progress:
                searches.append(searcher.run(partial(progress, "settings")))
            if stop.heard:
                searches = [one for one in (*searches, searcher.result()) if one.trials]
                break
    stop.check(len(searches))
    how: dict[str, Any] = {
        **{"by": cost, "loss": loss, "settings": len(candidates), "texts": texts, "questions": questions, "seed": seed},
        **{"tail": tail, "recall_floor": recall_floor, "device": str(place.device), "dtype": place.dtype_name},
    }
    profile = Profile(
        methods=(method,),
        model=identity,
        ranges=ranges(searches),
        versions=versions([method], default_registry()),
        tuned=how,
    )
    fitted.write(path, profile)
    if json:
        render.write_json({"profile": str(path), **how, "searches": [fitted.as_json(one) for one in searches]})
    else:
        fitted.chosen(searches, f"{method} on {identity.name}, {target}", on_cpu=place.device.type == "cpu")
        render.line(f"profile: {path}")
    stop.end(len(searches), len(lengths), "lengths")


def _settings(
    method: Method, model: str | None, tried: Sequence[str], fixed: Sequence[str], floor: Any
) -> list[dict[str, Any]]:
    from ..calibration.candidates import settings
    from ..demo.settings import PARAMETERS

    values = {name: [value_of(part) for part in text.split(",")] for name, text in map(_pair("--try"), tried)}
    given = {name: value_of(text) for name, text in map(_pair("--set"), fixed)}
    both = sorted(set(values) & set(given))
    if both:
        raise CommandError(f"--set {both[0]}: --try names it too; leave one of them out")
    # What suits the embedded model suits it here, too, apart from what is searched.
    suited = PARAMETERS.get(method.name, {}) if model is None else {}
    free = {*method.search, *values} - set(given)
    base = {name: value for name, value in suited.items() if name not in free}
    return settings(method, values, {**floored(method.name, floor), **base, **given})


def _pair(option: str) -> Any:
    def split(text: str) -> tuple[str, str]:
        name, equals, value = text.partition("=")
        if not (equals and name.strip() and value.strip()):
            raise CommandError(f"{option} {text}: write parameter=value, such as {option} theta=4")
        return name.strip(), value

    return split
