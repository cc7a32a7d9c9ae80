"""Runs what `bench` is asked for, with progress, and reports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparseprefill.registry import Registry
from sparseprefill.route import gated

from ..bench import facts, ttft
from ..bench.clock import Clock
from ..bench.measure import Bench, Row
from ..bench.model import ModelShape
from ..progress import Progress
from . import bench_plot, bench_results, render
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
        bench_results.as_tables(rows, place.device.type == "cpu")
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
        place.check_room("--length", tokens, shape.bytes_per_token, "a prefill of so many", least=16)
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
        bench_results.as_ttft(timed, shape, place.device.type == "cpu")
        _written(files)
    stop.end(len({one.tokens for one in timed}), len(lengths), "lengths")
    return any(one.error for one in timed)


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
    found = bench_results.as_json(rows, timed, {"seed": seed, "rounds": rounds}, place.device)
    if files.alone:
        render.write_json(found)
    else:
        write("--json", files.json, render.to_json(found) + "\n")


def _written(files: Files) -> None:
    for path in (files.plot, files.markdown, files.json):
        if path is not None:
            render.line(f"written: {path}")
