"""The command `decode`."""

from __future__ import annotations

from typing import Annotated

import typer
from attrs import asdict
from sparseprefill.adapters.cli.group import CommandError, Stop
from sparseprefill.adapters.cli.progress import bars

from lab.bench.shape import ModelShape
from lab.files import Files

from . import options
from .decoding import Decoding
from .decoding_form import form
from .engine import Setup, check
from .first_token import Contender
from .positions import Positions
from .sheet import Sheet
from .ttft import Inputs


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(decode)


def decode(
    rows: Annotated[int, typer.Option(min=2, help="Requests that decode at a time.")] = 256,
    length: Annotated[int, typer.Option(min=1, help="Tokens of their prompts.")] = 64,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens that each decodes in a round.")] = 64,
    prefill: Annotated[
        bool, typer.Option("--with-prefill", help="Also time steps that read a long prompt beside all rows but one.")
    ] = False,
    prompt: Annotated[int, typer.Option(min=16, help="Tokens of that prompt.")] = 8192,
    budget: options.Budget = 2048,
    method: Annotated[
        list[str] | None, typer.Option(help="What the adapter runs prefill with, by default bfla; repeat for several.")
    ] = None,
    settings: options.Set = None,
    structure: Annotated[
        Inputs, typer.Option(help="What attention runs on beside that prompt: made-up heads, or the model's own.")
    ] = Inputs.HEADS,
    rounds: Annotated[int, typer.Option(min=1, help="Of each engine, in turns, after one to warm up.")] = 5,
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
    """Time the engine's steps while every row decodes: vLLM's own attention, and with the adapter selected."""
    if budget <= rows:
        raise CommandError(f"--budget {budget}: a step of {rows} rows has no room for a prompt; raise it")
    check()
    files = Files(markdown=markdown, json=json)
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        inner=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocab,
        dtype=dtype,
    )
    wanted = [Contender(stock), *options.contenders(method or ["bfla"], settings or (), gate=False)]
    setup = Setup(shape=shape, stock=stock, seed=seed, more=options.more(engine))
    longest = max(length, prompt) + tokens
    work = Decoding(
        setup=setup,
        structure=Positions(shape, options.device(), longest, heads=structure is Inputs.HEADS, seed=seed),
        rows=rows,
        tokens=length,
        answer=tokens,
        budget=budget,
        prefill=prompt if prefill else 0,
        rounds=rounds,
    )
    asked = {"command": "decode", "stock": stock, "seed": seed, "length": length, "tokens": tokens, "budget": budget}
    asked |= {"prompt": work.prefill, "structure": structure.value, "model": asdict(shape), "engine": dict(setup.more)}
    sheet = Sheet(form(work), files, asked, options.device())
    with bars(1) as shown, Stop() as stop, shown.contender("steps") as progress:
        for row in work.run(wanted, progress):
            sheet.add(row)
    sheet.end(stop, len(wanted) * (2 if prefill else 1))
