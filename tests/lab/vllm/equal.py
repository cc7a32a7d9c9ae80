"""The command `equal`."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any

import typer
from attrs import asdict
from sparseprefill.adapters.cli.group import Stop
from sparseprefill.adapters.cli.progress import bars

from lab.bench.shape import ModelShape
from lab.files import Files

from . import options
from .engine import Setup, check
from .equality import LENGTHS, TURNS, Equality, form
from .sheet import Sheet


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(equal)


def equal(
    length: Annotated[list[int] | None, typer.Option(min=2, help="Tokens of a prompt; repeat for several.")] = None,
    method: Annotated[
        str, typer.Option(help="What our engine runs: dense keeps every key, any other must come out different.")
    ] = "dense",
    settings: options.Set = None,
    cache_dtype: Annotated[list[str] | None, typer.Option(help="auto or fp8; repeat for several.")] = None,
    block_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens of a block of the KV cache; repeat for several.")
    ] = None,
    chunk: Annotated[int, typer.Option(min=16, help="Tokens of a step of the engine.")] = 2048,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to decode.")] = 16,
    tie: Annotated[
        float,
        typer.Option(
            min=0.0, help="Accept a difference where vLLM's own log probabilities of both tokens are so close."
        ),
    ] = 0.0,
    layers: options.Layers = 2,
    stock: options.Stock = "FLASH_ATTN",
    dtype: options.Dtype = "float16",
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
    """Compare tokens with vLLM's own attention at a mask of every key; exit code 1 where they differ.

    Prompts of several lengths run at once, in chunks; then others that find half of their keys in the prefix cache.
    """
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
    (ours,) = options.contenders([method], settings or (), gate=False)
    setup = Setup(shape=shape, stock=stock, seed=seed, more=options.more(engine))
    work = Equality(setup=setup, sparse=ours.sparse or {}, lengths=length or LENGTHS, budget=chunk, answer=tokens)
    asked: dict[str, Any] = {"command": "equal", "method": method, "parameters": dict(ours.parameters)}
    asked |= {"stock": stock, "seed": seed, "tie": tie, "chunk": chunk}
    asked |= {"model": asdict(shape), "engine": dict(setup.more)}
    sheet = Sheet(form(work, tie), files, asked, options.device())
    blocks: list[int | None] = [*block_size] if block_size else [None]
    cases = list(product(cache_dtype or ["auto"], blocks))
    with bars(len(cases)) as shown, Stop() as stop:
        for cache, block in cases:
            with shown.contender(f"cache {cache}, blocks {block or 'as they are'}") as progress:
                for row in work.run(cache, block, progress):
                    sheet.add(row)
    sheet.end(stop, len(cases) * len(work.lengths) * len(TURNS), lambda row: not (row.equal or row.tied(tie)))
