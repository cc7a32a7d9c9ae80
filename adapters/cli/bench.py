"""The command `bench`: times of the executor, of methods and of a whole model, next to dense attention."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from . import render
from .shared_options import SEEDS, Configs, Device, Dtype, Methods, Settings, Threads, Type

DEPTH = 32
"""Layers of a whole model, unless told otherwise."""


class Input(StrEnum):
    """Inputs of methods."""

    HEADS = "heads"
    RANDOM = "random"
    STRIPES = "stripes"
    SINK = "sink"
    LOCAL = "local"
    CAPTURED = "captured"


class Structure(StrEnum):
    """On what a model's layers compute their attention."""

    HEADS = "heads"
    MODEL = "model"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)


def bench(
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="A table of the benchmark page: executor, methods, curves, shapes, short, long, chunks, captured, or "
            "all."
        ),
    ] = None,
    method: Methods = None,
    settings: Settings = None,
    config: Configs = None,
    executor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MASK", help="A random mask through the executor: full, tiles:0.1, diagonal+stripes:0.05."
        ),
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=16, help="Tokens of the prompt; repeat for several.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=32, help="Head dimension.")] = 128,
    batch: Annotated[int, typer.Option(min=1, max=64, help="Batch rows, of unequal lengths.")] = 1,
    new: Annotated[
        list[int] | None,
        typer.Option(min=1, help="New tokens after cached ones: the last of --tokens; repeat for several."),
    ] = None,
    page: Annotated[int, typer.Option(min=0, help="Tokens in a page of the KV cache; 0 for plain tensors.")] = 0,
    inputs: Annotated[Input | None, typer.Option("--input", help="Inputs for the methods; by default heads.")] = None,
    gate: Annotated[bool, typer.Option("--gate", help="Let the break-even gate choose dense attention.")] = False,
    ttft: Annotated[bool, typer.Option("--ttft", help="Time a whole model's prefill instead of one layer.")] = False,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="With --ttft, layers of the model, by default 32; else layers to average over."),
    ] = None,
    structure: Annotated[
        Structure,
        typer.Option(help="With --ttft, run attention on made-up heads, or on the model's own random q and k."),
    ] = Structure.HEADS,
    rounds: Annotated[
        int, typer.Option(min=1, help="Timed runs of each case, fewer if they take long; the median counts.")
    ] = 10,
    seconds: Annotated[
        float, typer.Option(min=0.01, help="Time limit for all runs of a case, or of dense attention beside it.")
    ] = 2.0,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Chooses inputs and masks.")] = 0,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 1,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this file: speed-up and recall.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file as Markdown.")] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="Write the figures to this file as JSON; - prints only them."),
    ] = None,
) -> None:
    """Measure how long attention takes, and its speed-up over dense attention in the same run.

    Without --table, --method or --executor, every method runs at its defaults. --table all makes the tables of
    docs/benchmarks.md.
    """
    from sparseprefill.registry import default_registry

    from ..bench.clock import Clock
    from . import bench_run
    from .bench_options import Files, Wanted
    from .setup import Place

    files = Files(plot=plot, markdown=markdown, json=json)
    registry = default_registry()
    place = Place.of(device, dtype.value, threads)
    wanted = Wanted(
        tables=table or (),
        methods=method or (),
        settings=settings or (),
        configs=config or (),
        masks=executor or (),
        lengths=tokens or (),
        news=new or (),
        page=page,
        input=None if inputs is None else inputs.value,
        gate=gate,
        layers=None if ttft else layers,
        place=place,
        sizes={"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": place.dtype_name, "batch": batch},
    )
    if ttft:
        failed = bench_run.models(wanted, registry, place, files, layers or DEPTH, structure.value, rounds, seed)
    else:
        failed = bench_run.layers(wanted, registry, place, files, Clock(place.device, rounds, seconds), seed)
    render.broken(registry)
    if failed:
        raise typer.Exit(1)
