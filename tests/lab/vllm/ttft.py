"""The command `ttft`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer
from attrs import asdict
from sparseprefill.adapters.cli.group import CommandError, Stop
from sparseprefill.adapters.cli.progress import bars

from lab.bench.shape import ModelShape
from lab.files import Files

from . import options
from .engine import Setup, check
from .first_token import CHUNK, LENGTHS, Contender, FirstToken
from .first_token_form import form
from .sheet import Sheet
from .structure import Structure

DENSE = "dense"


class Inputs(StrEnum):
    """On what the layers compute their attention."""

    HEADS = "heads"
    MODEL = "model"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(ttft)


def alone(wanted: Sequence[Contender]) -> None:
    """CommandError without any engine, or with several for the processes of torchrun."""
    if not wanted:
        raise CommandError("--without-stock --without-dense: nothing is left to time; name a --method")
    if len(wanted) > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        names = ", ".join(one.name for one in wanted)
        raise CommandError(
            f"torchrun's processes connect for one engine, not for {names}: start torchrun once for each, "
            "with --without-stock, --without-dense or without --method"
        )


def ttft(
    length: Annotated[list[int] | None, typer.Option(min=16, help="Tokens of the prompt; repeat for several.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Also time this method; repeat for several.")] = None,
    settings: options.Set = None,
    chunk: Annotated[
        list[int] | None,
        typer.Option(min=0, help=f"Tokens of a step, 0 for all at once; repeat for several. By default 0 and {CHUNK}."),
    ] = None,
    gate: Annotated[bool, typer.Option("--gate", help="Let the break-even gate keep small calls dense.")] = False,
    beside: Annotated[
        bool, typer.Option("--beside-stock/--without-stock", help="Whether vLLM's own attention is timed, too.")
    ] = True,
    dense: Annotated[bool, typer.Option("--dense/--without-dense", help="Time our kernel with every key, too.")] = True,
    structure: Annotated[
        Inputs, typer.Option(help="What attention runs on: made-up heads, or the random model's own q and k.")
    ] = Inputs.HEADS,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each, after one to warm up; the median counts.")] = 3,
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
    """Time the first token of one prompt: vLLM's own attention, ours with every key (dense), and each --method.

    Under torchrun, with an --engine whose executor is external_launcher, over several GPUs; the first writes files.
    Its processes connect for one engine alone: name one, such as --without-stock --without-dense --method rowmax.
    """
    check()
    files = Files() if int(os.environ.get("RANK", "0")) else Files(markdown=markdown, json=json)
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
    methods = [*([DENSE] if dense else []), *(method or ())]
    wanted = [*([Contender(stock)] if beside else []), *options.contenders(methods, settings or (), gate)]
    alone(wanted)
    setup = Setup(shape=shape, stock=stock, seed=seed, more=options.more(engine))
    work = FirstToken(
        setup=setup,
        structure=Structure(shape, options.device(), heads=structure is Inputs.HEADS, seed=seed),
        lengths=sorted(set(length or LENGTHS)),
        chunks=[one or None for one in chunk or (0, CHUNK)],
        rounds=rounds,
    )
    asked = {"command": "ttft", "stock": stock, "seed": seed, "rounds": rounds, "structure": structure.value}
    sheet = Sheet(
        form(work), files, {**asked, "gate": gate, "model": asdict(shape), "engine": dict(setup.more)}, options.device()
    )
    with bars(len(wanted)) as shown, Stop() as stop:
        for one in wanted:
            with shown.contender(one.name) as progress:
                for row in work.run(one, progress):
                    sheet.add(row)
    sheet.end(stop, len(wanted) * len(work.cases()))
