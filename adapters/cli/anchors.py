"""The command `anchors`: find the layers of a model that choose keys for the others, and write kascade's table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..table import Table
from . import render
from .files import check_writable, write
from .group import CommandError
from .shared_options import SEEDS, Device, Dtype, Json, Model, Threads, Type


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(anchors)


def anchors(
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of a sample.")] = 2048,
    samples: Annotated[int, typer.Option(min=1, help="Samples to average over.")] = 8,
    count: Annotated[
        int | None, typer.Option(min=1, help="Anchor layers; by default one in seven, such as 5 of 32.")
    ] = None,
    tile: Annotated[int, typer.Option(min=16, help="Tokens of a query tile.")] = 128,
    columns: Annotated[int, typer.Option(min=1, help="Keys before a tile by which layers are compared.")] = 128,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Chooses the samples.")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the table to this file.")] = Path(
        "anchors.json"
    ),
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 1,
    json: Json = False,
) -> None:
    """Choose the anchor layers of a model for kascade.

    The model reads samples with dense attention. The keys that each layer would keep are compared with the attention of
    all later layers.
    """
    from sparseprefill.errors import ParameterError

    from ..anchors.table import Settings, anchored
    from ..demo.samples import key_value_prompts
    from .progress import bars
    from .setup import Place, Source, identity_of

    check_writable("--output", output)
    place = Place.of(device, dtype.value, threads)
    with bars(1) as shown, place.threaded():
        source = Source.of(model, place)
        source.check_tokens(tokens)
        wanted = Settings(count=count, tile=tile, columns=columns)
        try:
            wanted.check(tokens)
            prompts = key_value_prompts(source.tokenizer, tokens, samples, seed)
            found = source.load()
            identity = identity_of(found, model)
            with shown.contender("layers") as progress:
                one = anchored(found, identity, prompts, wanted, progress)
        except (ValueError, ParameterError) as error:
            raise CommandError(f"--tokens {tokens}: {error}") from error
    table = one.table
    write("--output", output, table.to_json())
    if json:
        scores = {k: {"anchors": layers, "score": score} for k, (layers, score) in one.scores.items()}
        maps = {"maps": {layer: table.maps[layer] for layer in sorted(table.maps)}}
        facts = {"model": identity.name, **table.made, "anchors": table.anchors, **maps}
        render.write_json({**facts, "scores": scores, "output": output})
        return
    rows = [
        (str(k), " ".join(map(str, layers)), f"{score:.3f}", "chosen" if layers == table.anchors else "")
        for k, (layers, score) in one.scores.items()
    ]
    title = f"{len(one.layers)} layers of {identity.name}, {samples} samples of {tokens:,} tokens"
    render.show(Table(title=title, heads=("anchors", "layers", "score", ""), rows=rows, words=("layers", "")))
    render.line(f"table: {output}")
