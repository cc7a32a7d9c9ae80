"""The command `evaluate`: public tasks by lm-evaluation-harness, with the model's own attention and with methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import asdict

from sparseprefill import __version__

from ..session.defaults import TAIL
from . import options, render
from .group import CommandError, Stop, check_writable, write
from .render import Column, Table

if TYPE_CHECKING:
    from ..evaluation.scores import Run, Score

DROP = ("tokens", "items", "time", "stderr", "won", "density", "lost")
"""Columns that a narrow terminal leaves out, in this order."""
NOTES = (
    "score: the harness's, over all items; stderr: its standard error. lost, won: items that score lower and higher "
    "than with the stock model. density: pairs computed / causal pairs of the prefills. items: how many were asked; "
    "tokens: mean length of a prompt. time: for all items, decoding included."
)


def evaluate(
    model: options.Model = None,
    method: Annotated[list[str] | None, typer.Option(help="A method to run; repeat for several.")] = None,
    settings: options.Settings = None,
    config: options.Configs = None,
    profile: options.Profiles = None,
    tail: options.Tail = TAIL,
    recall_floor: options.Floor = None,
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
    device: options.Device = "auto",
    device_map: options.DeviceMap = None,
    dtype: options.Type = options.Dtype.AUTO,
    threads: options.Threads = 2,
    json: options.Json = False,
) -> None:
    """Score a model on public tasks, with its own attention and with methods, by lm-evaluation-harness.

    Every method gets the same items. Ctrl-C stops and shows what is finished.
    """
    from sparseprefill.registry import default_registry

    from ..evaluation import harness
    from .progress import bars
    from .setup import Place, Source

    names = [name.strip() for name in (tasks or "").split(",") if name.strip()] or list(harness.OFFLINE)
    sizes = tuple(dict.fromkeys(tokens or (4096,)))
    check_writable("--output", output)
    registry = default_registry()
    if not (method or config or profile):
        raise CommandError(
            f"nothing to compare with the stock model: pass --method, --config or --profile. Methods: "
            f"{', '.join(registry.methods())}"
        )
    if settings and not method:
        raise CommandError(f"--set {settings[0]}: it changes a parameter of a method; pass --method too")
    compared = options.contenders(
        registry, method or (), settings or (), model, tail, recall_floor, config or (), profile or ()
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
        harness.check_tokenizer(tokenizer, chat_template=chat_template)
        for length in sizes:
            source.check_tokens(length)
        asked: dict[str, Any] = {"limit": limit, "batch_size": batch_size, "chat_template": chat_template}
        with bars(len(names)) as shown:
            suite = harness.loaded(source, tokenizer, names, sizes, limit, shown)
            loaded = source.load()
            total = len(suite) * (len(compared) + stock)
            shown.expect(total)
            how: dict[str, Any] = {"items": suite, "stock": stock, "listener": shown, **asked}
            facts: dict[str, Any] = {
                **{"model": model or "embedded", "tasks": names, "lengths": list(sizes)},
                **asked,
                **place.facts,
                **{"tail": tail, "recall_floor": recall_floor},
            }

            def keep(*, stopped: bool) -> dict[str, Any]:
                whole = as_json(found, {**facts, "stopped": stopped})
                if output is not None:
                    write("--output", output, render.to_json(whole) + "\n")
                return whole

            with Stop() as stop:
                for run in harness.evaluate(loaded, tokenizer, contenders=compared, **how):
                    found.append(run)
                    keep(stopped=len(found) < total)
    stop.check(len(found))
    whole = keep(stopped=stop.heard)
    if json:
        render.write_json(whole)
    else:
        render.show(_table(found, f"{model or 'the embedded model'}: {place}"))
        if output is not None:
            render.line(f"written: {output}", whole=True)
    render.broken(registry)
    stop.end(len(found), total, "runs", failed=any(run.error for run in found))


def as_json(found: Sequence[Run], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was measured."""
    from importlib.metadata import version

    return {"version": __version__, "lm_eval": version("lm_eval"), **facts, "runs": [_facts(run) for run in found]}


def _table(found: Sequence[Run], title: str) -> Table:
    """The scores, what failed or ran dense, and what the columns mean."""
    named = any(one.metric != str(run.length) for run in found for one in run.scores)
    rows = [(run, score) for run in found for score in run.scores]
    first = {one[0].title: one for one in reversed(rows)}

    def density(run: Run) -> str:
        if run.service is None:
            return ""
        return "dense" if run.service.density is None else f"{run.service.density:.1%}"

    columns: list[Column[tuple[Run, Score]]] = [
        Column("task", lambda one: one[0].title if first[one[0].title] is one else "", words=True),
        Column("method", lambda one: one[0].contender.label, words=True),
        *([Column[tuple[Run, Score]]("metric", lambda one: one[1].metric, words=True)] if named else []),
        Column("score", lambda one: f"{one[1].value:.4f}"),
        Column("stderr", lambda one: "" if one[1].stderr is None else f"{one[1].stderr:.4f}"),
        Column("lost", lambda one: "" if one[1].lost is None else str(one[1].lost)),
        Column("won", lambda one: "" if one[1].won is None else str(one[1].won)),
        Column("density", lambda one: density(one[0])),
        Column("items", lambda one: f"{one[0].items:,}"),
        Column("tokens", lambda one: f"{one[0].tokens:,.0f}"),
        Column("time", lambda one: f"{one[0].seconds:.1f} s"),
    ]
    return Table.of(columns, rows, title=title, remarks=_remarks(found), notes=NOTES, drop=DROP)


def _remarks(found: Sequence[Run]) -> list[str]:
    """Errors by contender, prefills that were not sparse with their reasons, and the harness's warnings."""
    made: dict[str, list[str]] = {}
    for run in found:
        label, service = run.contender.label, run.service
        said = [f"{label} failed: {run.error}"] if run.error else []
        zero = run.scores and all(one.value == 0 and one.higher_is_better for one in run.scores)
        if run.contender.pipeline is None and zero:
            said.append(f"{label} scores 0, so a method has nothing to lose")
        if service is not None:
            said += [f"{label} {service.doubt}"] if service.doubt else []
            said += [f"{label}: {text} ({count}x)" for text, count in service.notes.items()]
        said += [f"the harness warned, {count}x: {text}" for text, count in run.warnings.items()]
        for text in said:
            made.setdefault(text, []).append(run.title)
    return [f"{', '.join(dict.fromkeys(where))}: {what}" for what, where in made.items()]


def _facts(run: Run) -> dict[str, Any]:
    facts: dict[str, Any] = {
        **{"task": run.task, "length": run.length, "method": run.contender.name},
        **{"parameters": dict(run.contender.parameters), "error": run.error or None},
    }
    if run.error:
        return facts
    return facts | {
        **{"items": run.items, "tokens": run.tokens, "seconds": run.seconds},
        "scores": [asdict(one) for one in run.scores],
        "service": run.service and {**asdict(run.service), "doubt": run.service.doubt},
        "warnings": dict(run.warnings),
    }
