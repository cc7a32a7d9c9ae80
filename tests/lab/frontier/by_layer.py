"""Each layer's time and pairs on a model's own queries and keys: ``python -m lab.frontier.by_layer``."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from attrs import asdict, frozen
from sparseprefill.adapters.calibration.candidates import Candidate
from sparseprefill.adapters.cli import options, render
from sparseprefill.adapters.cli.group import check_writable
from sparseprefill.adapters.cli.options import Configs, Device, Dtype, Methods, Model, Seed, Tail, Threads, Type
from sparseprefill.adapters.cli.setup import Place, Source, identity_of
from sparseprefill.adapters.demo.tasks import TABLES
from sparseprefill.adapters.evaluation.texts import built_in
from sparseprefill.adapters.session.defaults import TAIL

from lab.bench import facts
from lab.bench.clock import Clock
from lab.bench.dense import Baseline, fastest_first
from lab.bench.measure import memories, plan_only
from lab.bench.report import write_figures
from lab.files import command
from sparseprefill.mask.count import allowed_pairs
from sparseprefill.pipeline import Pipeline
from sparseprefill.registry import default_registry
from sparseprefill.route import Route, gated

from .layers import Layers
from .points import configured

app = command("Show each layer's pairs and time on one text, estimate and executor apart, beside dense attention.")
HEADS = ("layer", "pairs", "most", "estimate", "executor", "dense", "speed-up", "of its pairs")


@frozen
class Layer:
    """One layer. pairs: share that is computed; most: of the head that computes most. Times in seconds."""

    layer: str
    pairs: float
    most: float
    estimate: float
    whole: float
    dense: float

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of a table; times in milliseconds."""
        executor = max(self.whole - self.estimate, 1e-9)
        return (
            self.layer,
            *(f"{100 * share:.1f} %" for share in (self.pairs, self.most)),
            *(f"{1e3 * seconds:.2f}" for seconds in (self.estimate, executor, self.dense)),
            f"{self.dense / self.whole:.2f}",
            f"{self.pairs * self.dense / executor:.2f}",
        )


@app.callback(invoke_without_command=True)
def by_layer(
    model: Model = None,
    method: Methods = None,
    config: Configs = None,
    tokens: Annotated[int, typer.Option(min=256, help="Length of the text in tokens.")] = 32768,
    tail: Tail = TAIL,
    seed: Seed = TABLES,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time limit for all runs of one measurement.")] = 0.3,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 2,
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as JSON.")] = None,
) -> None:
    """Show each layer's pairs and time on one text, estimate and executor apart, beside dense attention.

    *of its pairs* is what the executor's speed-up is of what its pairs allow: 1 where a pair takes it as long as dense
    attention. The estimate is timed alone, where the host may take longer than the device.
    """
    check_writable("--json", json)
    registry = default_registry()
    candidates = [Candidate(one, {}) for one in options.chosen(registry, method)] if method else []
    candidates += [configured(path) for path in config or ()]
    place = Place.of(device, dtype.value, threads)
    clock = Clock(place.device, rounds, seconds)
    with place.threaded():
        source = Source.of(model, place)
        source.check_tokens(tokens)
        (prompt,) = built_in(source.tokenizer, tokens, 1, seed, ())
        loaded = source.load()
        identity = identity_of(loaded, model)
        with fastest_first():
            layers = Layers.of(loaded, torch.tensor([prompt.ids], device=place.device))
            found = {}
            for one in candidates:
                pipeline = one.pipeline(identity).with_tail(tail)
                found[one.contender(identity).label] = _measured(pipeline, layers, clock)
    if json is not None:
        points = {name: [asdict(one) for one in rows] for name, rows in found.items()}
        write_figures(json, facts.about(place.device, tokens=tokens, seed=seed, layers=points))
    for name, rows in found.items():
        render.line(f"### {name}, {tokens:,} tokens, dense by {layers.dense[0].kernel}\n")
        render.line(f"| {' | '.join(HEADS)} |")
        render.line(f"|{' ---: |' * len(HEADS)}")
        for row in (*rows, _mean(rows)):
            render.line(f"| {' | '.join(row.cells)} |")
        render.line("")


def _measured(pipeline: Pipeline | Route, layers: Layers, clock: Clock) -> list[Layer]:
    """Layer after layer, each as the ones before it leave the method's memory."""
    plain = gated(pipeline, None)
    before = memories(plain, layers.calls)
    dense: dict[Baseline, float] = {}
    rows = []
    for call, memory, one in zip(layers.calls, before, layers.dense, strict=True):
        if one not in dense:
            dense[one] = clock.median(one.run)
        result = plain.run(call, memory.copy())
        shares = result.pairs().sum(0).double() / (allowed_pairs(call.geometry) / call.geometry.heads)
        whole = clock.median(lambda: plain.run(call, memory.copy()))  # noqa: B023 - they run at once
        estimate = clock.median(lambda: plan_only(plain, call, memory.copy()))  # noqa: B023
        rows.append(Layer(str(call.layer), float(shares.mean()), float(shares.max()), estimate, whole, dense[one]))
    return rows


def _mean(rows: Sequence[Layer]) -> Layer:
    names = ("pairs", "most", "estimate", "whole", "dense")
    return Layer("mean", *(statistics.fmean(getattr(one, name) for one in rows) for name in names))


if __name__ == "__main__":
    app()
