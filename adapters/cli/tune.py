"""The command `tune`: search a method's parameters on a model, and write the profile."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from sparseprefill import __version__
from sparseprefill.method import Method
from sparseprefill.profiles.profile import Profile
from sparseprefill.registry import default_registry

from . import render
from .demo import Dtype
from .group import CommandError
from .options import value_of

TOKENS = (4096, 8192, 16384)
HEADS = ("tokens", "setting", "answers", "dense", "density", "prefill", "dense prefill")


class Cost(StrEnum):
    """What a setting should have little of; AUTO is seconds on a GPU, density on a CPU."""

    AUTO = "auto"
    DENSITY = "density"
    SECONDS = "seconds"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(tune)


def tune(
    method: Annotated[str, typer.Option(help="The method to tune.")],
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="Folder or name of a transformers model; else the embedded one.")
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=256, help="Length to tune at; repeat for several.")] = None,
    tried: Annotated[
        list[str] | None, typer.Option("--try", metavar="PARAMETER=V1,V2", help="Values to search, over the method's.")
    ] = None,
    fixed: Annotated[
        list[str] | None, typer.Option("--set", metavar="PARAMETER=VALUE", help="Fix a parameter for every setting.")
    ] = None,
    loss: Annotated[float, typer.Option(min=0.0, max=0.99, help="Share of dense's accuracy that may be lost.")] = 0.01,
    by: Annotated[Cost, typer.Option(help="What to save; by default seconds on a GPU, density on a CPU.")] = Cost.AUTO,
    texts: Annotated[int, typer.Option(min=1, help="Texts of each length.")] = 2,
    questions: Annotated[int, typer.Option(min=1, max=16, help="Questions of each family about a text.")] = 4,
    seed: Annotated[int, typer.Option(help="Chooses the texts; `demo` uses others by default.")] = 1000,
    output: Annotated[Path | None, typer.Option(help="Where the profile goes; by default METHOD.profile.json.")] = None,
    device: Annotated[str, typer.Option(help="Such as cpu or cuda:0; by default a GPU if there is one.")] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="By default float32 on a CPU, bfloat16 on a GPU.")] = Dtype.AUTO,
    threads: Annotated[int, typer.Option(min=1, help="Threads on a CPU.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print every trial as JSON and nothing else.")] = False,
) -> None:
    """Find the cheapest parameters of a method that lose no more than a stated accuracy.

    Every combination of the method's search space answers the tasks of each length; the cheapest one whose accuracy
    stays within the loss goes into a profile, which `build` and `attach` load.
    """
    from ..calibration import search as tuning
    from .progress import bars
    from .setup import Place, measure_of

    found = default_registry().get(method)
    path = Path(f"{method}.profile.json") if output is None else output
    if not path.absolute().parent.is_dir():
        raise CommandError(f"--output {path}: there is no folder {path.absolute().parent}")
    settings = _settings(found, model, tried or (), fixed or ())
    lengths = sorted(set(tokens or TOKENS))
    place = Place.of(device, dtype.value, threads)
    cost: tuning.By = "seconds" if by == Cost.SECONDS or (by == Cost.AUTO and place.device.type != "cpu") else "density"
    with bars(len(lengths)) as shown, place.threaded():
        measure, identity = measure_of(model, lengths, texts, questions, seed, place)
        searches = []
        for length in lengths:
            with shown.contender(f"{length:,} tokens") as progress:
                step = partial(progress, "settings")
                one = tuning.search(found, length, measure, settings, by=cost, loss=loss, progress=step)
                searches.append(one)
    how: dict[str, Any] = {
        **{"by": cost, "loss": loss, "settings": len(settings), "texts": texts, "questions": questions, "seed": seed},
        **{"device": str(place.device), "dtype": place.dtype_name},
    }
    profile = Profile(
        method=method, model=identity, ranges=tuning.ranges(searches), versions=_versions(found), tuned=how
    )
    try:
        path.write_text(profile.to_json(), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--output {path}: {error.strerror}") from error
    if json:
        from attrs import asdict

        render.write_json({"profile": str(path), **how, "searches": [asdict(one) for one in searches]})
        return
    render.table(HEADS, [_row(one) for one in searches], right=HEADS[2:], title=f"{method} on {identity.name}")
    for one in searches:
        if one.chosen is None:
            render.line(
                f"{one.tokens:,} tokens: no setting is within a loss of {loss:g}; calls of this length run dense"
            )
    render.line(f"profile: {path}")


def _settings(method: Method, model: str | None, tried: Sequence[str], fixed: Sequence[str]) -> list[dict[str, Any]]:
    from ..calibration import search as tuning
    from ..demo.settings import PARAMETERS

    values = {name: [value_of(part) for part in text.split(",")] for name, text in map(_pair("--try"), tried)}
    given = {name: value_of(text) for name, text in map(_pair("--set"), fixed)}
    both = sorted(set(values) & set(given))
    if both:
        raise CommandError(f"--set {both[0]}: --try names it, too")
    # What suits the embedded model suits it here, too, apart from what is searched.
    suited = PARAMETERS.get(method.name, {}) if model is None else {}
    free = {*method.search, *values} - set(given)
    base = {name: value for name, value in suited.items() if name not in free}
    return tuning.settings(method, values, {**base, **given})


def _pair(option: str) -> Any:
    def split(text: str) -> tuple[str, str]:
        name, equals, value = text.partition("=")
        if not (equals and name.strip() and value.strip()):
            raise CommandError(f"{option} {text}: write parameter=value, such as {option} theta=4")
        return name.strip(), value

    return split


def _row(one: Any) -> tuple[str, ...]:
    dense = (f"{one.dense.right} / {one.dense.asked}", f"{one.dense.seconds:.2f} s")
    if one.chosen is None:
        return f"{one.tokens:,}", "none", "", dense[0], "", "", dense[1]
    did = one.chosen.measured
    setting = ", ".join(f"{name}={value}" for name, value in one.chosen.parameters.items())
    answers, density = f"{did.right} / {did.asked}", f"{did.density:.1%}"
    return f"{one.tokens:,}", setting, answers, dense[0], density, f"{did.seconds:.2f} s", dense[1]


def _versions(method: Method) -> dict[str, str]:
    owner = next((record for record in default_registry().plugins() if method.name in record.methods), None)
    names = {"torch", "transformers"} | ({owner.distribution} if owner else set())
    found = {"sparseprefill": __version__, "python": platform.python_version()}
    for name in sorted(names - set(found)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
