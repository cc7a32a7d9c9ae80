"""The command `pages`."""

from __future__ import annotations

from itertools import product
from typing import Annotated, Any

import typer
from attrs import asdict
from sparseprefill.adapters.cli.group import Stop
from sparseprefill.adapters.cli.progress import bars
from sparseprefill.adapters.cli.setup import Place

from lab.bench.case import parse_mask
from lab.bench.clock import Clock
from lab.bench.shape import Shape
from lab.files import Files

from . import options
from .paging import CACHES, COPIES, LAYOUTS, MASKS, PAGES, Case, Paging
from .paging_form import form
from .sheet import Sheet


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(pages)


def pages(
    length: Annotated[int, typer.Option(min=16, help="Tokens of the prompt.")] = 131072,
    new: Annotated[
        int | None,
        typer.Option(min=1, help="How many of them, the last, are queries behind cached ones; all by default."),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(help="full, tiles:SHARE or stripes:SHARE; repeat for several."),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Time this method's estimate, in place of masks; repeat for several.")
    ] = None,
    settings: options.Set = None,
    page: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of a page; repeat for several.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="LBNHC or LBHNC, vLLM's names; repeat for both.")] = None,
    copies: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Copy K and V out of their pages first: {', '.join(COPIES)}; auto, the default, where the library "
            "finds that faster; repeat for several."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each, fewer where they take long.")] = 10,
    seconds: Annotated[float, typer.Option(min=0.01, help="That one piece of work may take in all.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Chooses inputs, masks and the order of the pages.")] = 0,
    markdown: options.Markdown = None,
    json: options.Json = None,
    heads: options.Heads = 32,
    kv_heads: options.KvHeads = 8,
    head_dim: options.HeadDim = 128,
) -> None:
    """Time one layer that reads keys and values through a block table, next to contiguous tensors. Needs no vLLM."""
    place = Place.of("auto", "auto", 1)
    files = Files(markdown=markdown, json=json)
    shape = Shape(length=length, new=new, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=place.dtype_name)
    chosen = options.contenders(method or (), settings or (), gate=False)
    masks = mask or (() if chosen else MASKS)
    for text in masks:
        parse_mask(text)
    works: list[dict[str, Any]] = [{"work": text} for text in masks]
    works += [{"work": one.name, "method": True, "parameters": one.parameters} for one in chosen]
    work = Paging(shape, Clock(place.device, rounds, seconds), seed)
    asked = {"command": "pages", "seed": seed, "rounds": rounds, "shape": asdict(shape)}
    sheet = Sheet(form(shape, place.device), files, asked, place.device)
    cases = [
        Case(**work, page=size, cache=cache, layout=name, copies=how)
        for work, size, cache, name, how in product(
            works, page or PAGES, CACHES, layout or LAYOUTS, copies or COPIES[:1]
        )
    ]
    with bars(len(cases)) as shown, place.threaded(), Stop() as stop:
        for case in cases:
            with shown.contender(str(case)) as progress:
                progress("measuring", 0, 1)
                sheet.add(work.measure(case))
    sheet.end(stop, len(cases))
