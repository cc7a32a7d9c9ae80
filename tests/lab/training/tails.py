"""What dense last rows bring and cost: answers by method, number of dense rows, and how the question is asked.

Run as ``python -m lab.training.tails --tokens 8192``, with ``--model DIR`` for another checkpoint that
`lab.training` made. Each prompt is one prefill, question included. A question is short (about 20 tokens), or as
a person asks (20 to 60 tokens), or it stands before the text, so that only the beginning of the answer's sentence
stands behind it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from attrs import frozen
from sparseprefill.adapters.demo.exam import greedy
from sparseprefill.adapters.demo.model import PARAMETERS, load_model, load_tokenizer
from sparseprefill.adapters.demo.tasks import TABLES, Family, make_task

from lab.bench.clock import Clock
from lab.frontier.layers import Layers, LayersTime
from sparseprefill.pipeline import Pipeline
from sparseprefill.registry import default_registry
from sparseprefill.route import Route

logger = logging.getLogger("lab.training.tails")

Way = Literal["short", "long", "before"]
"""How a question is asked."""

WAYS: tuple[Way, ...] = get_args(Way)
ASKED: tuple[Family, ...] = ("single", "multikey")
"""The families that know all three ways."""

TAILS = (0, 16, 32, 64, 128)
TABLELESS: Mapping[str, Mapping[str, Any]] = {
    "kascade": {"anchors": (0, 2)},
    "share-prefill": {"clusters": "single"},
}
"""What methods take that have no table of another checkpoint."""


@frozen
class Asked:
    """A prompt and the answer to its question, both as tokens. beside: tokens of the prompt behind the text."""

    way: Way
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    beside: int


@frozen
class Row:
    """What a method answers with so many dense last rows.

    method: its name; "dense" for the model's own attention, whose tail says nothing. right: answers by way. density:
    pairs computed over causal pairs, of the last prompt. time: of the attention of all layers on the first prompt.
    """

    method: str
    tail: int
    right: Mapping[Way, int]
    density: float = 1.0
    time: LayersTime | None = None


def parted(text: str) -> tuple[str, str]:
    """A question, and the beginning of its answer's sentence that stands behind it in the prompt."""
    cut = text.rindex("The special magic number")
    return text[:cut].rstrip(), text[cut:]


def prompts(tokenizer: Any, tokens: int, tasks: int, seed: int = TABLES) -> list[Asked]:
    """`tasks` prompts of each family and way, of at most `tokens` tokens with the answer; ValueError for too few."""
    made = []
    for way in WAYS:
        for family in ASKED:
            for index in range(tasks):
                wording: Literal["short", "long"] = "long" if way == "long" else "short"
                task = make_task(tokenizer, family, tokens, seed + index, wording=wording)
                question, lead = parted(task.questions[0].text)
                behind = lead if way == "before" else f"{question} {lead}"
                text = f"{question}\n{task.context}{lead}" if way == "before" else task.prompt()
                answer = _ids(tokenizer, task.questions[0].answer)
                made.append(Asked(way, tuple(tokenizer(text)["input_ids"]), answer, len(_ids(tokenizer, behind))))
    return made


def rows(
    model: Any,
    asked: Sequence[Asked],
    methods: Mapping[str, Pipeline | Route],
    tails: Sequence[int] = TAILS,
    clock: Clock | None = None,
) -> Iterator[Row]:
    """The model's own answers, then each method's with each tail. clock: also times the attention of all layers.

    A call that a method would leave to dense attention raises: no dense run passes for a sparse one.
    """
    from sparseprefill.adapters.huggingface import attach

    yield Row("dense", 0, _right(model, asked))
    device = model.get_input_embeddings().weight.device
    layers = None if clock is None else Layers.of(model, torch.tensor([asked[0].prompt], device=device))
    for name, pipeline in methods.items():
        for tail in tails:
            with attach(model, pipeline, tail=tail, gate=None, strict=True, recall_every=0) as handle:
                right = _right(model, asked)
                density = handle.report().density
            time = None if layers is None or clock is None else layers.time(pipeline.with_tail(tail), clock)
            yield Row(name, tail, right, float("nan") if density is None else density, time)


def table(found: Sequence[Row], each: int) -> str:
    """The rows as Markdown. each: prompts of each way."""
    timed = any(row.time for row in found)
    names = [*(f"{way} of {each}" for way in WAYS), "density", *(("attention, ms", "speed-up") if timed else ())]
    lines = [f"| method | tail | {' | '.join(names)} |", f"| --- | ---: |{' ---: |' * len(names)}"]
    for row in found:
        cells = [str(row.right[way]) for way in WAYS] + [f"{row.density:.4f}"]
        if timed:
            cells += ["", ""] if row.time is None else [f"{row.time.seconds * 1e3:.2f}", f"{row.time.speedup:.2f}"]
        tail = "" if row.method == "dense" else str(row.tail)
        lines.append(f"| {row.method} | {tail} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run it from the command line."""
    parser = argparse.ArgumentParser(description="Answers by method, dense last rows, and how the question is asked.")
    parser.add_argument("--model", type=Path, help="folder of a trained checkpoint; by default the embedded model")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the longest prompt with its answer")
    parser.add_argument("--tasks", type=int, default=8, help="prompts of each family and way of asking")
    parser.add_argument("--tails", type=int, nargs="+", default=TAILS, help="numbers of dense last rows to try")
    parser.add_argument("--method", nargs="+", help="methods; by default all that are registered")
    parser.add_argument("--seed", type=int, default=TABLES)
    parser.add_argument("--time", action="store_true", help="also time the attention of all layers, beside dense")
    options = parser.parse_args(arguments)
    if options.model is not None and not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: no checkpoint in this folder")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if options.tasks < 1 or min(options.tails) < 0:
        parser.error(f"--tasks {options.tasks} --tails {options.tails}: pass at least 1 task, and tails of 0 or more")
    registry = default_registry()
    known = [name for name in registry.methods() if name != "dense"]
    unknown = [name for name in options.method or () if name not in known]
    if unknown:
        parser.error(f"--method {unknown[0]}: no such method; there are {', '.join(known)}")
    settings = PARAMETERS if options.model is None else TABLELESS
    methods = {name: registry.build(name, **settings.get(name, {})) for name in options.method or known}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokenizer = load_tokenizer(options.model)
    try:
        asked = prompts(tokenizer, options.tokens, options.tasks, options.seed)
    except ValueError as error:
        parser.error(f"--tokens {options.tokens} --tasks {options.tasks}: {error}")
    model = load_model(dtype=dtype, device=device, folder=options.model)
    clock = Clock(device, rounds=5, budget=1.0) if options.time else None
    found = []
    for row in rows(model, asked, methods, options.tails, clock):
        found.append(row)
        logger.info("%s, tail %d: %s, density %.4f", row.method, row.tail, dict(row.right), row.density)
    beside = {way: [one.beside for one in asked if one.way == way] for way in WAYS}
    spans = ", ".join(f"{way} {min(found)} to {max(found)}" for way, found in beside.items())
    sys.stdout.write(f"{table(found, options.tasks * len(ASKED))}\n\nTokens after the text: {spans}.\n")


def _right(model: Any, asked: Sequence[Asked]) -> dict[Way, int]:
    """Right answers by way, each prompt read anew."""
    from transformers import DynamicCache

    right: dict[Way, int] = dict.fromkeys(WAYS, 0)
    for one in asked:
        found = greedy(model, DynamicCache(config=model.config), list(one.prompt), list(one.answer))
        right[one.way] += found == list(one.answer)
    return right


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


if __name__ == "__main__":
    main()
