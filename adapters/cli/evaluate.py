"""The command `evaluate`: public tasks by lm-evaluation-harness, with the model's own attention and with methods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..session.defaults import TAIL
from . import render
from .files import check_writable, write
from .group import CommandError
from .kept import Stop
from .shared_options import Configs, Device, DeviceMap, Dtype, Floor, Json, Model, Profiles, Tail, Threads, Type

if TYPE_CHECKING:
    from sparseprefill.registry import Registry

    from ..evaluation.outcome import Contender
    from ..evaluation.scores import Run


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(evaluate)


def evaluate(
    model: Model = None,
    method: Annotated[list[str] | None, typer.Option(help="A method to run; repeat for several.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[METHOD.]PARAMETER=VALUE",
            help="Change a parameter; with one method you can leave out its name.",
        ),
    ] = None,
    config: Configs = None,
    profile: Profiles = None,
    tail: Tail = TAIL,
    recall_floor: Floor = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="Tasks of the harness; by default RULER's that need no network.")
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1024, help="Tokens of RULER's items, answer included; repeat for several.  [default: 4096]"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first items of each task and length, so many; RULER has 500.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Items to read at a time.")] = 1,
    stock: Annotated[bool, typer.Option(help="Also run the model with its own attention, first.")] = True,
    chat_template: Annotated[
        bool, typer.Option("--chat-template", help="Put prompts through the tokenizer's chat template.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the JSON to this file.")] = None,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Type = Dtype.AUTO,
    threads: Threads = 2,
    json: Json = False,
) -> None:
    """Score a model on public tasks, with its own attention and with methods, by lm-evaluation-harness.

    Every method gets the same items. Ctrl-C stops and shows what is finished.
    """
    from sparseprefill.registry import default_registry

    from ..evaluation import harness
    from . import evaluated
    from .progress import bars
    from .setup import Place, Source

    names, sizes = _names(tasks) or list(harness.OFFLINE), tuple(dict.fromkeys(tokens or (4096,)))
    if output is not None:
        check_writable("--output", output)
    registry = default_registry()
    compared = _contenders(
        registry, model, method or (), settings or (), config or (), profile or (), tail, recall_floor
    )
    place = Place.of(device, dtype.value, threads)
    try:
        harness.check_names(names)
    except ImportError as error:
        raise CommandError(str(error)) from error
    found: list[Run] = []
    with place.threaded():
        source = Source.of(model, place, device_map)
        tokenizer = source.tokenizer
        harness.check_tokenizer(source, tokenizer, chat_template=chat_template)
        for length in sizes:
            source.check_tokens(length, "--tokens")
        options: dict[str, Any] = {"limit": limit, "batch_size": batch_size, "chat_template": chat_template}
        with bars(len(names)) as shown, harness.loaded(source, tokenizer, names, sizes, limit, shown) as suite:
            loaded = source.load()
            harness.check(loaded, compared)
            total = len(suite) * (len(compared) + stock)
            shown.expect(total)
            with Stop() as stop:
                for run in harness.runs(loaded, tokenizer, suite, compared, stock=stock, listener=shown, **options):
                    found.append(run)
    stop.check(len(found))
    facts: dict[str, Any] = {
        "model": model or "embedded",
        "tasks": names,
        "lengths": list(sizes),
        **options,
        "device": str(place.device),
        "dtype": place.dtype_name,
        "threads": threads,
        "tail": tail,
        "recall_floor": recall_floor,
        "stopped": stop.heard,
    }
    whole = evaluated.as_json(found, facts)
    if output is not None:
        write("--output", output, render.to_json(whole) + "\n")
    if json:
        render.write_json(whole)
    else:
        evaluated.as_table(found, f"{model or 'the embedded model'}: {place}")
        if output is not None:
            render.line(f"written: {output}")
    render.broken(registry)
    stop.end(len(found), total, "runs")
    if any(run.error for run in found):
        raise typer.Exit(1)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _contenders(
    registry: Registry,
    model: str | None,
    methods: Sequence[str],
    settings: Sequence[str],
    configs: Sequence[Path],
    profiles: Sequence[Path],
    tail: int,
    floor: Any,
) -> list[Contender]:
    from .options import configured, contenders, profiled, suited

    if not (methods or configs or profiles):
        raise CommandError(
            f"nothing to compare with the stock model: pass --method, --config or --profile. Methods: "
            f"{', '.join(registry.methods())}"
        )
    names = list(dict.fromkeys(methods))
    if len(names) == 1:
        settings = [text if "." in text.partition("=")[0] else f"{names[0]}.{text}" for text in settings]
    elif settings and not names:
        raise CommandError(f"--set {settings[0]}: it changes a parameter of a method; pass --method too")
    made = contenders(registry, names, settings, suited(model), tail, floor) if names else []
    return made + configured(configs, False, tail) + profiled(profiles, tail)
