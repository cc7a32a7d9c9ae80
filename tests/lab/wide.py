"""Heads of other sizes than 64 and 128, beside dense attention: ``python -m lab.wide`` (from tests/).

One layer of random inputs: masks through the executor, and rowmax with its estimate. Heads of 192 with 128 (MLA) and of
512 run in the portable kernels. Errors are of 128 rows, against attention in float32 over the same mask.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from attrs import asdict, frozen
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.cli.options import Device, Dtype, Threads, Type
from sparseprefill.adapters.cli.setup import Place

import sparseprefill as sp
from lab.bench import facts
from lab.bench.baseline import baseline
from lab.bench.case import parse_mask, random_mask
from lab.bench.clock import Clock
from lab.bench.report import write_figures
from lab.files import JsonFile, command
from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError
from sparseprefill.plan import Plan

SIZES = ("192:128", "192:192", "256:256", "512:512")
MASKS = ("full", "tiles:0.1", "diagonal+columns:0.1")
ROWS = 128
app = command("Time heads of other sizes than 64 and 128 beside dense attention.")


@frozen
class Row:
    """What one mask takes. milliseconds, dense: of the executor and of the dense kernel named. error: relative."""

    heads: str
    mask: str
    density: float
    milliseconds: float
    dense: float
    kernel: str
    served: str
    error: float


@app.callback(invoke_without_command=True)
def wide(
    size: Annotated[
        list[str] | None, typer.Option(metavar="QK:V", help=f"Head dimensions; by default {', '.join(SIZES)}.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of the prompt.")] = 32768,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 16,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each; the median counts.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time limit for all runs of one measurement.")] = 1.0,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 2,
    json: JsonFile = None,
) -> None:
    """Time heads of other sizes than 64 and 128 beside dense attention."""
    place = Place.of(device, dtype.value, threads)
    clock, found = Clock(place.device, rounds, seconds), list[Row]()
    typer.echo("| heads | mask | pairs | ms | dense, ms | dense kernel | served by | error |\n" + "|---" * 8 + "|")
    with place.threaded(), torch.inference_mode():
        for one in size or SIZES:
            call = call_of(one, tokens, heads, kv_heads, place)
            for mask in (*MASKS, "rowmax"):
                found.append(row(one, mask, call, clock))
                last = found[-1]
                typer.echo(
                    f"| {last.heads} | {last.mask} | {last.density:.1%} | {last.milliseconds:.2f} | {last.dense:.2f} | "
                    f"{last.kernel} | {last.served} | {last.error:.1e} |"
                )
    write_figures(
        json, facts.about(place.device, tokens=tokens, heads=heads, kv_heads=kv_heads, rows=[*map(asdict, found)])
    )


def call_of(size: str, tokens: int, heads: int, kv_heads: int, place: Place) -> AttentionCall:
    """Random q, k, v; CommandError for sizes that are none."""
    try:
        wide, value = (int(x) for x in size.split(":"))
    except ValueError as error:
        raise CommandError(f"--size {size}: write the head dimensions of keys and values, such as 192:128") from error
    source = torch.Generator(place.device).manual_seed(0)
    kind: dict[str, Any] = {"generator": source, "device": place.device, "dtype": torch.float32}
    shapes = ((heads, wide), (kv_heads, wide), (kv_heads, value))
    try:
        return AttentionCall(*(torch.randn(1, n, tokens, d, **kind).to(place.dtype) for n, d in shapes))
    except ParameterError as error:
        raise CommandError(f"--size {size}: {error}") from error


def row(size: str, mask: str, call: AttentionCall, clock: Clock) -> Row:
    """One mask, or rowmax's whole call with its own."""
    executor, dense = sp.AutoExecutor(), baseline(call, [call.kv_len])
    if mask == "rowmax":
        pipeline = sp.build("rowmax")
        result = pipeline.run(call)

        def run() -> Any:
            return pipeline.run(call)
    else:
        plan = Plan(random_mask(call, parse_mask(mask), 0))
        result = executor.execute(call, plan)

        def run() -> Any:
            return executor.execute(call, plan)

    took, beside = clock.beside(run, dense.run)
    served = " ".join(one.name for one in result.kernels)
    return Row(size, mask, result.density, took * 1e3, beside * 1e3, dense.kernel, served, error_of(call, result))


def error_of(call: AttentionCall, result: sp.Result) -> float:
    """How far some rows of the output are from attention in float32 over the result's mask, as a share of its norm."""
    rows = torch.linspace(0, call.q.shape[2] - 1, ROWS, device=call.q.device).long()
    apart = norm = 0.0
    for head in range(call.q.shape[1]):
        logits = call.q[0, head, rows].float() @ call.k[0, head // call.group].float().T * call.softmax_scale
        keep = result.mask.to_dense(rows)[0, head]
        truth = logits.masked_fill(~keep, -torch.inf).softmax(-1) @ call.v[0, head // call.group].float()
        apart += float((result.out[0, head, rows].float() - truth).square().sum())
        norm += float(truth.square().sum())
    return float((apart / norm) ** 0.5)


if __name__ == "__main__":
    app()
