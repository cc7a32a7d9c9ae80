"""How near bounds on the mass that rowmax drops come to it: ``python -m lab.rowmax.bounds`` (from tests/).

A certificate would say of each row that is looked at how much of its softmax is dropped at most, from what the estimate
knows. On a model's own queries and keys this shows what such bounds are worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

import torch
import typer
from attrs import frozen
from sparseprefill.adapters.cli import options
from sparseprefill.adapters.cli.options import Device, Dtype, Model, Seed, Settings, Threads, Type
from sparseprefill.adapters.cli.setup import Place, Source
from sparseprefill.adapters.demo.tasks import TABLES
from sparseprefill.adapters.evaluation.texts import built_in
from sparseprefill.plugins.rowmax import RowMaxConfig
from sparseprefill.plugins.rowmax.maxima import sampled_rows, sampling
from sparseprefill.plugins.rowmax.stages import RowMaxEstimator
from torch import Tensor

from lab.bench import facts
from lab.bench.report import write_figures
from lab.files import JsonFile, command
from lab.frontier.layers import check_plain, layer_calls
from sparseprefill.call import AttentionCall
from sparseprefill.registry import default_registry

app = command("Show what bounds on the mass that rowmax drops are worth, on one text.")
ROWS = 256
"""Sampled rows of a head and layer, at most."""
BOUNDS = ("dropped", "by maxima", "by means and variances")


@frozen(eq=False)
class Columns:
    """Logits of some rows by column ``[n, C, width]``, -inf for what a row may not see; keep: bool ``[n, C]``."""

    logits: Tensor
    keep: Tensor

    @property
    def shares(self) -> tuple[Tensor, ...]:
        """float ``[n]`` each: the share of the softmax that is dropped, and two upper bounds.

        By maxima, what the estimate knows: a dropped column holds at most its width times its largest weight, and what
        is kept no less than the largest weight of each column. By means and variances: of numbers that are no larger
        than b, with mean u and variance v, the mean of exp is at most ``(d**2 * exp(u - v / d) + v * exp(b)) / (d**2 +
        v)`` with ``d = b - u`` (Bennett 1962); what is kept is known, as after the call.
        """
        seen = torch.isfinite(self.logits)
        largest = self.logits.amax(2)
        base = largest.amax(1, keepdim=True)
        top = torch.exp(largest - base)
        mass = torch.exp(self.logits - base[..., None]).sum(2)
        kept = mass.masked_fill(~self.keep, 0).sum(1)
        count = seen.sum(2)
        some = self.logits.masked_fill(~seen, 0)
        mean = some.sum(2) / count.clamp(min=1)
        spread = ((some - mean[..., None]).masked_fill(~seen, 0) ** 2).sum(2) / count.clamp(min=1)
        away = (largest - mean).clamp(min=1e-6)
        two = away**2 * torch.exp(mean - spread / away - base) + spread * top
        bennett = count * two / (away**2 + spread)
        wide = self.logits.shape[2] * top
        parts = ((mass, kept), (wide, top.masked_fill(~self.keep, 0).sum(1)), (bennett, kept))
        found = []
        for each, rest in parts:
            lost = each.masked_fill(self.keep, 0).nan_to_num(0).sum(1)
            found.append(lost / (lost + rest))
        return tuple(found)


@app.callback(invoke_without_command=True)
def bounds(
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=256, help="Length of the text in tokens.")] = 8192,
    every_layer: Annotated[int, typer.Option(min=1, help="One layer in so many.")] = 4,
    settings: Settings = None,
    seed: Seed = TABLES,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 2,
    json: JsonFile = None,
) -> None:
    """Show what bounds on the mass that rowmax drops are worth, on one text."""
    parameters = options.changes(["rowmax"], settings or ())["rowmax"]
    default_registry().build("rowmax", **parameters)
    config = RowMaxConfig(**parameters)
    place = Place.of(device, dtype.value, threads)
    with place.threaded(), torch.inference_mode():
        source = Source.of(model, place)
        text = built_in(source.tokenizer, tokens, 1, seed)[0]
        ids = torch.tensor([text.ids], device=place.device)
        calls = layer_calls(source.load(), ids)[::every_layer]
        found = [one.shares for call in calls for one in columns_of(call, config)]
    ranked = {
        name: torch.cat(each).float().sort().values for name, each in zip(BOUNDS, zip(*found, strict=True), strict=True)
    }
    typer.echo(f"{len(ranked[BOUNDS[0]]):,} rows\n\n| of the mass | median | 99 % | worst |\n|---|---:|---:|---:|")
    figures = {name: [float(x[math.ceil(q * (len(x) - 1))]) for q in (0.5, 0.99, 1.0)] for name, x in ranked.items()}
    for name, three in figures.items():
        typer.echo(f"| {name} | " + " | ".join(f"{x:.3f}" for x in three) + " |")
    write_figures(json, facts.about(place.device, model=model or "embedded", tokens=len(text.ids), bounds=figures))


def columns_of(call: AttentionCall, config: RowMaxConfig) -> Iterator[Columns]:
    """Some rows of each head that are looked at, of a prefill from position 0; errors as of `check_plain`."""
    check_plain(call)
    width, block = config.column, config.block
    kept = RowMaxEstimator(config).kept(call)
    rows = sampled_rows(call, 0, call.geometry.tile_rows(block), block, sampling(config, call.group))
    generator = torch.Generator().manual_seed(0)
    column = torch.arange(kept.shape[3], device=kept.device)
    for head in range(call.q.shape[1]):
        real = rows.real[0, head].nonzero().flatten()
        some = real[torch.randperm(len(real), generator=generator)[:ROWS].to(real.device)]
        index, position = rows.index[0, head, some], rows.position[0, head, some]
        logits = call.q[0, head, index].float() @ call.k[0, head // call.group].float().T * call.softmax_scale
        hidden = torch.arange(call.kv_len, device=kept.device) > position[:, None]
        logits = logits.masked_fill(hidden, -math.inf)
        logits = torch.nn.functional.pad(logits, (0, -call.kv_len % width), value=-math.inf).unflatten(1, (-1, width))
        keep = kept[0, head if kept.shape[1] == call.q.shape[1] else head // call.group, position // block]
        own = (position // block * (block // width))[:, None]
        keep = keep | (column >= own) | (column < block // width * int(config.sink))
        yield Columns(logits, keep[:, : logits.shape[1]])


if __name__ == "__main__":
    app()
