"""The command: the cases of a page's table, measured beside dense attention, with Markdown and a picture."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from sparseprefill.adapters.cli import render
from sparseprefill.adapters.cli.group import CommandError, write
from sparseprefill.adapters.cli.options import Device, Dtype, Methods, Threads, Type
from sparseprefill.adapters.cli.setup import Place

from lab.files import Files, JsonFile, MarkdownFile, command
from sparseprefill.errors import nearest
from sparseprefill.registry import default_registry

from . import facts, tables
from . import plot as pictures
from . import report as shipped
from .baseline import baseline
from .captured import inputs
from .clock import Clock
from .markdown import markdown as written
from .measure import Bench

ALL = "all"
app = command("Measure the tables of the benchmark pages.")


@app.callback(invoke_without_command=True)
def bench(
    table: Annotated[list[str], typer.Option(help=f"A table: {', '.join(tables.TABLES)}, or {ALL}.")],
    method: Methods = None,
    tokens: shipped.Tokens = None,
    heads: shipped.Heads = 32,
    kv_heads: shipped.KvHeads = 8,
    head_dim: shipped.HeadDim = 128,
    new: shipped.New = None,
    page: shipped.Page = 0,
    rounds: shipped.Rounds = 10,
    seconds: shipped.Seconds = 2.0,
    seed: shipped.Seed = 0,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 1,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this file: speed-up and recall.")] = None,
    markdown: MarkdownFile = None,
    json: JsonFile = None,
) -> None:
    """Measure how long attention takes in the cases of a table; exit status 1 where one failed."""
    files = Files(plot=plot, markdown=markdown, json=json)
    registry = default_registry()
    place = Place.of(device, dtype.value, threads)
    names = list(tables.TABLES) if ALL in table else list(dict.fromkeys(table))
    for option, value in {"--new": new, "--page": page}.items():
        if value and names != [tables.BEHIND]:
            raise CommandError(f"{option} goes with --table {tables.BEHIND} alone; leave it out")
    for name in names:
        if name not in tables.TABLES:
            raise CommandError(f"--table {name}: there is no such table{nearest(name, [*tables.TABLES, ALL])}")
    sizes: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "dtype": place.dtype_name,
        "page": page,
    }
    made = []
    for name in names:
        lengths, news = tokens or tables.lengths(name, place.device.type), dict.fromkeys(new or ()) or [None]
        shapes = [shipped.shape_of(place, length, one, **sizes) for length, one in product(lengths, news)]
        made += tables.cases(name, registry, shapes)
    wanted = [registry.get(name).name for name in method or ()]
    cases = [case for case in made if not wanted or case.name in wanted]
    if not cases:
        raise CommandError(f"--method {', '.join(wanted)}: --table {', '.join(names)} has no case of it; leave it out")
    stop, rows = shipped.run(cases, Bench(Clock(place.device, rounds, seconds), seed, baseline, inputs), place)
    stop.check(len(rows))
    if files.plot is not None:
        pictures.draw(rows, files.plot, facts.machine(place.device)["name"])
    if files.markdown is not None:
        write("--markdown", files.markdown, written(rows))
    figures = [facts.fact(row) for row in rows]
    shipped.write_figures(files.json, facts.about(place.device, seed=seed, rounds=rounds, rows=figures))
    if not files.alone:
        shipped.show(rows, place)
        for path in (files.plot, files.markdown, files.json):
            if path is not None:
                render.line(f"written: {path}")
    stop.end(len(rows), len(cases), "rows")
    if any(row.error for row in rows):
        raise typer.Exit(1)
