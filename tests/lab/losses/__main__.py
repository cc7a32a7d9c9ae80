"""Where a method loses what a model copies: ``python -m lab.losses --model MODEL`` (from tests/).

Of the rows that predict restated tokens: how much of their attention the masks of each layer drop, and how much of what
their heads give the token's first place in the text. And what is lost if some layers alone are sparse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from attrs import asdict, define, field, frozen
from sparseprefill.adapters.cli import render
from sparseprefill.adapters.cli.group import CommandError, Stop, write
from sparseprefill.adapters.cli.options import (
    Configs,
    Device,
    Dtype,
    Methods,
    Model,
    Seed,
    Settings,
    Tail,
    Threads,
    Type,
)
from sparseprefill.adapters.cli.progress import bars
from sparseprefill.adapters.cli.render import Column, Table
from sparseprefill.adapters.cli.setup import Place, Source
from sparseprefill.adapters.evaluation.outcome import Contender, Copies, compare
from sparseprefill.adapters.evaluation.prompts import Prompt
from sparseprefill.adapters.evaluation.reading import Reader, Rows, copied, inside_rows
from sparseprefill.adapters.evaluation.texts import SHORTEST, built_in
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.session.defaults import TAIL
from torch import Tensor

from lab.bench import facts
from lab.bench.report import write_figures
from lab.files import Files, JsonFile, MarkdownFile, command
from lab.files import markdown as in_markdown
from lab.single import single
from lab.turns.talk import layers_of
from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError
from sparseprefill.plan import Result

ROWS = 64
"""Rows whose weights are in memory at once."""
NOTES = (
    "copies: restated tokens that are right, of those that dense gets right. dropped: share of the attention of rows "
    "that copy which the mask drops, mean over rows and heads. source: of what all heads give the place that the token "
    "was copied from, the share that the masks keep. KL: mean over the rows inside the text."
)
app = command("Show in which layers a method loses what a model copies.")


@frozen
class Lost:
    """Of a layer, over the rows that predict restated tokens of a text. dropped: by query head, the mean share of a
    row's attention that the mask drops. source, kept: weight on the tokens' first place, and what the mask keeps of it,
    sums over rows and heads. pairs: computed / causal."""

    layer: int
    pairs: float
    dropped: tuple[float, ...]
    source: float
    kept: float


@frozen
class Some:
    """What is left where some layers alone are sparse, over all texts."""

    layers: str
    pairs: float
    copies: Copies
    kl: float


@define
class Watch:
    """Observer that looks at the weights of some rows of every call. places: by row, where its token stood first."""

    places: dict[int, int]
    found: list[Lost] = field(factory=list, init=False)

    def __call__(self, call: AttentionCall, result: Result) -> None:
        """Look at one layer."""
        rows = sorted(self.places)
        dropped, source, kept = torch.zeros(call.q.shape[1]), 0.0, 0.0
        for first in range(0, len(rows), ROWS):
            some = torch.tensor(rows[first : first + ROWS], device=call.q.device)
            weights, mask = weights_of(call, some)[0], result.mask.to_dense(some)[0]
            dropped += torch.where(mask, 0.0, weights).sum((1, 2)).cpu()
            at = torch.tensor([self.places[row] for row in some.tolist()], device=some.device)[None, :, None]
            mine = weights.gather(2, at.expand(weights.shape[0], -1, 1))
            source += float(mine.sum())
            kept += float(torch.where(mask.gather(2, at.expand(mask.shape[0], -1, 1)), mine, 0.0).sum())
        self.found.append(Lost(call.layer, result.density, tuple((dropped / len(rows)).tolist()), source, kept))


def weights_of(call: AttentionCall, rows: Tensor) -> Tensor:
    """float32 ``[B, Hq, n, Nkv]``: the softmax of some query rows ``[n]``, sinks in its sum."""
    q = call.q[:, :, rows].float().unflatten(1, (-1, call.group)).flatten(2, 3)
    logits = (q @ call.k.float().transpose(-1, -2)).view(*call.q.shape[:2], len(rows), -1) * call.softmax_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    logits = logits.masked_fill_(~call.geometry.visible(rows)[:, None], -torch.inf)
    lse = logits.logsumexp(-1)
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.float()[:, None])
    weights: Tensor = (logits - lse[..., None]).exp_()
    return weights


def places_of(prompt: Prompt) -> dict[int, int]:
    """By row that predicts a restated token, where that token stands first."""
    found: dict[int, int] = {}
    for span in prompt.copies:
        passage = prompt.ids[span.first : span.last]
        first = next(at for at in range(span.first) if prompt.ids[at : at + len(passage)] == passage)
        found |= {span.first - 1 + index: first + index for index in range(len(passage)) if first < span.first}
    return found


def groups_of(layers: int, count: int) -> list[range]:
    """The layers in so many runs of about equal length, as many as there are at most."""
    count = min(count, layers)
    edges = [layers * index // count for index in range(count + 1)]
    return [range(first, last) for first, last in pairwise(edges)]


@app.callback(invoke_without_command=True)
def losses(
    model: Model = None,
    method: Methods = None,
    settings: Settings = None,
    config: Configs = None,
    tail: Tail = TAIL,
    tokens: Annotated[int, typer.Option(min=SHORTEST, help="Tokens of a text.")] = 8192,
    texts: Annotated[int, typer.Option(min=1, help="Texts, of all kinds in turn.")] = 1,
    kind: Annotated[list[str] | None, typer.Option(help="Kind of natural text; repeat for several.")] = None,
    groups: Annotated[int, typer.Option(min=0, help="Runs of layers that are sparse alone; 0 for none.")] = 4,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Type = Dtype.BFLOAT16,
    threads: Threads = 2,
    markdown: MarkdownFile = None,
    json: JsonFile = None,
) -> None:
    """Show in which layers a method loses what a model copies.

    One method, or one configuration; `rowmax` where none is named. Ctrl-C stops and shows what was measured so far.
    """
    files = Files(markdown=markdown, json=json)
    contender = single(method, settings, model, tail, config)
    place = Place.of(device, dtype.value, threads)
    with place.threaded(), bars(1) as shown:
        source = Source.of(model, place)
        try:
            prompts = built_in(source.tokenizer, tokens, texts, seed, kind or ())
        except ParameterError as error:
            raise CommandError(f"--kind: {error}") from error
        reader = Reader(source.load())
        runs = [None, *groups_of(layers_of(reader.model), groups)] if groups else [None]
        shown.expect(len(prompts) * (1 + len(runs)))
        lost: list[list[Lost]] = []
        made: dict[str, list[tuple[float, Copies, float]]] = {}
        with Stop() as stop:
            for prompt in prompts:
                ids = torch.tensor([prompt.ids], device=reader.device)
                with shown.contender(f"{prompt.name}: dense"), torch.inference_mode():
                    dense = reader.prefill(ids)[0]
                for run in runs:
                    name = "all" if run is None else _named(run)
                    with shown.contender(f"{prompt.name}: {name}"):
                        found, layers = sparse(reader, contender, prompt, ids, dense, run)
                    made.setdefault(name, []).append(found)
                    lost += [layers] if run is None else []
    stop.check(len(lost))
    whole = [
        Some(name, fmean(p for p, _, _ in many), sum((c for _, c, _ in many), Copies()), fmean(kl for *_, kl in many))
        for name, many in made.items()
    ]
    where = f"{tokens:,} tokens, {len(lost)} {'text' if len(lost) == 1 else 'texts'}, {place}"
    tables = [
        Table.of(LAYERS, list(zip(*lost, strict=True)), title=f"{contender.label}, by layer, {where}"),
        Table.of(SPARSE, whole, title="with some layers sparse and all others dense", notes=NOTES),
    ]
    if files.markdown is not None:
        write("--markdown", files.markdown, "\n".join(in_markdown(one) for one in tables))
    about = facts.about(
        place.device, model=model or "embedded", method=contender.name, parameters=dict(contender.parameters),
        tail=tail, tokens=tokens, texts=texts, kinds=kind, seed=seed,
    )  # fmt: skip
    write_figures(files.json, {**about, "layers": [[asdict(x) for x in one] for one in lost], "sparse": [
        {"layers": one.layers, "pairs": one.pairs, "copies": one.copies.figures, "kl": one.kl} for one in whole
    ]})  # fmt: skip
    if not files.alone:
        for one in tables:
            render.show(one)


@torch.inference_mode()
def sparse(
    reader: Reader, contender: Contender, prompt: Prompt, ids: Tensor, dense: Rows, layers: range | None
) -> tuple[tuple[float, Copies, float], list[Lost]]:
    """Pairs over all layers, copies and KL where some layers, or all, run with a method; and what those dropped."""
    watch = Watch(places_of(prompt))
    chosen: dict[str, Any] = {} if layers is None else {"layers": layers}
    with attach(
        reader.model, contender.pipeline, gate=None, tail=contender.dense_tail, recall_every=0, verify=False,
        observe=watch, **chosen,
    ):  # fmt: skip
        rows = reader.prefill(ids)[0]
    own = copied(prompt, dense)
    kept = copied(prompt, rows, own)
    if own is None or kept is None:
        raise ParameterError(f"{prompt.name} restates nothing: pass longer texts")
    inside = slice(inside_rows(len(prompt.ids)))
    kl = compare(dense.part(inside), rows.part(inside)).kl
    every = layers_of(reader.model)
    pairs = (sum(one.pairs for one in watch.found) + every - len(watch.found)) / every
    return (pairs, kept, kl), watch.found


def _named(run: range) -> str:
    return f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0])


def _mean(ones: Sequence[Lost]) -> Iterator[float]:
    """By head, what is dropped, over texts."""
    return (fmean(some) for some in zip(*(one.dropped for one in ones), strict=True))


LAYERS: tuple[Column[tuple[Lost, ...]], ...] = (
    Column("layer", lambda ones: str(ones[0].layer)),
    Column("pairs", lambda ones: f"{fmean(one.pairs for one in ones):.1%}"),
    Column("dropped", lambda ones: f"{fmean(_mean(ones)):.3f}"),
    Column("worst head", lambda ones: f"{max(_mean(ones)):.3f}"),
    Column("weight on source", lambda ones: f"{sum(one.source for one in ones):.1f}"),
    Column("source", lambda ones: f"{sum(one.kept for one in ones) / max(sum(one.source for one in ones), 1e-9):.1%}"),
)
SPARSE: tuple[Column[Some], ...] = (
    Column("sparse layers", lambda one: one.layers),
    Column("pairs", lambda one: f"{one.pairs:.1%}"),
    Column("copies", lambda one: f"{one.copies.right} of {one.copies.dense}"),
    Column("copies' NLL", lambda one: f"{one.copies.nll:.4f}"),
    Column("KL", lambda one: f"{one.kl:.4f}"),
)


if __name__ == "__main__":
    app()
