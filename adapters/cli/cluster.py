"""The command `cluster`: find heads of a model that look alike, and write the table for share-prefill."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..table import Table
from . import render
from .files import check_writable, write
from .group import CommandError
from .shared_options import SEEDS, Device, Dtype, Json, Model, Threads, Type

if TYPE_CHECKING:
    import torch


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(cluster)


def cluster(
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of a sample.")] = 4096,
    samples: Annotated[int, typer.Option(min=1, help="Samples; their compressed maps are averaged.")] = 4,
    block: Annotated[int, typer.Option(min=16, help="Tokens of a block of the maps.")] = 128,
    threshold: Annotated[float, typer.Option(min=0.0, help="Largest distance of heads in one cluster.")] = 10.0,
    min_size: Annotated[int, typer.Option(min=1, help="Minimum heads in a cluster; smaller ones are noise.")] = 5,
    latent: Annotated[int, typer.Option(min=1, help="Numbers that a map is compressed to.")] = 64,
    epochs: Annotated[int, typer.Option(min=1, help="Maximum epochs of training for the autoencoder.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Chooses the samples, and how the training begins.")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the table to this file.")] = Path(
        "clusters.json"
    ),
    picture: Annotated[Path, typer.Option(help="Write the picture to this file.")] = Path("clusters.png"),
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 1,
    json: Json = False,
) -> None:
    """Cluster the attention heads of a model for share-prefill.

    The model reads samples with dense attention. An autoencoder compresses the block maps of its heads, and heads with
    similar maps are clustered.
    """
    if find_spec("scipy") is None:
        raise CommandError('cluster needs scipy: pip install "sparseprefill[cluster]"')
    from ..clustering.picture import draw
    from ..clustering.table import Settings, clustered
    from ..demo.samples import key_value_prompts
    from .picture import check_path
    from .progress import bars
    from .setup import Place, Source, identity_of

    check_writable("--output", output)
    check_path(picture)
    place = Place.of(device, dtype.value, threads)
    settings = Settings(block=block, threshold=threshold, min_size=min_size, latent=latent, epochs=epochs, seed=seed)
    with bars(1) as shown, place.threaded():
        source = Source.of(model, place)
        source.check_tokens(tokens)
        try:
            prompts = key_value_prompts(source.tokenizer, tokens, samples, seed)
        except ValueError as error:
            raise CommandError(f"--tokens {tokens}: {error}") from error
        found = source.load()
        identity = identity_of(found, model)
        with shown.contender("heads") as progress:
            one = clustered(found, identity, prompts, settings, progress)
        draw(one.similar, one.heads, one.table, picture)
    table = one.table
    write("--output", output, table.to_json())
    within, across = _means(one.similar, one.labels)
    if json:
        groups = {"clusters": table.clusters, "noise": table.noise}
        figures = {"restored_error": one.restored_error, "similarity_within": within, "similarity_across": across}
        render.write_json(
            {"model": identity.name, **table.made, **groups, **figures, "output": output, "picture": picture}
        )
        return
    rows = [(str(i), str(len(group)), _words(group)) for i, group in enumerate(table.clusters)]
    rows += [("noise", str(len(table.noise)), _words(table.noise))] if table.noise else []
    title = f"{len(one.heads)} heads of {identity.name}, {samples} samples of {tokens:,} tokens"
    heads = ("cluster", "heads", "layer.head")
    render.show(Table(title=title, heads=heads, rows=rows, words=("layer.head",), drop=("heads",)))
    render.line(f"similarity of the patterns: {within:.2f} within clusters, {across:.2f} across")
    render.line(f"table: {output}")
    render.line(f"picture: {picture}")


def _means(similar: torch.Tensor, chosen: list[int]) -> tuple[float, float]:
    """Mean similarity of two heads of one cluster, and of any other two; NaN where there are none."""
    import torch

    label = torch.tensor(chosen)
    other = ~torch.eye(len(label), dtype=torch.bool)
    same = (label[:, None] == label) & (label >= 0) & other
    return float(similar[same].mean()), float(similar[~same & other].mean())


def _words(heads: tuple[tuple[int, int], ...]) -> str:
    return " ".join(f"{layer}.{head}" for layer, head in heads)
