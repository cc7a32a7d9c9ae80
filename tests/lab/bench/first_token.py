"""Time to the first token of a whole model: ``python -m lab.bench.first_token`` (from tests/).

A Llama of random weights on the device, by default 32 layers of Llama-3-8B's shape with a vocabulary of 1,024 to save
memory. One prefill with a cache and the logits of the last token alone is timed: stock, with cuDNN's attention forced,
and with each method through `attach`, without a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from attrs import asdict
from sparseprefill.adapters.cli import options, render
from sparseprefill.adapters.cli.group import Stop
from sparseprefill.adapters.cli.options import Device, Dtype, Methods, Settings, Threads, Type
from sparseprefill.adapters.cli.progress import bars
from sparseprefill.adapters.cli.render import Column, Table
from sparseprefill.adapters.cli.setup import Place

from lab.files import Files, JsonFile, command
from sparseprefill.registry import default_registry
from sparseprefill.route import gated

from . import facts, report
from .case import of_method
from .shape import ModelShape
from .ttft import Prefill, Timed, tiles

PROMPTS = {"cuda": (32768, 65536, 131072), "cpu": (256,)}
FIXED = 0.1
"""Density of the random tiles that run beside the methods, to show what the executor alone would give."""
NOTES = (
    "Random weights attend to nothing in particular, so each layer's attention runs on q and k of made-up heads "
    "instead of its own. speed-up: the stock model's time / this time. density: pairs computed / causal pairs, mean "
    "over layers."
)
COLUMNS: tuple[Column[Timed], ...] = (
    Column("method", lambda one: one.name),
    Column("seconds", lambda one: f"{one.seconds:.3f}"),
    Column("speed-up", lambda one: f"{one.speedup:.2f}"),
    Column("density", lambda one: "" if one.density is None else f"{one.density:.4f}"),
)
app = command("Time the prefill of a whole model with each method.")


@app.callback(invoke_without_command=True)
def first_token(
    method: Methods = None,
    settings: Settings = None,
    tokens: report.Tokens = None,
    heads: report.Heads = 32,
    kv_heads: report.KvHeads = 8,
    head_dim: report.HeadDim = 128,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model; its width is heads x head dimension.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Timed prefills of each; the median counts.")] = 3,
    seed: report.Seed = 0,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 1,
    json: JsonFile = None,
) -> None:
    """Time the prefill of a whole model with each method; exit status 1 where one failed."""
    files = Files(json=json)
    registry = default_registry()
    place = Place.of(device, dtype.value, threads)
    hidden = heads * head_dim
    shape = ModelShape(
        layers=layers, hidden=hidden, inner=hidden * 7 // 2, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        dtype=place.dtype_name,
    )  # fmt: skip
    lengths = list(dict.fromkeys(tokens or PROMPTS[place.device.type]))
    for length in lengths:
        place.check_room("--tokens", length, shape.bytes_per_token, "a prefill of so many", least=16)
    names = [registry.get(name).name for name in method or options.every(registry)]
    small = report.shape_of(place, 16, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=place.dtype_name)
    cases = [
        of_method(registry, name, small, parameters=given)
        for name, given in options.changes(names, settings or ()).items()
    ]
    contenders = [(case.label, gated(case.pipeline, None)) for case in cases if case.pipeline is not None]
    contenders += [] if method else [(f"random tiles {FIXED:g}", gated(tiles(FIXED), None))]
    timed: list[Timed] = []
    with bars(len(lengths)) as shown, place.threaded(), Stop() as stop:
        for length in lengths:
            with shown.contender(f"{length:,} tokens") as progress:
                one = Prefill(shape=shape, device=place.device, tokens=length, rounds=rounds, seed=seed)
                timed += one.run(contenders, progress)
    done = list(dict.fromkeys(one.tokens for one in timed))
    stop.check(len(done))
    figures = [{**asdict(one), "speedup": one.speedup, "error": one.error or None} for one in timed]
    report.write_figures(files.json, facts.about(place.device, seed=seed, rounds=rounds, ttft=figures))
    if not files.alone:
        for length in done:
            render.show(_table([one for one in timed if one.tokens == length], shape, place))
    stop.end(len(done), len(lengths), "lengths")
    if any(one.error for one in timed):
        raise typer.Exit(1)


def _table(timed: Sequence[Timed], shape: ModelShape, place: Place) -> Table:
    """Times of whole models on prompts of one length."""
    known = "Llama-3-8B's shape" if shape.hidden == 4096 else f"width {shape.hidden}"
    remarks = [f"{one.name} failed: {one.error}" for one in timed if one.error]
    remarks += [f"{one.name}: {n} layers ran dense: {why}" for one in timed for why, n in one.dense_layers.items()]
    more: dict[str, Any] = {"notes": NOTES + (report.ON_CPU if place.device.type == "cpu" else "")}
    title = f"first token of {timed[0].tokens:,}, {shape.layers} layers of {known}, {shape.dtype}, random weights"
    return Table.of(COLUMNS, timed, lambda one: one.error, title=title, remarks=remarks, **more)


if __name__ == "__main__":
    app()
