"""Runs what `bench` is asked for, with progress, and reports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import asdict

from sparseprefill.profiles.progress import Progress
from sparseprefill.registry import Registry
from sparseprefill.route import gated

from ..bench import facts, ttft
from ..bench.clock import Clock
from ..bench.measure import ROWS, Bench, Row
from ..bench.model import ModelShape
from ..table import Column, Table
from . import bench_plot, render
from .bench_options import Files, Wanted
from .files import write
from .group import CommandError
from .kept import Stop, wrote
from .progress import bars

if TYPE_CHECKING:
    from .setup import Place

LENGTHS = {"cuda": (32768, 65536, 131072), "cpu": (256,)}
"""Prompts of a whole model, unless told otherwise."""
FIXED = 0.1
"""Density of the random tiles that run beside the methods."""
ROUNDS = 3
NOTES = (
    "ms: median time of the whole call, by the device's clock; mask: the part of it until the mask is there. density: "
    "pairs computed / causal pairs. speed-up: dense attention's time, measured beside the row, / this time. eff.: "
    "density x speed-up. recall: share of the attention mass kept, exact, mean over heads and {rows} sampled rows; "
    "rows: 1st percentile of these rows; lowest: lowest mean of a head."
)
ON_CPU = (
    "These are times on a CPU, where PyTorch's own fused attention runs over gathered keys. They say nothing about the "
    "kernels, which need a GPU."
)
TTFT: tuple[Column[ttft.Timed], ...] = (
    Column("method", lambda one: one.name),
    Column("seconds", lambda one: f"{one.seconds:.3f}"),
    Column("speed-up", lambda one: f"{one.speedup:.2f}"),
    Column("density", lambda one: "" if one.density is None else f"{one.density:.4f}"),
)
TTFT_NOTES = {
    "heads": (
        "Random weights attend to nothing in particular, so each layer's attention runs on q and k of made-up heads "
        "instead of its own. speed-up: the stock model's time / this time. density: pairs computed / causal pairs, "
        "mean over layers."
    ),
    "model": (
        "Random weights attend to nothing in particular, so these are the costs if a method finds no structure. "
        "speed-up: the stock model's time / this time. density: pairs computed / causal pairs, mean over layers."
    ),
}


def layers(wanted: Wanted, registry: Registry, place: Place, files: Files, clock: Clock, seed: int) -> bool:
    """Measure one layer's attention; whether any case failed."""
    cases = wanted.cases(registry, place.device.type)
    bench = Bench(clock, seed)
    rows: list[Row] = []
    with bars(len(cases)) as shown, place.threaded(), Stop() as stop:
        for case in cases:
            with shown.contender(str(case)) as progress:
                progress("measuring", 0, 1)
                rows.append(bench.measure(case))
    stop.check(len(rows))
    if files.plot is not None:
        bench_plot.draw(rows, files.plot, facts.machine(place.device)["name"])
        wrote(files.plot)
    if files.markdown is not None:
        write("--markdown", files.markdown, facts.markdown(rows))
    _json(files, rows, (), place, clock.rounds, seed)
    if not files.alone:
        for group in facts.grouped(rows):
            render.show(facts.table(group))
        render.line(NOTES.format(rows=ROWS) + _beware(place), style="dim")
        _written(files)
    stop.end(len(rows), len(cases), "rows")
    return any(row.error for row in rows)


def models(
    wanted: Wanted,
    registry: Registry,
    place: Place,
    files: Files,
    depth: int,
    structure: str,
    rounds: int,
    seed: int,
) -> bool:
    """Measure a whole model's prefill; whether any contender failed."""
    for option, path in (("--plot", files.plot), ("--markdown", files.markdown)):
        if path is not None:
            raise CommandError(f"{option} cannot be combined with --ttft; leave one of them out")
    contenders = [(name, gated(one, None)) for name, one in wanted.pipelines(registry)]
    if not (wanted.methods or wanted.configs):
        contenders.append((f"random tiles {FIXED:g}", ttft.tiles(FIXED)))
    shape = _shape(wanted.sizes, depth)
    timed: list[ttft.Timed] = []
    lengths = tuple(dict.fromkeys(wanted.lengths)) or LENGTHS.get(place.device.type, LENGTHS["cpu"])
    for tokens in lengths:
        place.check_room("--tokens", tokens, shape.bytes_per_token, "a prefill of so many", least=16)
    with bars(len(lengths)) as shown, place.threaded(), Stop() as stop:
        for tokens in lengths:
            prefill = ttft.Prefill(
                shape=shape,
                device=place.device,
                tokens=tokens,
                structure=structure,
                rounds=min(rounds, ROUNDS),
                seed=seed,
            )
            with shown.contender(f"{tokens:,} tokens") as progress:
                timed += _run(prefill, contenders, progress)
    stop.check(len(timed))
    _json(files, (), timed, place, rounds, seed)
    if not files.alone:
        for tokens in dict.fromkeys(one.tokens for one in timed):
            render.show(_ttft([one for one in timed if one.tokens == tokens], shape, _beware(place)))
        _written(files)
    stop.end(len({one.tokens for one in timed}), len(lengths), "lengths")
    return any(one.error for one in timed)


def _beware(place: Place) -> str:
    return f" {ON_CPU}" if place.device.type == "cpu" else ""


def _ttft(timed: Sequence[ttft.Timed], shape: ModelShape, beware: str) -> Table:
    """Times of whole models on prompts of one length."""
    head = f"first token of {timed[0].tokens:,}, {shape.layers} layers of"
    width = f"width {shape.hidden}, {shape.dtype}"
    known = shape.hidden == ModelShape().hidden
    remarks = [f"{one.name} failed: {one.error}" for one in timed if one.error]
    remarks += [f"{one.name}: {n} layers ran dense: {why}" for one in timed for why, n in one.dense_layers.items()]
    return Table.of(
        TTFT,
        timed,
        lambda one: one.error,
        title=f"{head} Llama-3-8B's shape, {shape.dtype}, random weights" if known else f"{head} {width}",
        remarks=remarks,
        notes=TTFT_NOTES[timed[0].structure] + beware,
    )


def _shape(sizes: Any, depth: int) -> ModelShape:
    hidden = sizes["heads"] * sizes["head_dim"]
    heads = {name: sizes[name] for name in ("heads", "kv_heads", "head_dim", "dtype")}
    return ModelShape(layers=depth, hidden=hidden, inner=hidden * 7 // 2, **heads)


def _run(prefill: ttft.Prefill, contenders: Sequence[Any], progress: Progress) -> list[ttft.Timed]:
    try:
        return prefill.run(contenders, progress)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "transformers":
            raise
        raise CommandError('--ttft needs transformers: pip install "sparseprefill[hf]"') from error


def _json(files: Files, rows: Sequence[Row], timed: Sequence[ttft.Timed], place: Place, rounds: int, seed: int) -> None:
    if files.json is None:
        return
    model = [{**asdict(one), "speedup": one.speedup, "error": one.error or None} for one in timed]
    listed = [facts.fact(row) for row in rows]
    found = facts.about(place.device, seed=seed, rounds=rounds, rows=listed, ttft=model)
    if files.alone:
        render.write_json(found)
    else:
        write("--json", files.json, render.to_json(found) + "\n")


def _written(files: Files) -> None:
    for path in (files.plot, files.markdown, files.json):
        if path is not None:
            render.line(f"written: {path}")
