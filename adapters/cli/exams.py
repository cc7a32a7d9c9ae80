"""The tasks that commands ask a model: texts of every length with questions, and a model that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve

from sparseprefill.profiles.identity import ModelIdentity

from ..calibration.fit import ModelReadings
from ..demo.exam import Exam, asker, make_exam, prompt_of
from ..evaluation.prompts import Prompt
from ..evaluation.reading import Sizes
from .group import CommandError
from .setup import Source

GREEDY = 16
"""Tokens of dense's own continuation that the demo looks at."""
LITTLE = Sizes(last=1, greedy=1, rows=1)
"""What tuning by answers looks at besides: distributions and recall play no part in it."""


def exams_of(source: Source, lengths: Sequence[int], texts: int, questions: int, seed: int) -> dict[int, list[Exam]]:
    """The tasks of every length, for a model. CommandError where they do not fit, or it does not read so much."""
    for tokens in lengths:
        source.check_tokens(tokens)
    made = {}
    for tokens in lengths:
        try:
            made[tokens] = [make_exam(source.tokenizer, tokens, each, questions) for each in range(seed, seed + texts)]
        except ValueError as error:
            raise CommandError(f"--tokens {tokens} --questions {questions}: {error}") from error
    return made


def asked_of(exam: Exam, source: Source, sizes: Sizes = LITTLE) -> tuple[Prompt, Sizes]:
    """The text as a prompt, and what is looked at of it: its `tail` is what stands behind the text."""
    prompt, behind = prompt_of(exam, source.tokenizer)
    return prompt, evolve(sizes, tail=behind)


def readings_of(
    model: Any,
    source: Source,
    identity: ModelIdentity,
    exams: Mapping[int, Sequence[Exam]],
    tail: int,
    sizes: Sizes = LITTLE,
) -> Callable[[int], ModelReadings]:
    """A loaded model that reads the tasks of a length.

    tail: as `attach` takes it. sizes: what else is looked at of a text. Works with any causal
    language model of transformers that answers the tasks.
    """

    def readings(tokens: int) -> ModelReadings:
        prompts, looked = zip(*(asked_of(exam, source, sizes) for exam in exams[tokens]), strict=True)
        asks = [asker(model, source.tokenizer, exam) for exam in exams[tokens]]
        return ModelReadings(model, identity, prompts, looked, asks, tail)

    return readings
