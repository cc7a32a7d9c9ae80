"""What `python -m sparseprefill.adapters.star` does: every process runs it, and the first one writes."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from typing import Any

import torch

from sparseprefill import structure
from sparseprefill.errors import ParameterError

from .api import Star
from .start import Place, load, started

MOST = 1 << 30
"""Bytes of the file that questions are about."""
MARK = "\N{INFORMATION SEPARATOR ONE}"
"""What stands between a context and its question until the template is filled in."""


def write(place: Place, text: str) -> None:
    """A line on standard output, from the first process alone."""
    if place.speaks:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def ask(given: Namespace) -> None:
    """Answer questions about a file."""
    with started(given.device, given.dtype, given.timeout, given.tensor_parallel) as place:
        model, tokenizer = load(given.model, place)
        try:
            text = structure.read(given.context, MOST)
        except ParameterError as error:
            raise ParameterError(f"context is {given.context}: {error}") from error
        pairs = [split_prompt(tokenizer, text, question, plain=given.plain) for question in given.question]
        star = _star(model, given, place)
        context, seconds = _encoded(star, [pairs[0][0]])
        write(place, _phase1(star, context, seconds))
        for question, (_, ids) in zip(given.question, pairs, strict=True):
            if not given.conversation:
                context.rewind()
            options: dict[str, Any] = {"max_new_tokens": given.max_new_tokens, "do_sample": given.temperature > 0}
            if given.temperature > 0:
                options["temperature"] = given.temperature
            began = time.perf_counter()
            (answer,) = context.generate([ids], seed=given.seed, **options)
            spent = time.perf_counter() - began
            write(place, f"\n{question}\n{tokenizer.decode(answer, skip_special_tokens=True).strip()}")
            write(place, f"[{len(answer)} tokens in {spent:.2f} s]")


def split_prompt(tokenizer: Any, context: str, question: str, *, plain: bool = False) -> tuple[list[int], list[int]]:
    """Token ids of the context and of what follows it.

    The paper's templates: where the tokenizer has a chat template, both stand in one message of the user, and the
    question's part holds the rest of the template. plain: without it, the question behind the context as it is.
    """
    if plain or not getattr(tokenizer, "chat_template", None):
        return list(tokenizer(context)["input_ids"]), _ids(tokenizer, question)
    message = [{"role": "user", "content": f"{context}{MARK}{question}"}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, _, behind = text.partition(MARK)
    return _ids(tokenizer, before), _ids(tokenizer, behind)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def demo(given: Namespace) -> None:
    """The embedded model answers questions about needles in a long text."""
    from transformers.utils import logging

    from ..demo.exam import make_exam, take
    from ..demo.model import load_model, load_tokenizer

    logging.disable_progress_bar()
    with started(given.device, given.dtype, given.timeout) as place:
        model, tokenizer = load_model(place.dtype, place.device), load_tokenizer()
        exam = make_exam(tokenizer, given.tokens, given.seed, given.questions)
        star = _star(model, given, place)
        context, seconds = _encoded(star, [tokenizer(exam.context)["input_ids"]])
        write(place, _phase1(star, context, seconds))
        shown: list[str] = []

        def answer(question: str, expected: str) -> str:
            prompt, draft = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in (question, expected))
            context.rewind()
            (found,) = context.generate([prompt], max_new_tokens=len(draft), do_sample=False)
            text: str = tokenizer.decode(found, skip_special_tokens=True)
            shown.append(f"{question}{text}")
            return text

        began = time.perf_counter()
        score = take(exam, answer)
        spent = time.perf_counter() - began
        for line in shown[:: max(len(shown) // 4, 1)]:
            write(place, f"  {line.strip()}")
        for family, (right, asked) in score.items():
            write(place, f"{family:<12}{right:>3} of {asked}")
        write(place, f"phase 2: {exam.questions} questions in {spent:.1f} s")


def _star(model: Any, given: Namespace, place: Place) -> Star:
    return Star(
        model,
        block_size=given.block_size,
        anchor_length=given.anchor_length,
        tile=given.tile,
        inner=given.inner,
        group=place.group,
        timeout=given.timeout,
    )


def _encoded(star: Star, rows: list[list[int]]) -> tuple[Any, float]:
    began = time.perf_counter()
    context = star.encode(rows)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return context, time.perf_counter() - began


def _phase1(star: Star, context: Any, seconds: float) -> str:
    (layout,) = context.layouts
    held = [layout.held(rank) for rank in range(star.ranks.size)]
    ranks = f"{star.ranks.size} rank" + "s" * (star.ranks.size > 1)
    return (
        f"phase 1: {len(context.tokens[0])} tokens, {layout.count} blocks of {layout.block}, anchor {layout.prefix}, "
        f"{ranks} holding {', '.join(map(str, held))} tokens: {seconds:.2f} s"
    )
