"""The command `load`."""

from __future__ import annotations

from typing import Annotated

import typer
from attrs import asdict
from sparseprefill.adapters.cli.group import Stop
from sparseprefill.adapters.cli.progress import bars

from lab.bench.shape import ModelShape
from lab.files import Files

from . import options
from .engine import Setup, check
from .first_token import Contender
from .positions import Positions
from .shapes import Shape
from .sheet import Sheet
from .ttft import DENSE, Inputs
from .under_load import UnderLoad
from .under_load_form import form

SHAPES = ("whole:32768", "prefix:131072+8192", "mix:2048,8192,32768")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(load)


def load(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="SHAPE",
            help="whole:TOKENS, prefix:SHARED+NEW (the shared part is cached before) or mix:TOKENS,TOKENS in turns; "
            f"repeat for several. By default {', '.join(SHAPES)}.",
        ),
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="Also serve with this method; repeat for several.")] = None,
    settings: options.Set = None,
    rate: options.Rate = 2.0,
    requests: options.Requests = 16,
    tokens: options.Answer = 16,
    budget: options.Budget = 8192,
    warm: Annotated[int, typer.Option(min=0, help="Requests before the clock runs, of other texts, at once.")] = 4,
    gate: Annotated[bool, typer.Option("--gate", help="Let the break-even gate keep small calls dense.")] = False,
    beside: Annotated[
        bool, typer.Option("--beside-stock/--without-stock", help="Whether vLLM's own attention is timed, too.")
    ] = True,
    structure: Annotated[
        Inputs, typer.Option(help="What attention runs on: made-up heads, or the random model's own q and k.")
    ] = Inputs.HEADS,
    layers: options.Layers = 2,
    stock: options.Stock = "FLASH_ATTN",
    dtype: options.Dtype = "bfloat16",
    vocab: options.Vocabulary = 32000,
    seed: options.Seed = 0,
    engine: options.More = "{}",
    markdown: options.Markdown = None,
    json: options.Json = None,
    hidden: options.Hidden = 4096,
    inner: options.Inner = 14336,
    heads: options.Heads = 32,
    kv_heads: options.KvHeads = 8,
    head_dim: options.HeadDim = 128,
) -> None:
    """Serve requests that come over time: vLLM's own attention, ours with every key (dense), and each --method."""
    shapes = [Shape.parse(text) for text in dict.fromkeys(shape or SHAPES)]
    check()
    files = Files(markdown=markdown, json=json)
    model = ModelShape(
        layers=layers,
        hidden=hidden,
        inner=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocab,
        dtype=dtype,
    )
    wanted = [Contender(stock)] if beside else []
    wanted += options.contenders([DENSE, *(method or ())], settings or (), gate)
    setup = Setup(shape=model, stock=stock, seed=seed, more=options.more(engine))
    longest = max(one.longest for one in shapes) + tokens
    made_up = Positions(model, options.device(), longest, heads=structure is Inputs.HEADS, seed=seed)
    work = UnderLoad(
        setup=setup,
        structure=made_up,
        shapes=shapes,
        rate=rate,
        requests=requests,
        answer=tokens,
        budget=budget,
        warm=warm,
        baseline=wanted[0].name,
    )
    asked = {"command": "load", "stock": stock, "seed": seed, "rate": rate, "requests": requests, "tokens": tokens}
    asked |= {"budget": budget, "warm": warm, "gate": gate, "structure": structure.value}
    asked |= {"model": asdict(model), "engine": dict(setup.more)}
    sheet = Sheet(form(work), files, asked, options.device())
    with bars(len(wanted)) as shown, Stop() as stop:
        for one in wanted:
            with shown.contender(one.name) as progress:
                for row in work.run(one, progress):
                    sheet.add(row)
    sheet.end(stop, len(wanted) * len(shapes))
