"""The command `demo`: the embedded model answers questions about a long text, dense and with every method."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..demo.tasks import TABLES
from ..session.defaults import TAIL
from . import options, render
from .group import CommandError, Stop, check_writable

if TYPE_CHECKING:
    from ..evaluation.outcome import Outcome

GREEDY = 16
"""Tokens of dense's own continuation that are looked at."""
LAYER, HEAD = 4, 0
"""Whose mask the picture shows unless told otherwise."""
SHOWN = ("rowmax", "bfla", "streaming")
"""The methods of a first look, which takes less than a minute: one that keeps answers inside, two that lose them."""


TOKENS = 16384
"""Of the text, unless told otherwise, as far as the model reads them."""
SECONDS = 120.0
"""Time for the readings of a pretrained model on a CPU, about, unless the length is given; loading comes on top."""
LENGTHS = (1024, 2048, 4096, 8192)
"""Tokens of its text: the longest that the time suffices for, and the first in any case."""
EVERY = 8
"""Of so many rows of that text one is compared with dense attention's: a large vocabulary makes them dear."""
PREFILLS, STEPS, STEP = 2, 60, 8
"""Costs of a reading, at most: prefills, with one of the stock model beside; steps of so many tokens, for answers."""


def demo(
    model: options.Model = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=256, help="Tokens of the text; by default 16,384, and with --model on a CPU what takes minutes."
        ),
    ] = None,
    method: options.Methods = None,
    full: Annotated[bool, typer.Option("--full", help="Run every method instead of three.")] = False,
    settings: options.Settings = None,
    config: options.Configs = None,
    tail: options.Tail = TAIL,
    recall_floor: options.Floor = None,
    questions: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=16,
            help="Questions of each family; by default 2, 4 with --full or --method, 1 with --model on a CPU.",
        ),
    ] = None,
    seed: options.Seed = TABLES,
    picture: Annotated[Path, typer.Option(help="Write the picture of the masks to this file.")] = Path(
        "sparseprefill-demo.png"
    ),
    layer: options.Layer = LAYER,
    head: options.Head = HEAD,
    device: options.Device = "auto",
    dtype: options.Type = options.Dtype.AUTO,
    threads: Annotated[int, typer.Option(min=1, help="Threads on a CPU; use 1 if other work runs there.")] = 2,
    json: options.Json = False,
) -> None:
    """Compare dense and sparse prefill on the embedded model, in less than a minute; --full runs every method.

    The model reads a long text with facts hidden in it, once with its own attention and once with each method, and
    then answers questions about it. The embedded model was trained for that, and methods run at settings that suit it;
    --model runs the same on a pretrained one, which copies restated passages, too. Ctrl-C stops and shows what was
    measured so far.
    """
    from sparseprefill.registry import default_registry

    from ..demo.exam import asker, make_exam, prompt_of
    from ..evaluation.comparison import counted, outcomes
    from ..evaluation.reading import Sizes
    from ..evaluation.texts import COPIES, LENGTH, share_of, with_copies
    from . import picture as pictures
    from . import results
    from .progress import bars
    from .setup import EMBEDDED, Place, Source

    check_writable("--picture", picture, ".png")
    registry = default_registry()
    if full and method:
        raise CommandError("--full runs every method: leave out --method, or --full")
    names = method
    if not (full or method):
        set_too = [options.setting(text)[0] for text in settings or ()]
        names = [*SHOWN, *(name for name in set_too if name in options.every(registry))]
    compared = options.contenders(registry, names, settings or (), model, tail, recall_floor, config or ())
    place = Place.of(device, dtype.value, threads)
    found: list[Outcome] = []
    with bars(len(compared) + 1) as shown, place.threaded():
        source = Source.of(model, place)
        source.check_layers(layer, head)
        slow = model is not None and place.device.type == "cpu"
        loaded = None
        if tokens is None and slow:
            loaded = source.load()
            with counted(loaded, partial(shown.doing, "a first prefill")):
                tokens = _affordable(loaded, source.positions, len(compared) + 1)
            shown.finished(f"{tokens:,} tokens: as many as this CPU reads in about two minutes; --tokens reads more")
        tokens = tokens or min(TOKENS, source.positions or TOKENS)
        source.check_tokens(tokens)
        questions = questions or (1 if slow else 4 if full or method else 2)
        try:
            room = 0 if model is None else share_of(COPIES, tokens) * LENGTH
            exam = make_exam(source.tokenizer, tokens - room, seed, questions)
        except ValueError as error:
            raise CommandError(f"--tokens {tokens} --questions {questions}: {error}") from error
        prompt, behind = prompt_of(exam, source.tokenizer)
        prompt = prompt if model is None else with_copies(prompt, tokens, seed)
        sizes = Sizes(tail=behind, greedy=GREEDY, beside=True, every=EVERY if slow else 1, lowest=0)
        loaded = source.load() if loaded is None else loaded
        ask = asker(loaded, source.tokenizer, exam)
        with Stop() as stop:
            for one in outcomes(loaded, [prompt], compared, sizes, shown, (layer, head), ask):
                found.append(one)
                shown.finished(results.line_of(found, sizes))
    stop.check(len(found))
    pictures.draw(found, layer, head, picture)
    facts: dict[str, Any] = {
        **{"model": model or EMBEDDED, "tokens": tokens, "questions": exam.questions, "seed": seed},
        **place.facts,
        **{"tail": tail, "recall_floor": recall_floor, "stopped": stop.heard},
        "picture": {"path": str(picture), "layer": layer, "head": head},
    }
    title = f"{model or 'the embedded model'}: {tokens:,} tokens, {exam.questions} questions, seed {seed}, {place}"
    title += "" if tail == TAIL else f", tail {tail}"
    shown_files = {f"picture of layer {layer}, head {head}": picture}
    results.report(found, sizes, place, title, facts, shown_files, json=json)
    render.broken(registry)
    stop.end(len(found), len(compared) + 1, "readings", failed=any(one.error for one in found))


def _affordable(model: Any, most: int | None, readings: int) -> int:
    """Tokens of the longest text that so many readings are done with in time, by two dense prefills and a step."""
    from ..evaluation.reading import Reader

    reader = Reader(model)
    least = min(LENGTHS[0], most or LENGTHS[0])
    half, whole, step = (reader.once(tokens) for tokens in (least // 2, least, STEP))
    square = max(0.0, 2 * (whole - 2 * half))  # seconds of a prefill of `least` tokens that grow with its square
    linear = max(0.0, whole - square)
    fits = least
    for tokens in LENGTHS:
        longer = tokens / least
        cost = readings * (PREFILLS * (linear * longer + square * longer**2) + STEPS * step)
        fits = tokens if cost <= SECONDS and tokens <= (most or tokens) else fits
    return fits
