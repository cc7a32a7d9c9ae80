"""Questions at the end of a prompt, with the dense tail and without: ``python -m lab.tail --model MODEL`` (tests/).

A long text is prefilled by a method, and many questions are asked right behind it, each as the last rows of a prompt of
its own: with every key, as the dense tail gives them; by the method itself; and by the method looking closer at them
alone. A method that decides by whole tiles comes to the same as for the whole prompt at once, so the text is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from enum import StrEnum
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from attrs import asdict, frozen
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.cli.options import Device, Dtype, Methods, Model, Seed, Settings, Threads, Type
from sparseprefill.adapters.cli.setup import Place, Source
from sparseprefill.adapters.evaluation.outcome import Contender
from sparseprefill.adapters.evaluation.reading import Reader
from sparseprefill.adapters.evaluation.texts import built_in
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.session.defaults import TAIL
from torch import Tensor

from lab.bench import facts
from lab.bench.report import write_figures
from lab.files import JsonFile, command
from lab.single import single
from lab.turns import lookups, requests
from lab.turns.talk import Talk, Turn
from lab.turns.words import Ids, Words
from sparseprefill.errors import ParameterError

BLOCK = 128
"""Rows at whose multiples a prompt may be cut without changing what a method keeps."""
DENSE = "dense, dense"
app = command("Show what the dense tail gives to questions at the end of a prompt.")


class Task(StrEnum):
    """What is asked: values of keys that stand in the text, or notes of a conversation again, word for word."""

    LOOKUPS = "lookups"
    REQUESTS = "requests"


MAKERS = {Task.LOOKUPS: lookups.talk_of, Task.REQUESTS: requests.talk_of}


@frozen
class Way:
    """One way to read a prompt. text: what reads all but the last rows; None for the model's own attention. last: what
    reads the last rows. tail: how many of them get every key."""

    name: str
    text: Contender | None
    last: Contender | None
    tail: int = 0


@frozen
class Asked:
    """One question, read in one way.

    right: which tokens of the right answer are the likeliest, each behind the right ones before it. nll: of the answer,
    nats a token. kl: KL(dense || this), mean over the last `TAIL` rows of the prompt. last_kl: of its last row. margin:
    how far the right answer's first token is above the likeliest other, in nats. density: pairs computed / causal pairs
    of the rows that are read behind the text.
    """

    text: str
    way: str
    family: str
    right: tuple[bool, ...]
    nll: float
    kl: float
    last_kl: float
    margin: float
    density: float


@app.callback(invoke_without_command=True)
def tail(
    model: Model = None,
    task: Annotated[Task, typer.Option(help="What to ask.")] = Task.LOOKUPS,
    method: Methods = None,
    settings: Settings = None,
    closer: Annotated[
        list[str] | None,
        typer.Option(metavar="PARAMETER=VALUE", help="Change a parameter in the last rows alone; by default every=1."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1024, help="Tokens of a prompt, about.")] = 8192,
    questions: Annotated[int, typer.Option(min=1, max=24, help="Questions about a text.")] = 12,
    texts: Annotated[int, typer.Option(min=1, help="Texts, of all kinds in turn.")] = 1,
    seed: Seed = 100,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 2,
    json: JsonFile = None,
) -> None:
    """Show what the dense tail gives to questions at the end of a prompt; by rowmax unless told otherwise."""
    contender = single(method, settings, model, 0, None)
    changed = closer or ["every=1"]
    near = single(method or ["rowmax"], [*(settings or ()), *changed], model, 0, None)
    ways = (
        Way(DENSE, None, None),
        Way(f"{contender.name}, tail={TAIL}", contender, contender, TAIL),
        Way(f"{contender.name}, tail=0", contender, contender),
        Way(f"{contender.name}, tail=0, {', '.join(changed)} in the last rows", contender, near),
    )
    place = Place.of(device, dtype.value, threads)
    found: list[Asked] = []
    pairs: list[float] = []

    def figures() -> dict[str, Any]:
        about = {"model": model or "embedded", "task": task, "method": contender.name}
        more = {"parameters": dict(contender.parameters), "closer": changed, "tokens": tokens, "seed": seed}
        made = {"dtype": place.dtype_name, "density": fmean(pairs), "questions": [*map(asdict, found)]}
        return facts.about(place.device, **about, **more, **made)

    with place.threaded(), torch.inference_mode():
        source = Source.of(model, place)
        source.check_tokens(tokens)
        words = Words.of(source.tokenizer)
        natural = built_in(source.tokenizer, tokens, texts, seed, copies=0, facts=0)
        try:
            talks = [MAKERS[task](words, one, tokens, questions, seed) for one in natural]
        except ParameterError as error:
            raise CommandError(f"--tokens {tokens}: {error}") from error
        reader = Reader(source.load())
        for talk in talks:
            rows, density = read(reader, words, talk, ways)
            found += rows
            pairs.append(density)
            typer.echo(f"{talk.name}: {len(talk.ids)} tokens, {density:.1%} of the pairs")
            if json is not None and str(json) != "-":
                write_figures(json, figures())
    typer.echo("\n".join(table(found)))
    write_figures(json, figures())


def read(reader: Reader, words: Words, talk: Talk, ways: Sequence[Way]) -> tuple[list[Asked], float]:
    """Every question of a conversation in every way, and the share of the text's pairs that the method computes."""
    turns = [Turn(one.family, _prompt(words, talk, one), one.answer, one.value) for one in talk.turns]
    cut = (len(talk.ids) + min(len(one.prompt) for one in turns) - TAIL) // BLOCK * BLOCK
    if cut < BLOCK:
        raise ParameterError(f"tokens is {len(talk.ids)}: the text ends within the last rows; pass more")
    ids = torch.tensor([talk.ids], device=reader.device)
    made: list[Asked] = []
    dense: list[Tensor] = []
    share = 1.0
    caches: dict[bool, Any] = {}
    for way in ways:
        sparse = way.text is not None
        if sparse not in caches:
            caches.clear()
            with attached(reader.model, way.text, 0) as handle:
                caches[sparse] = reader.prefill(ids[:, :cut])[1]
                share = float(handle.report().density or 1.0) if sparse else share
        cache = caches[sparse]
        with attached(reader.model, way.last, way.tail) as handle:
            for index, turn in enumerate(turns):
                rows, answer = followed(reader, cache, (*talk.ids[cut:], *turn.prompt), turn.answer, handle)
                cache.crop(cut - cache.get_seq_length())
                if way.last is None:
                    dense.append(rows)
                kl = (dense[index].exp() * (dense[index] - rows)).sum(-1)
                first = answer[0].clone()
                wanted = torch.tensor(turn.answer, device=answer.device)
                own = float(first[wanted[0]])
                first[wanted[0]] = -torch.inf
                density = float(handle.report().density or 1.0) if way.last is not None else 1.0
                made.append(
                    Asked(
                        talk.name, way.name, turn.family, tuple((answer.argmax(-1) == wanted).tolist()),
                        -float(answer.gather(1, wanted[:, None]).mean()), float(kl.mean()), float(kl[-1]),
                        own - float(first.max()), density,
                    )
                )  # fmt: skip
    return made, share


def followed(reader: Reader, cache: Any, last: Ids, answer: Ids, handle: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities, float32: of the last `TAIL` rows of a prompt ``[TAIL, V]`` behind the cache, and of the rows
    that predict the answer's tokens ``[n, V]``, which are decoded, so dense."""
    rows = reader.follow(cache, torch.tensor([last], device=reader.device))[-TAIL:]
    rows = rows.float().log_softmax(-1)
    if len(answer) == 1:
        return rows, rows[-1:]
    with nullcontext() if handle is None else handle.decoding():
        others = reader.follow(cache, torch.tensor([answer[:-1]], device=reader.device)).float().log_softmax(-1)
    return rows, torch.cat([rows[-1:], others])


def attached(model: Any, contender: Contender | None, tail: int) -> Any:
    """The model with a contender and so many dense last rows, or as it is."""
    if contender is None:
        return nullcontext()
    return attach(model, contender.pipeline, gate=None, tail=tail, verify=False, recall_every=0)


def _prompt(words: Words, talk: Talk, turn: Turn) -> Ids:
    """A question as it stands right behind the text: without the full stop behind an answer."""
    stop = words.ids(".")
    ended = not talk.forced and turn is not talk.turns[0] and turn.prompt[: len(stop)] == stop
    return turn.prompt[len(stop) :] if ended else turn.prompt


def table(found: Sequence[Asked]) -> Iterator[str]:
    """Lines of Markdown: a row for each way, dense first."""
    yield "| last rows | pairs of these | answers | lost, won | tokens | NLL | margin | KL, last rows | KL, last row |"
    yield f"|---|{'---:|' * 8}"
    dense = [all(one.right) for one in found if one.way == DENSE]
    for way in dict.fromkeys(one.way for one in found):
        mine = [one for one in found if one.way == way]
        right = [all(one.right) for one in mine]
        lost = sum(b and not a for a, b in zip(right, dense, strict=True))
        won = sum(a and not b for a, b in zip(right, dense, strict=True))
        hits = sum(sum(one.right) for one in mine)
        of = sum(len(one.right) for one in mine)
        yield (
            f"| {way} | {fmean(one.density for one in mine):.1%} | {sum(right)} of {len(right)} | {lost}, {won} | "
            f"{hits} of {of} | {fmean(one.nll for one in mine):.4f} | {fmean(one.margin for one in mine):.3f} | "
            f"{fmean(one.kl for one in mine):.4f} | {fmean(one.last_kl for one in mine):.4f} |"
        )


if __name__ == "__main__":
    app()
