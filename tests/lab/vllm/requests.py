"""The command `requests`."""

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
from .several import Case, Several
from .several_form import form
from .sheet import Sheet

REQUESTS, NEW, CACHED, MASKS = (2, 4, 8), (512, 2048), (0, 32768), ("tiles:0.1", "full")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(requests)


def requests(
    count: Annotated[
        list[int] | None, typer.Option("--requests", min=1, help="Requests of the step; repeat for several.")
    ] = None,
    new: Annotated[list[int] | None, typer.Option(min=1, help="New tokens of each; repeat for several.")] = None,
    cached: Annotated[list[int] | None, typer.Option(min=0, help="Cached tokens of each; repeat for several.")] = None,
    mask: Annotated[
        list[str] | None, typer.Option(help="full, tiles:SHARE or stripes:SHARE; repeat for several.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="Execute this method's masks, and time its estimate; repeat for several.")
    ] = None,
    settings: options.Set = None,
    page: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each, fewer where they take long.")] = 10,
    seconds: Annotated[float, typer.Option(min=0.01, help="That one piece of work may take in all.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Chooses inputs, masks and the order of the pages.")] = 0,
    markdown: options.Markdown = None,
    json: options.Json = None,
    heads: options.Heads = 32,
    kv_heads: options.KvHeads = 8,
    head_dim: options.HeadDim = 128,
) -> None:
    """Time one layer of a step with several requests: one launch, next to one by one. Needs no vLLM."""
    place = Place.of("auto", "auto", 1)
    files = Files(markdown=markdown, json=json)
    counts, news, behind = count or list(REQUESTS), new or list(NEW), cached or list(CACHED)
    longest = max(news) + max(behind)
    shape = Shape(length=longest, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=place.dtype_name)
    chosen = options.contenders(method or (), settings or (), gate=False)
    masks = mask or (() if chosen else MASKS)
    for text in masks:
        parse_mask(text)
    works: list[dict[str, Any]] = [{"work": text} for text in masks]
    works += [{"work": one.name, "method": True, "parameters": one.parameters} for one in chosen]
    work = Several(shape, Clock(place.device, rounds, seconds), seed)
    asked = {"command": "requests", "seed": seed, "rounds": rounds, "shape": asdict(shape)}
    sheet = Sheet(form(shape, place.device), files, asked, place.device)
    cases = [
        Case(**given, requests=many, new=tokens, cached=before, page=page)
        for given, tokens, before, many in product(works, news, behind, counts)
    ]
    with bars(len(cases)) as shown, place.threaded(), Stop() as stop:
        for case in cases:
            with shown.contender(f"{case.work}, {case.requests} x {case.new} behind {case.cached}") as progress:
                progress("measuring", 0, 1)
                sheet.add(work.measure(case))
    sheet.end(stop, len(cases))
