"""The command `calibrate`: times dense and sparse attention on this machine, and writes the break-even table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import asdict

from ..session.defaults import TAIL
from . import options, render
from .group import CommandError, check_writable, write
from .render import Column, Table

if TYPE_CHECKING:
    import torch

    from sparseprefill.breakeven.points import HeadShape, Point
    from sparseprefill.breakeven.table import BreakEven

HEADS = {"cpu": (4, 2, 64), "cuda": (32, 8, 128)}
"""Query heads, KV heads and head dimension unless told otherwise: the embedded model's, and a common model of 8B."""
LENGTHS = {"cpu": (512, 1024, 2048, 4096), "cuda": (1024, 2048, 4096, 8192, 16384, 32768, 65536)}
CHUNKS = {"cpu": (1024,), "cuda": (2048, 8192)}
"""Rows: on a GPU those of transformers' and of servers' usual steps."""
REPEATS = {"cpu": 3, "cuda": 8}
SECONDS = {"cpu": 1.0, "cuda": 0.3}
"""Time that the runs of one piece of work may take in all; two count in any case. On a GPU each is a step of layers."""
TIMED: Mapping[str, Mapping[str, Any]] = {"kascade": {"dense_layers": 0}}
"""Parameters besides the defaults: of kascade a layer that chooses is timed, and not the dense one."""
DOUBT = (
    "{methods}: too dense on these inputs to be faster at any length, so counted with half of the pairs: density "
    "depends on your model, not on the length. If you use other parameters, calibrate with --set."
)
KEPT = (
    "Times were those of a layer in a step of {kept}, and are now of one in {layers}: what was not timed now keeps its "
    "speed-up as it was. Without --append all is timed anew."
)


def calibrate(
    method: options.Methods = None,
    settings: options.Settings = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads; 32 on a GPU, 4 on a CPU.")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads; 8 on a GPU, 2 on a CPU.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Head dimension; 128 on a GPU, 64 on a CPU.")] = None,
    dtype: options.Type = options.Dtype.AUTO,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=16, help="Tokens of a call; repeat for several. By default 1K to 64K, on a CPU 512 to 4K."),
    ] = None,
    chunk: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Rows of a prompt's last chunk, timed too; repeat for several, 0 for none. By default 2048 and 8192, "
            "on a CPU 1024.",
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=2, help="Timed runs of each, on a GPU of a step of layers; the fastest counts.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "--out", "-o", help="Write the table to this file.")] = Path(
        "breakeven.json"
    ),
    append: Annotated[
        bool,
        typer.Option(
            "--append",
            help="Keep the file's other shapes, and this shape's other methods and sizes. Methods that were not timed "
            "now keep their speed-up.",
        ),
    ] = False,
    device: options.Device = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Threads on a CPU; use as many as your calls will have.")] = 1,
    json: options.Json = False,
) -> None:
    """Measure from which length on each method is faster than dense attention on this machine.

    Times dense attention, the sparse executor and the methods by length, and writes the table by which `attach` and
    `build` decide whether a call is worth running sparse.
    """
    from sparseprefill import structure
    from sparseprefill.breakeven.points import lines
    from sparseprefill.registry import default_registry

    from ..calibration import measure
    from ..calibration.measure import Clock, HeadSizes
    from .progress import bars
    from .setup import Place

    check_writable("--output", output)
    place = Place.of(device, dtype.value, threads)
    kind = place.device.type if place.device.type in HEADS else "cpu"
    usual = HEADS[kind]
    shape = HeadSizes(
        heads=heads or usual[0], kv_heads=kv_heads or usual[1], head_dim=head_dim or usual[2], dtype=place.dtype_name
    )
    registry = default_registry()
    names = [one.name for one in options.chosen(registry, method)]
    parameters = {
        name: {**registry.get(name).stand_in, **TIMED.get(name, {}), **given}
        for name, given in options.changes(names, settings or ()).items()
    }
    structure.check_finite(parameters, "")  # a table holds nothing else
    before = _before(output, place.device, threads) if append else None
    rows = CHUNKS[kind] if chunk is None else filter(None, chunk)
    sizes = measure.sizes(tokens or LENGTHS[kind], rows)
    for count in tokens or LENGTHS[kind]:
        place.check_room("--tokens", count, shape.bytes_per_token, "a call of so many", least=16)
    clock = Clock(place.device, repeats or REPEATS[kind], SECONDS[kind])
    # On a GPU with the last rows dense, as hosts have them: there a chunk waits for those.
    tail = TAIL if kind == "cuda" else 0
    pipelines = {name: registry.build(name, **given).with_tail(tail) for name, given in parameters.items()}
    with bars(1) as shown, place.threaded(), shown.contender(str(shape)) as progress:
        found = measure.calibrate(shape, sizes, pipelines, clock, progress)
    told: Mapping[str, Any] = {} if before is None else before.measured
    kept = None if before is None else told.get("kept_layers") or told.get("layers", 1)
    of_others = {name: given for name, given in told.get("parameters", {}).items() if name not in parameters}
    how: dict[str, Any] = {
        "parameters": {**of_others, **{name: given for name, given in parameters.items() if given}},
        **clock.told,
        **({} if kept in (None, clock.layers) else {"kept_layers": kept}),
        **({"threads": threads} if place.device.type == "cpu" else {}),
    }
    made = measure.table_of([found.shape], place.device, how, before)
    write("--output", output, made.to_json())
    if json:
        render.write_json(
            {
                "device": str(made.device),
                "versions": dict(made.versions),
                "measured": dict(made.measured),
                **asdict(found.shape, filter=lambda part, _: part.name != "points"),
                "worth_from": {name: made.length(name, found.shape) for name in pipelines},
                "ratios": {name: [asdict(one) for one in lines(found.shape, name)] for name in pipelines},
                "failed": dict(found.failed),
                "output": str(output),
            }
        )
        return
    _show(made, found.shape, list(pipelines))
    for name, reason in found.failed.items():
        render.line(f"{name} failed at {reason}")
    if "kept_layers" in how:
        render.line(KEPT.format(kept=kept, layers=clock.layers), style="dim")
    render.line(f"table: {output}", whole=True)


def _before(path: Path, device: torch.device, threads: int) -> BreakEven:
    from sparseprefill.breakeven.table import BreakEven, device_kind

    found, here = BreakEven.load(path), device_kind(device)
    if not found.device.like(here):
        raise CommandError(f"--append: {path} is a {found}, this is {here}: write to another file")
    those = found.measured.get("threads", threads)
    if here.type == "cpu" and those != threads:
        raise CommandError(f"--append: {path} was timed with --threads {those}: pass that, or write to another file")
    return found


def _show(table: BreakEven, shape: HeadShape, methods: Sequence[str]) -> None:
    """Print whole prompts, then chunks: the predicted speed-up over dense attention at the sizes measured."""
    from sparseprefill.breakeven.points import too_dense

    whole = [point for point in shape.points if point.whole]

    def worth(name: str) -> str:
        least = table.length(name, shape)
        return f"not up to {max(point.keys for point in whole):,}" if least is None else f"from {least:,}"

    first = Column[str]("worth it", lambda name: worth(name) if name else "", words=True)
    _part(shape, methods, whole, f"{shape} on {table.device}: speed-up over dense", first)
    for queries in sorted({point.queries for point in shape.points if not point.whole}):
        points = [point for point in shape.points if point.queries == queries and not point.whole]
        _part(shape, methods, points, f"the last {queries:,} rows of a prompt")
    doubtful = [name for name in methods if too_dense(shape, name)]
    if doubtful:
        render.line(DOUBT.format(methods=", ".join(doubtful)), style="dim")


def _part(shape: HeadShape, methods: Sequence[str], points: Sequence[Point], title: str, *more: Column[str]) -> None:
    """A table of some sizes: a row for dense attention, whose name is empty, and one for each method."""
    from sparseprefill.breakeven.points import lines

    known = {
        (name, line.queries or keys, keys): f"{1 / ratio:.2f}"
        for name in methods
        for line in lines(shape, name)
        for keys, ratio in zip(line.keys, line.ratios, strict=True)
    }

    def at(point: Point) -> Column[str]:
        time = point.dense * 1e3
        dense = f"{time:.3g}" if time < 1000 else f"{time:,.0f}"
        return Column(
            f"{point.keys:,}", lambda name: known.get((name, point.queries, point.keys), "") if name else dense
        )

    columns = [Column[str]("method", lambda name: name or "dense, ms"), *more, *map(at, points)]
    # On a narrow terminal the shortest lengths leave first: what counts is what the longest gains.
    drop = [f"{point.keys:,}" for point in points[:-1]]
    render.show(Table.of(columns, ["", *methods], title=title, drop=drop))
