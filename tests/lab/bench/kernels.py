"""What a method's call spends where: ``python -m lab.bench.kernels`` (from tests/).

On a GPU by kernel, with what each takes there; on a CPU by PyTorch operator. The profiler itself costs time on the
host, so the sum is no measure of the whole call: `lab.bench` times that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from attrs import asdict, frozen
from sparseprefill.adapters.cli import options, render
from sparseprefill.adapters.cli.options import Device, Dtype, Methods, Settings, Threads, Type
from sparseprefill.adapters.cli.render import Column, Table
from sparseprefill.adapters.cli.setup import Place
from torch.profiler import ProfilerActivity, profile

from lab.files import Files, JsonFile, command
from sparseprefill.registry import default_registry

from . import facts, report
from .case import of_method
from .measure import prepare

WARM = 3
app = command("List the kernels of a method's call and what each takes.")


@frozen(kw_only=True)
class Kernel:
    """launches: in one call. microseconds: of one call, all launches together."""

    method: str
    name: str
    launches: float
    microseconds: float


COLUMNS: tuple[Column[Kernel], ...] = (
    Column("kernel", lambda one: one.name[:60]),
    Column("launches", lambda one: f"{one.launches:g}"),
    Column("us", lambda one: f"{one.microseconds:.1f}"),
)


@app.callback(invoke_without_command=True)
def kernels(
    method: Methods = None,
    settings: Settings = None,
    whole: Annotated[
        bool, typer.Option("--whole/--estimate", help="The whole call, or until the mask is there.")
    ] = False,
    tokens: Annotated[int | None, typer.Option(min=16, help="Tokens of the prompt.")] = None,
    heads: report.Heads = 32,
    kv_heads: report.KvHeads = 8,
    head_dim: report.HeadDim = 128,
    new: Annotated[int | None, typer.Option(min=1, help="New tokens after cached ones: the last of --tokens.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Calls, of which the mean counts.")] = 10,
    seed: report.Seed = 0,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 1,
    json: JsonFile = None,
) -> None:
    """List what a method's call launches, the dearest first."""
    files = Files(json=json)
    registry = default_registry()
    place = Place.of(device, dtype.value, threads)
    length = tokens or report.LENGTHS[place.device.type][-1]
    sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": place.dtype_name}
    shape = report.shape_of(place, length, new, **sizes)
    names = [registry.get(name).name for name in method or options.every(registry)]
    found: list[Kernel] = []
    with place.threaded():
        for name, given in options.changes(names, settings or ()).items():
            ready = prepare(of_method(registry, name, shape, parameters=given), place.device, seed)
            run = ready.run if whole or ready.plan is None else ready.plan  # None is for masks, of which there are none
            found += profiled(name, run, place.device, rounds)
    rows = [asdict(one) for one in found]
    report.write_figures(files.json, facts.about(place.device, seed=seed, rounds=rounds, whole=whole, kernels=rows))
    if not files.alone:
        for name in dict.fromkeys(one.method for one in found):
            render.show(_table(f"{name}: {length:,} tokens, {shape}", [one for one in found if one.method == name]))


def profiled(method: str, run: Callable[[], Any], device: torch.device, rounds: int) -> list[Kernel]:
    """What one call of `run` launches, mean of so many after warming up."""
    gpu = device.type == "cuda"
    for _ in range(WARM):
        run()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as profiler:
        for _ in range(rounds):
            run()
        if gpu:
            torch.cuda.synchronize(device)
    wanted = "CUDA" if gpu else "CPU"
    spent = [
        Kernel(
            method=method,
            name=str(event.key),
            launches=event.count / rounds,
            microseconds=(event.self_device_time_total if gpu else event.self_cpu_time_total) / rounds,
        )
        for event in profiler.key_averages()
        if event.device_type.name == wanted
    ]
    return sorted((one for one in spent if one.microseconds), key=lambda one: -one.microseconds)


def _table(title: str, found: list[Kernel]) -> Table:
    total = sum(one.microseconds for one in found)
    remarks = [f"in all {total:.0f} us and {sum(one.launches for one in found):g} launches a call"]
    return Table.of(COLUMNS, found, title=title, remarks=remarks)


if __name__ == "__main__":
    app()
