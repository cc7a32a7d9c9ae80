"""A prompt in two steps, each dense or sparse: ``python -m lab.mixed --model MODEL`` (from tests/).

What becomes of a prompt that begins dense and goes on sparse, or the other way round, as where dense attention answers
behind a sparse prefill? Of the rows of the second step this shows what they copy from far above, and KL against both
steps dense, for each way to mix. It is why a gate judges a prompt as a whole.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Any

import torch
import typer
from attrs import asdict, frozen
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.cli.options import Configs, Device, Dtype, Methods, Model, Seed, Settings, Threads, Type
from sparseprefill.adapters.cli.setup import Place, Source
from sparseprefill.adapters.evaluation.outcome import Contender
from sparseprefill.adapters.evaluation.reading import Reader
from sparseprefill.adapters.evaluation.texts import SHORTEST, built_in
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.session.defaults import TAIL
from torch import Tensor

from lab.bench import facts
from lab.bench.report import write_figures
from lab.files import JsonFile, command
from lab.single import single

WAYS = {
    "dense": (False, False),
    "sparse, sparse": (True, True),
    "dense, sparse": (False, True),
    "sparse, dense": (True, False),
}
app = command("Show what a prompt in two steps copies where the first, the second or both are sparse.")


@frozen
class Row:
    """One text, one way. copies: restated tokens of the second step that are right, of so many. kl: mean over its rows
    but the last `TAIL`, against both steps dense. density: of the second step."""

    text: str
    way: str
    copies: int
    of: int
    nll: float
    kl: float
    density: float


@app.callback(invoke_without_command=True)
def mixed(
    model: Model = None,
    method: Methods = None,
    settings: Settings = None,
    config: Configs = None,
    tokens: Annotated[int, typer.Option(min=SHORTEST, help="Tokens of a text.")] = 8192,
    first: Annotated[float, typer.Option(min=0.01, max=0.99, help="Share of the tokens in the first step.")] = 0.75,
    texts: Annotated[int, typer.Option(min=1, help="Texts, of all kinds in turn.")] = 1,
    seed: Seed = 100,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 2,
    json: JsonFile = None,
) -> None:
    """Show what a prompt in two steps copies where the first, the second or both are sparse; rowmax by default."""
    contender = single(method, settings, model, TAIL, config)
    place = Place.of(device, dtype.value, threads)
    found: list[Row] = []
    typer.echo("| text | first step, second | copies | NLL | KL | pairs of the second |\n|---|---|---:|---:|---:|---:|")
    with place.threaded(), torch.inference_mode():
        source = Source.of(model, place)
        read = built_in(source.tokenizer, tokens, texts, seed)
        loaded = source.load()
        for text in read:
            cut = int(len(text.ids) * first)
            at = [i for span in text.copies for i in range(span.first, span.last) if i > cut]
            if not at:
                raise CommandError(f"--first {first:g}: {text.name} restates nothing behind it; pass less")
            ids = torch.tensor([text.ids], device=place.device)
            dense: Tensor | None = None
            for way, sparse in WAYS.items():
                rows, density = steps(loaded, contender, ids, cut, sparse)
                dense = rows if dense is None else dense
                mine = rows[torch.tensor(at, device=rows.device) - 1 - cut]
                right = int((mine.argmax(-1) == ids[0, at]).sum())
                nll = -float(mine.gather(1, ids[0, at][:, None]).mean())
                kl = float((dense.exp() * (dense - rows)).sum(-1)[:-TAIL].mean())
                found.append(Row(text.name, way, right, len(at), nll, kl, density))
                typer.echo(f"| {text.name} | {way} | {right} of {len(at)} | {nll:.4f} | {kl:.4f} | {density:.1%} |")
    write_figures(json, facts.about(place.device, model=model or "embedded", first=first, rows=[*map(asdict, found)]))


def steps(model: Any, contender: Contender, ids: Tensor, cut: int, sparse: tuple[bool, bool]) -> tuple[Tensor, float]:
    """Log-probabilities ``[n, V]`` of the second step's rows, float32, and its share of the pairs."""

    def attached(on: bool) -> Any:
        more: dict[str, Any] = {"gate": None, "tail": contender.dense_tail, "verify": False, "recall_every": 0}
        return attach(model, contender.pipeline, **more) if on else nullcontext()

    reader = Reader(model)
    with attached(sparse[0]):
        cache = reader.prefill(ids[:, :cut])[1]
    with attached(sparse[1]) as handle:
        logits = reader.follow(cache, ids[:, cut:])
        density = float(handle.report().density or 1.0) if sparse[1] else 1.0
    return logits.float().log_softmax(-1), density


if __name__ == "__main__":
    app()
