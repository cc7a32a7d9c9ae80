"""The command `bench`: times of methods, of the executor and of a whole model, next to dense attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options, render
from .files import check_writable, write
from .group import CommandError, Stop
from .render import Column, Table

if TYPE_CHECKING:
    from sparseprefill.registry import Registry

    from ..bench.case import Case
    from ..bench.measure import Bench, Row
    from ..bench.shape import ModelShape, Shape
    from ..bench.ttft import Timed
    from .setup import Place

DEPTH = 32
"""Layers of a whole model, unless told otherwise."""
LENGTHS = {"cuda": (32768, 131072), "cpu": (512, 1024)}
"""Lengths unless told otherwise, and those of a whole model's prompt."""
PROMPTS = {"cuda": (32768, 65536, 131072), "cpu": (256,)}
FIXED = 0.1
"""Density of the random tiles that run beside the methods in a whole model."""
ROUNDS = 3
"""Timed prefills of a whole model, at most."""
DROP = ("mask", "eff.", "rows", "recall", "lowest", "density")
"""Columns that a narrow terminal leaves out, in this order."""
NOTES = (
    "ms: median time of the whole call, by the device's clock; mask: the part of it until the mask is there. density: "
    "pairs computed / causal pairs. speed-up: dense attention's time, measured beside the row, / this time. eff.: "
    "density x speed-up. recall: share of the attention mass kept, exact, mean over heads and 64 sampled rows; "
    "rows: 1st percentile of these rows; lowest: lowest mean of a head."
)
ON_CPU = (
    " These are times on a CPU, where PyTorch's own fused attention runs over gathered keys. They say nothing about "
    "the kernels, which need a GPU."
)
TTFT_NOTES = (
    "Random weights attend to nothing in particular, so each layer's attention runs on q and k of made-up heads "
    "instead of its own. speed-up: the stock model's time / this time. density: pairs computed / causal pairs, mean "
    "over layers."
)
COLUMNS: tuple[Column[Row], ...] = (
    Column("ms", lambda row: f"{row.seconds * 1e3:.4g}"),
    Column("mask", lambda row: "" if row.estimate is None else f"{row.estimate * 1e3:.3g}"),
    Column("density", lambda row: f"{row.density * 100:.3g}%"),
    Column("speed-up", lambda row: f"{row.speedup:.2f}"),
    Column("eff.", lambda row: f"{row.efficiency:.2f}"),
    Column("recall", lambda row: "" if row.recall is None else f"{row.recall:.3f}"),
    Column("rows", lambda row: "" if row.row_p1 is None else f"{row.row_p1:.3f}"),
    Column("lowest", lambda row: "" if row.lowest is None else f"{row.lowest:.3f}"),
)
TTFT: tuple[Column[Timed], ...] = (
    Column("method", lambda one: one.name),
    Column("seconds", lambda one: f"{one.seconds:.3f}"),
    Column("speed-up", lambda one: f"{one.speedup:.2f}"),
    Column("density", lambda one: "" if one.density is None else f"{one.density:.4f}"),
)


class Input(StrEnum):
    """Inputs of methods."""

    HEADS = "heads"
    RANDOM = "random"
    STRIPES = "stripes"
    SINK = "sink"
    LOCAL = "local"


Tokens = Annotated[list[int] | None, typer.Option(min=16, help="Tokens of the prompt; repeat for several.")]
Heads = Annotated[int, typer.Option(min=1, help="Query heads.")]
KvHeads = Annotated[int, typer.Option(min=1, help="KV heads.")]
HeadDim = Annotated[int, typer.Option(min=32, help="Head dimension.")]
New = Annotated[
    list[int] | None,
    typer.Option(min=1, help="New tokens after cached ones: the last of --tokens; repeat for several."),
]
Page = Annotated[int, typer.Option(min=0, help="Tokens in a page of the KV cache; 0 for plain tensors.")]
Rounds = Annotated[
    int, typer.Option(min=1, help="Timed runs of each case, fewer if they take long; the median counts.")
]
Seconds = Annotated[
    float, typer.Option(min=0.01, help="Time limit for all runs of a case, or of dense attention beside it.")
]
Seed = Annotated[int, typer.Option(min=0, max=options.SEEDS, help="Chooses inputs and masks.")]


def bench(
    method: options.Methods = None,
    settings: options.Settings = None,
    config: options.Configs = None,
    executor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MASK", help="A random mask through the executor: full, tiles:0.1, diagonal+stripes:0.05."
        ),
    ] = None,
    tokens: Tokens = None,
    heads: Heads = 32,
    kv_heads: KvHeads = 8,
    head_dim: HeadDim = 128,
    new: New = None,
    page: Page = 0,
    inputs: Annotated[Input, typer.Option("--input", help="Inputs for the methods.")] = Input.HEADS,
    gate: Annotated[bool, typer.Option("--gate", help="Let the break-even gate choose dense attention.")] = False,
    ttft: Annotated[bool, typer.Option("--ttft", help="Time a whole model's prefill instead of one layer.")] = False,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="With --ttft, layers of the model, by default 32; else layers to average over."),
    ] = None,
    rounds: Rounds = 10,
    seconds: Seconds = 2.0,
    seed: Seed = 0,
    device: options.Device = "auto",
    dtype: options.Type = options.Dtype.AUTO,
    threads: options.Threads = 1,
    json: options.JsonFile = None,
) -> None:
    """Measure how long attention takes, and its speed-up over dense attention in the same run.

    Without --method or --executor, every method runs at its defaults.
    """
    from sparseprefill.registry import default_registry

    from ..bench import facts
    from ..bench.clock import Clock
    from ..bench.measure import Bench
    from .setup import Place

    alone = check_json(json)
    registry = default_registry()
    place = Place.of(device, dtype.value, threads)
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": place.dtype_name}
    names = list(dict.fromkeys(method or ())) or ([] if config else options.every(registry))
    changed = options.changes([registry.get(name).name for name in names], settings or ())
    more: dict[str, Any] = {"input": inputs.value, "gate": gate}
    rows: list[Row] = []
    timed: list[Timed] = []
    model: ModelShape | None = None
    if ttft:
        given = {"--executor": executor, "--new": new, "--page": page, "--gate": gate}
        for option in (option for option, value in given.items() if value):
            raise CommandError(f"{option} cannot be combined with --ttft; leave one of them out")
        cases = _methods(registry, changed, config or (), [shape_of(place, 16, **sizes)], None, more)
        fixed = not (method or config)
        model = _model(sizes, layers or DEPTH)
        lengths = dict.fromkeys(tokens or PROMPTS.get(place.device.type, PROMPTS["cpu"]))
        stop, timed = _prefills(model, cases, lengths, fixed, place, min(rounds, ROUNDS), seed)
        done, of, what = len({one.tokens for one in timed}), len(lengths), "lengths"
    else:
        shapes = [
            shape_of(place, length, one, page=page, **sizes)
            for length, one in product(
                tokens or LENGTHS.get(place.device.type, LENGTHS["cpu"]), dict.fromkeys(new or ()) or [None]
            )
        ]
        cases = _masks(executor or (), shapes)
        if not executor or method or config or settings:
            cases += _methods(registry, changed, config or (), shapes, layers, more)
        stop, rows = run(cases, Bench(Clock(place.device, rounds, seconds), seed), place)
        done, of, what = len(rows), len(cases), "rows"
    stop.check(done)
    found = facts.about(
        place.device,
        **{"seed": seed, "rounds": rounds, "rows": [facts.fact(row) for row in rows]},
        ttft=[_timed(one) for one in timed],
    )
    write_figures(json, found)
    if not alone:
        if model is not None:
            for length in dict.fromkeys(one.tokens for one in timed):
                render.show(_ttft([one for one in timed if one.tokens == length], model, place))
        show(rows, place)
        if json is not None:
            render.line(f"written: {json}")
    render.broken(registry)
    stop.end(done, of, what)
    if any(row.error for row in rows) or any(one.error for one in timed):
        raise typer.Exit(1)


def check_json(path: Path | None) -> bool:
    """Whether JSON is all that is printed; CommandError, before any work is done, for a file that cannot be written."""
    alone = str(path) == "-"
    if path is not None and not alone:
        check_writable("--json", path)
    return alone


def write_figures(path: Path | None, found: Any) -> None:
    """Write JSON to the file of --json, to standard output for ``-``, nowhere for None."""
    if str(path) == "-":
        render.write_json(found)
    elif path is not None:
        write("--json", path, render.to_json(found) + "\n")


def shape_of(place: Place, length: int, new: int | None = None, **sizes: Any) -> Shape:
    """The shape of a call of so many tokens; CommandError for one that cannot be or does not fit into memory."""
    from sparseprefill.errors import ParameterError

    from ..bench.shape import Shape

    try:
        shape = Shape(length=length, new=new, **sizes)
    except ParameterError as error:
        raise CommandError(str(error)) from error
    place.check_room("--tokens", length, shape.bytes_per_token, "a call of so many", least=16)
    place.check_room("--page", shape.page, shape.bytes_per_token, "a call of so many")
    return shape


def run(cases: Sequence[Case], bench: Bench, place: Place) -> tuple[Stop, list[Row]]:
    """Measure one layer's attention, case by case; Ctrl-C ends it with what there is."""
    from .progress import bars

    rows: list[Row] = []
    with bars(len(cases)) as shown, place.threaded(), Stop() as stop:
        for case in cases:
            with shown.contender(str(case)) as progress:
                progress("measuring", 0, 1)
                rows.append(bench.measure(case))
    return stop, rows


def show(rows: Sequence[Row], place: Place) -> None:
    """Print a table for each title that rows have in common, and what the columns mean."""
    for group in grouped(rows):
        render.show(table(group))
    if rows:
        render.line(NOTES + (ON_CPU if place.device.type == "cpu" else ""), style="dim")


def grouped(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that belong under one title, in the order of their coming."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(title(row), []).append(row)
    return list(found.values())


def title(row: Row) -> str:
    """What the rows of one table have in common: its name, the length, sizes and inputs."""
    case = row.case
    sizes = f"{case.shape.length:,} tokens, {case.shape}, inputs {case.input}"
    return f"{case.table}: {sizes}" if case.table else sizes


def table(group: Sequence[Row]) -> Table:
    """Rows under one title; the parameters of a method stand under its name."""

    def label(row: Row) -> str:
        name = f"{row.case.name}, gated" if row.case.gate else row.case.name
        return "\n".join([name, *(f"  {key}={value}" for key, value in row.case.parameters.items())])

    remarks = [dense_text(group)]
    for row in group:
        remarks += [f"{row.case.label} failed: {row.error}"] if row.error else []
        remarks += [f"{row.case.label} ran dense: {row.note}"] if row.note else []
    most = max(group, key=lambda row: row.extra or 0)
    if most.extra:
        parts = f", in {most.parts} parts" if most.parts > 1 else ""
        remarks.append(f"most memory beyond inputs and result: {most.extra / 2**30:.2f} GiB, {most.case.label}{parts}")
    columns = (Column("what", label), *COLUMNS)
    return Table.of(columns, group, lambda row: row.error, title=title(group[0]), drop=DROP, remarks=remarks)


def dense_text(rows: Sequence[Row]) -> str:
    """Dense attention's kernel and times beside the rows."""
    times = [row.dense * 1e3 for row in rows if not row.error]
    if not times:
        return "nothing measured"
    kernel = next(row.baseline for row in rows if not row.error)
    span = f"{min(times):.2f}" if min(times) == max(times) else f"{min(times):.2f} to {max(times):.2f}"
    return f"dense ({kernel}): {span} ms beside the rows"


def _masks(texts: Sequence[str], shapes: Sequence[Shape]) -> list[Case]:
    from sparseprefill.errors import ParameterError

    from ..bench.case import of_mask

    try:
        return [of_mask(text, shape) for shape in shapes for text in texts]
    except ParameterError as error:
        raise CommandError(str(error)) from error


def _methods(
    registry: Registry,
    changed: dict[str, dict[str, Any]],
    configs: Sequence[Path],
    shapes: Sequence[Shape],
    layers: int | None,
    more: dict[str, Any],
) -> list[Case]:
    """Methods and configurations at every shape. layers: of a prefill that a figure is the mean of."""
    from sparseprefill.config import from_config
    from sparseprefill.route import Route

    from ..bench.case import LAYERS, Case, of_method

    configured = [(str(path), from_config(path)) for path in configs]
    made: list[Case] = []
    for shape in shapes:
        made += [
            of_method(registry, name, shape, parameters=given, layers=layers, **more) for name, given in changed.items()
        ]
        for path, pipeline in configured:
            needed = max(LAYERS.get(one.name, 1) for one in Route.of(pipeline).known)
            found = {"name": pipeline.name, "pipeline": pipeline, "parameters": {"config": path}, **more}
            made.append(Case(shape=shape, layers=layers or needed, **found))
    return made


def _prefills(
    shape: ModelShape,
    cases: Sequence[Case],
    lengths: Iterable[int],
    fixed: bool,
    place: Place,
    rounds: int,
    seed: int,
) -> tuple[Stop, list[Timed]]:
    """Measure a whole model's prefill at every length. fixed: also with random tiles."""
    from sparseprefill.route import gated

    from ..bench.ttft import Prefill, tiles
    from .progress import bars

    contenders = [(case.label, gated(case.pipeline, None)) for case in cases if case.pipeline is not None]
    contenders += [(f"random tiles {FIXED:g}", gated(tiles(FIXED), None))] if fixed else []
    listed = list(lengths)
    timed: list[Timed] = []
    for tokens in listed:
        place.check_room("--tokens", tokens, shape.bytes_per_token, "a prefill of so many", least=16)
    how: dict[str, Any] = {"shape": shape, "device": place.device, "rounds": rounds}
    with bars(len(listed)) as shown, place.threaded(), Stop() as stop:
        for tokens in listed:
            with shown.contender(f"{tokens:,} tokens") as progress:
                try:
                    timed += Prefill(tokens=tokens, seed=seed, **how).run(contenders, progress)
                except ModuleNotFoundError as error:
                    if (error.name or "").split(".")[0] != "transformers":
                        raise
                    raise CommandError('--ttft needs transformers: pip install "sparseprefill[hf]"') from error
    return stop, timed


def _model(sizes: dict[str, Any], depth: int) -> ModelShape:
    from ..bench.shape import ModelShape

    hidden = sizes["heads"] * sizes["head_dim"]
    return ModelShape(layers=depth, hidden=hidden, inner=hidden * 7 // 2, **sizes)


def _timed(one: Timed) -> dict[str, Any]:
    from attrs import asdict

    return {**asdict(one), "speedup": one.speedup, "error": one.error or None}


def _ttft(timed: Sequence[Timed], shape: ModelShape, place: Place) -> Table:
    """Times of whole models on prompts of one length."""
    known = "Llama-3-8B's shape" if shape.hidden == 4096 else f"width {shape.hidden}"
    remarks = [f"{one.name} failed: {one.error}" for one in timed if one.error]
    remarks += [f"{one.name}: {n} layers ran dense: {why}" for one in timed for why, n in one.dense_layers.items()]
    return Table.of(
        TTFT,
        timed,
        lambda one: one.error,
        title=f"first token of {timed[0].tokens:,}, {shape.layers} layers of {known}, {shape.dtype}, random weights",
        remarks=remarks,
        notes=TTFT_NOTES + (ON_CPU if place.device.type == "cpu" else ""),
    )
