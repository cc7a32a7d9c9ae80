"""The command: our executor beside other people's kernels, and the tables of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from sparseprefill.adapters.cli import render
from sparseprefill.adapters.cli.group import CommandError, Stop, write
from sparseprefill.adapters.cli.options import SEEDS, Device, Dtype, Threads, Type
from sparseprefill.adapters.cli.progress import bars
from sparseprefill.adapters.cli.render import Table
from sparseprefill.adapters.cli.setup import Place

from lab.bench import facts
from lab.bench.case import parse_mask
from lab.bench.clock import Clock
from lab.bench.report import LENGTHS, shape_of, write_figures
from lab.files import Files, command
from sparseprefill.errors import ParameterError

from . import tables
from .peers import OURS
from .scoreboard import MASKS, Score, Scoreboard

HEADS = ("kernel", "mask", "density", "ms", "TFLOP/s", "eff.", "plan", "off")
DROP = ("off", "plan", "TFLOP/s", "density")
"""Columns that a narrow terminal leaves out, in this order."""
NOTES = (
    "ms: median time, by the device's clock. TFLOP/s: counts the pairs that the mask selects. eff.: density x the "
    "fastest dense kernel's time / time, that is pairs per second as a share of that kernel's. plan: ms that a kernel "
    "needs to make its lists from the mask's maps, not part of ms. off: difference of 128 output rows from attention "
    "in float32, as a share of the norm."
)
ON_CPU = (
    "These are times on a CPU, where FlexAttention runs uncompiled and computes every pair. They say nothing about the "
    "kernels, which need a GPU."
)
FEATURES = (
    "causal, by tile: the kernel cannot leave out pairs inside a tile. fp8: the kernel computes in fp8; caches: it "
    "only reads keys and values in fp8. waits: how often planning and one run waited for the device."
)


app = command("Measure the executor beside other packages' kernels, on the same random masks in one run.")


@app.callback(invoke_without_command=True)
def peers(
    executor: Annotated[
        list[str] | None,
        typer.Option(metavar="MASK", help="A random mask: full, tiles:0.1, diagonal+stripes:0.05; by default seven."),
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=16, help="Tokens of the prompt; repeat for several.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=32, help="Head dimension.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each kernel; the median counts.")] = 10,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time limit for all runs of a kernel on a mask.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Chooses inputs and masks.")] = 0,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 1,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file as Markdown.")] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="Write the figures to this file as JSON; - prints only them."),
    ] = None,
) -> None:
    """Measure every kernel that is here. Exit status 1 where ours failed on any mask."""
    files = Files(markdown=markdown, json=json)
    place = Place.of(device, dtype.value, threads)
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": place.dtype_name}
    try:
        masks = [parse_mask(text) for text in dict.fromkeys(executor or MASKS)]
    except ParameterError as error:
        raise CommandError(str(error)) from error
    lengths = dict.fromkeys(tokens or LENGTHS.get(place.device.type, LENGTHS["cpu"]))
    shapes = [shape_of(place, one, **sizes) for one in lengths]
    clock = Clock(place.device, rounds, seconds)
    board = Scoreboard(clock, masks, seed)
    scores: list[Score] = []
    with bars(board.steps * len(shapes)) as shown, place.threaded(), Stop() as stop:
        for shape in shapes:
            turn: list[Any] = []

            def step(name: str, length: int = shape.length, turn: list[Any] = turn) -> None:
                _next(turn, shown.contender(f"{name}, {length:,} tokens"))

            try:
                scores += board.run(shape, step)
            finally:
                _next(turn)
    stop.check(len(scores))
    _write(scores, board, place, files, clock, seed)
    stop.end(len({score.shape for score in scores}), len(shapes), "lengths")
    if any(score.error or score.refused for score in scores if score.kernel == OURS):
        raise typer.Exit(1)


def _next(turn: list[Any], context: Any = None) -> None:
    """Ends the bar of one kernel and begins another's."""
    if turn:
        turn.pop().__exit__(None, None, None)
    if context is not None:
        context.__enter__()("measuring", 0, 1)
        turn.append(context)


def _write(scores: Sequence[Score], board: Scoreboard, place: Place, files: Files, clock: Clock, seed: int) -> None:
    device = place.device
    if files.markdown is not None:
        write("--markdown", files.markdown, tables.markdown(scores, board.peers, device))
    if files.json is not None:
        found = facts.about(
            device,
            seed=seed,
            rounds=clock.rounds,
            scores=[tables.fact(score) for score in scores],
            peers=tables.features(board.peers, scores, device),
        )
        write_figures(files.json, found)
        if files.alone:
            return
    for group in tables.by_length(scores):
        title, rows = tables.title(group[0]), [*map(tables.cells, tables.shown(group))]
        render.show(Table(title=title, heads=HEADS, rows=rows, remarks=[*tables.remarks(group)], drop=DROP))
    render.line(NOTES + (f" {ON_CPU}" if device.type == "cpu" else ""), style="dim")
    features = tables.feature_cells(board.peers, scores, device)
    absent = tables.absent(board.peers, device)
    title = "features on Hopper"
    render.show(Table(title=title, heads=tables.FEATURES, rows=features, remarks=absent, notes=FEATURES))
    for path in (files.markdown, files.json):
        if path is not None:
            render.line(f"written: {path}")
