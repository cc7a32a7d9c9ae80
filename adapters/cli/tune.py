"""The command `tune`: search one method's parameters by answers, and write the profile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..session.defaults import TAIL
from .files import check_writable
from .group import CommandError
from .options import floored, suited, value_of
from .shared_options import (
    SEEDS,
    AtEnd,
    Cost,
    Device,
    Dtype,
    Floor,
    Least,
    Lengths,
    Minutes,
    Model,
    Tail,
    Threads,
    Trials,
    Type,
)

if TYPE_CHECKING:
    from sparseprefill.method import Method

TOKENS = (4096, 8192, 16384)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(tune)


def tune(
    method: Annotated[str, typer.Option(help="The method to tune.")],
    model: Model = None,
    tokens: Lengths = None,
    tried: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="PARAMETER=V1,V2", help="Values to search instead of the method's own."),
    ] = None,
    fixed: Annotated[
        list[str] | None, typer.Option("--set", metavar="PARAMETER=VALUE", help="Fix a parameter for every setting.")
    ] = None,
    loss: Annotated[float, typer.Option(min=0.0, max=0.99, help="Share of dense's accuracy that you can lose.")] = 0.01,
    end: AtEnd = False,
    minutes: Minutes = None,
    by: Least = Cost.AUTO,
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
    json: Trials = False,
) -> None:
    """Find the cheapest parameters of a method that lose no more than a stated accuracy.

    Every combination of the method's search space answers the tasks of each length, inside the prompt and behind it.
    The cheapest one whose accuracy stays within the loss in both goes into a profile, which `build` and `attach` load.
    Ctrl-C stops and writes the best found so far.
    """
    from sparseprefill.registry import default_registry

    from ..calibration.candidates import Candidate
    from ..calibration.target import Target
    from .exams import exams_of, readings_of
    from .fitted import Run
    from .progress import bars
    from .setup import Place, Source, identity_of

    registry = default_registry()
    found = registry.get(method)
    path = Path(f"{method}.profile.json") if output is None else output
    check_writable("--output", path)
    candidates = [Candidate(found, one) for one in _settings(found, model, tried or (), fixed or (), recall_floor)]
    lengths = sorted(set(tokens or TOKENS))
    place = Place.of(device, dtype.value, threads)
    until = None if minutes is None else time.monotonic() + 60.0 * minutes
    with bars(len(lengths)) as shown, place.threaded():
        source = Source.of(model, place)
        exams = exams_of(source, lengths, texts, questions, seed)
        loaded = source.load()
        identity = identity_of(loaded, model)
        run = Run(
            target=Target(loss=loss, rows="end" if end else "all"),
            by=by.of(place.device.type),
            methods=(method,),
            identity=identity,
            output=path,
            place=place,
            how={"loss": loss, "texts": texts, "questions": questions, "seed": seed, "minutes": minutes}
            | {"tail": tail, "recall_floor": recall_floor},
        )
        own = readings_of(loaded, source, identity, exams, tail)
        stop = run.over(lengths, own, candidates, until, shown, rungs=(texts,), repair=False)
    run.report(registry, f"{method} on {identity.name}, {run.target}", json=json)
    stop.end(len(run.searches), len(lengths), "lengths")


def _settings(
    method: Method, model: str | None, tried: Sequence[str], fixed: Sequence[str], floor: Any
) -> list[dict[str, Any]]:
    from ..calibration.candidates import settings

    values = {name: [value_of(part) for part in text.split(",")] for name, text in map(_pair("--try"), tried)}
    given = {name: value_of(text) for name, text in map(_pair("--set"), fixed)}
    both = sorted(set(values) & set(given))
    if both:
        raise CommandError(f"--set {both[0]}: --try names it too; leave one of them out")
    # What suits the embedded model suits it here, too, apart from what is searched.
    free = {*method.search, *values} - set(given)
    base = {name: value for name, value in suited(model).get(method.name, {}).items() if name not in free}
    return settings(method, values, {**floored(method.name, floor), **base, **given})


def _pair(option: str) -> Any:
    def split(text: str) -> tuple[str, str]:
        name, equals, value = text.partition("=")
        if not (equals and name.strip() and value.strip()):
            raise CommandError(f"{option} {text}: write parameter=value, such as {option} theta=4")
        return name.strip(), value

    return split
