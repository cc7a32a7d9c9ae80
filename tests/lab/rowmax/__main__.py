"""How many tiles rowmax must keep and drops in 8 bits: ``python -m lab.rowmax`` (from tests/).

A tile must be kept if a row that is looked at gives one of its keys `eps` of its softmax. What products of e4m3 make of
that, on a model's own queries and keys, layer by layer: by the kernels of a GPU that has such products; elsewhere
queries and keys are rounded as there and multiplied in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
import typer
from attrs import asdict, evolve, frozen
from sparseprefill.adapters.cli import options, render
from sparseprefill.adapters.cli.group import write
from sparseprefill.adapters.cli.options import Device, Dtype, Model, Seed, Settings, Threads, Type
from sparseprefill.adapters.cli.progress import bars
from sparseprefill.adapters.cli.render import Column, Table
from sparseprefill.adapters.cli.setup import Place, Source
from sparseprefill.adapters.demo.exam import prompt_of
from sparseprefill.adapters.demo.tasks import TABLES
from torch import Tensor

from lab.bench import facts
from lab.bench.report import write_figures
from lab.files import Files, JsonFile, MarkdownFile, command
from lab.files import markdown as in_markdown
from lab.frontier.exams import exams_of
from lab.frontier.layers import check_plain, layer_calls
from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError
from sparseprefill.registry import default_registry

NORM = 240.0
"""Norm up to which rows are scaled before they are rounded, by powers of two."""
LARGEST = 448.0
"""Of e4m3."""
EPS, MARGINS = (0.02, 0.05, 0.1), (0.0, 0.25, 0.5, 1.0)
QUANTILE = 0.99
NOTES = (
    "due: tiles of a query tile and KV head in which a row that is looked at gives a key eps of its softmax, without "
    "those kept anyway, sinks and the row's own; dropped: of these, by the logits of a precision. margin: the threshold"
    " is eps * exp(-margin), which is nothing but a smaller eps. kept: tiles kept of all that causality allows."
)
app = command("Count the tiles that rowmax must keep and drops in 8 bits, on a model's own queries and keys.")


@frozen(kw_only=True)
class Row:
    """What a precision keeps, over all layers asked for. seen: tiles that causality allows."""

    eps: float
    precision: str
    margin: float
    due: int
    dropped: int
    kept: int
    seen: int


COLUMNS: tuple[Column[Row], ...] = (
    Column("eps", lambda one: f"{one.eps:g}"),
    Column("logits", lambda one: one.precision),
    Column("margin", lambda one: f"{one.margin:g}"),
    Column("due", lambda one: f"{one.due:,}"),
    Column("dropped", lambda one: f"{one.dropped:,}"),
    Column("of those due", lambda one: f"{one.dropped / max(one.due, 1):.2%}"),
    Column("kept", lambda one: f"{one.kept / max(one.seen, 1):.2%}"),
)


@frozen(eq=False)
class Shares:
    """Of a layer, by tile ``[B, h, R, C]``: due, the largest weight that a row looked at gives a key; by precision the
    shares that rowmax finds. always: bool ``[R, C]``, what is kept whatever its share; seen: what causality allows."""

    due: Tensor
    found: dict[str, Tensor]
    always: Tensor
    seen: Tensor


@app.callback(invoke_without_command=True)
def guarantee(
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=256, help="Length of the text in tokens.")] = 4096,
    layer: Annotated[list[int] | None, typer.Option(min=0, help="Only this layer; repeat for several.")] = None,
    eps: Annotated[list[float] | None, typer.Option(min=1e-6, max=1.0, help="Thresholds; repeat for several.")] = None,
    margin: Annotated[
        list[float] | None, typer.Option(min=0.0, help="How far below eps 8 bits also keep, in nats; repeat.")
    ] = None,
    settings: Settings = None,
    seed: Seed = TABLES,
    device: Device = "auto",
    dtype: Type = Dtype.BFLOAT16,
    threads: Threads = 2,
    markdown: MarkdownFile = None,
    json: JsonFile = None,
) -> None:
    """Count the tiles that rowmax must keep and drops in 8 bits, on a model's own queries and keys."""
    files = Files(markdown=markdown, json=json)
    parameters = options.changes(["rowmax"], settings or ())["rowmax"]
    default_registry().build("rowmax", **parameters)
    place = Place.of(device, dtype.value, threads)
    with place.threaded(), bars(1) as shown:
        source = Source.of(model, place)
        exam = exams_of(source, [tokens], 1, 4, seed)[tokens][0]
        ids = torch.tensor([prompt_of(exam, source.tokenizer)[0].ids], device=place.device)
        calls = [one for one in layer_calls(source.load(), ids) if layer is None or one.layer in layer]
        if not calls:
            raise ParameterError(f"--layer {layer}: no such layer runs through a method")
        shown.expect(len(calls))
        measured = []
        for call in calls:
            with shown.contender(f"layer {call.layer}"):
                measured.append(shares_of(call, parameters))
    by = by_kernels(calls[0], parameters)
    rows = list(rows_of(measured, eps or EPS, margin or MARGINS))
    about = facts.about(
        place.device, model=model or "embedded", tokens=ids.shape[1], layers=[call.layer for call in calls], seed=seed,
        parameters=parameters, by="kernels" if by else "emulation", errors=errors(measured),
    )  # fmt: skip
    said = "products of e4m3 by the GPU's kernels" if by else "e4m3 by rounding, products in float32"
    error = ", ".join(f"{name} {value:.3f}" for name, value in about["errors"].items())
    table = Table.of(
        COLUMNS, rows, title=f"rowmax on {ids.shape[1]:,} tokens, {len(calls)} layers, {place}",
        remarks=[said, f"error of a tile's log share in 8 bits, nats: {error}"], notes=NOTES,
    )  # fmt: skip
    if files.markdown is not None:
        write("--markdown", files.markdown, in_markdown(table))
    write_figures(files.json, {**about, "rows": [asdict(one) for one in rows]})
    if not files.alone:
        render.show(table)


def shares_of(call: AttentionCall, parameters: dict[str, Any]) -> Shares:
    """What must be kept, and what each precision finds. ParameterError for a call that is not plainly causal."""
    check_plain(call)
    exact = _estimator(parameters, "exact")
    config = exact.config
    if by_kernels(call, parameters):
        rounded = _estimator(parameters, "fp8").shares(call)
    else:
        rounded = exact.shares(_rounded(call, config))
    found = {"16 bits": exact.shares(call), "8 bits": rounded}
    rows, columns = rounded.shape[2:]
    before = (call.kv_len - call.q.shape[2]) // config.block
    row, column = (torch.arange(n, device=call.q.device) for n in (rows, columns))
    distance = row[:, None] + before - column
    always = (distance == 0) | ((column == 0) & config.sink)[None, :]
    return Shares(_largest_weights(call, config), found, always, distance >= 0)


def by_kernels(call: AttentionCall, parameters: dict[str, Any]) -> bool:
    """Whether the device multiplies in 8 bits itself."""
    return _estimator(parameters, "fp8").unsupported(call) is None


def rows_of(measured: Sequence[Shares], eps: Sequence[float], margins: Sequence[float]) -> Iterator[Row]:
    """A row for 16 bits at each threshold, and one for 8 bits with each margin."""
    for bound in eps:
        for name, margin in (("16 bits", 0.0), *(("8 bits", one) for one in margins)):
            due = dropped = kept = seen = 0
            for one in measured:
                chosen = ((one.found[name] >= bound * math.exp(-margin)) | one.always) & one.seen
                must = (one.due >= bound) & ~one.always
                due, dropped = due + int(must.sum()), dropped + int((must & ~chosen).sum())
                kept, seen = kept + int(chosen.sum()), seen + int(one.seen.expand_as(chosen).sum())
            yield Row(eps=bound, precision=name, margin=margin, due=due, dropped=dropped, kept=kept, seen=seen)


def errors(measured: Sequence[Shares]) -> dict[str, float]:
    """Of the logarithm of shares in 8 bits, where 16 bits find one near the thresholds: mean, quantile, largest."""
    parts = []
    for one in measured:
        exact, rounded = one.found["16 bits"], one.found["8 bits"]
        near = (exact > min(EPS) / 4) & (exact < max(EPS) * 4) & ~one.always
        parts.append((rounded[near].log() - exact[near].log()).abs().float().cpu())
    every = torch.cat(parts).sort().values
    if not len(every):
        return {}
    return {
        "mean": float(every.mean()),
        "99 %": float(every[math.ceil(QUANTILE * (len(every) - 1))]),
        "most": float(every[-1]),
    }


def _estimator(parameters: dict[str, Any], precision: str) -> Any:
    """The method's, by tiles."""
    return default_registry().build("rowmax", **{**parameters, "width": None, "precision": precision}).estimator


def _largest_weights(call: AttentionCall, config: Any) -> Tensor:
    """``[B, h, R, C]``: the largest softmax weight of a key, by the method's page and from the model's own numbers."""
    batch, heads, length, _ = call.q.shape
    block, group = config.block, call.group
    shared = 1 << (group.bit_length() - 1) if config.union == "group" else 1
    while block % (config.every * shared):
        shared //= 2
    stride, shift = config.every * shared, config.every if shared > 1 else 1
    before, device = call.kv_len - length, call.q.device
    tiles = range(before // block, -(-call.kv_len // block))
    keys = torch.nn.functional.pad(call.k, (0, 0, 0, tiles.stop * block - call.kv_len)).float()
    key, head = torch.arange(keys.shape[2], device=device), torch.arange(heads, device=device) + call.first_head
    found = keys.new_zeros(batch, heads, len(tiles), tiles.stop)
    for tile in tiles:
        end = (tile + 1) * block
        first = tile * block + (tile + head * shift) % stride
        position = first[:, None] + torch.arange(0, block, stride, device=device)  # [H, n]
        real = (position >= before) & (position < call.kv_len)
        at = (position - before).clamp(0, length - 1)[None, :, :, None].expand(batch, -1, -1, call.q.shape[3])
        q = call.q.gather(2, at).float().unflatten(1, (-1, group)).flatten(2, 3)
        logits = (q @ keys[:, :, :end].transpose(-1, -2)).view(batch, heads, -1, end) * call.softmax_scale
        weights = logits.masked_fill_(key[:end] > position[..., None], -torch.inf).softmax(-1)
        largest = weights.unflatten(-1, (-1, block)).amax(-1).masked_fill_(~real[..., None], 0.0)
        found[:, :, tile - tiles.start, : tile + 1] = largest.amax(2)
    return found if config.union == "head" else found.unflatten(1, (-1, group)).amax(2)


def _rounded(call: AttentionCall, config: Any) -> AttentionCall:
    """The call in float32, with queries and keys as e4m3 has them: each row of queries, and each tile of keys by its
    largest norm, times a power of two."""
    q, k = call.q.float(), call.k.float()
    tiles = -(-k.shape[2] // config.block)
    whole = torch.nn.functional.pad(k, (0, 0, 0, tiles * config.block - k.shape[2])).unflatten(2, (tiles, -1))
    keys = _in_e4m3(whole, whole.norm(dim=-1).amax(3)[..., None, None]).flatten(2, 3)[:, :, : k.shape[2]]
    return evolve(call, q=_in_e4m3(q, q.norm(dim=-1, keepdim=True)), k=keys, v=call.v.float())


def _in_e4m3(x: Tensor, norm: Tensor) -> Tensor:
    power = torch.exp2(torch.floor(torch.log2(NORM / norm.clamp_min(1e-30))))
    return (x * power).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() / power


if __name__ == "__main__":
    app()
