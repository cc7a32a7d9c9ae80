"""The embedded model's tasks as prompts, for tuning by answers and for frontiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from sparseprefill.profiles.identity import ModelIdentity

from ..calibration.fit import ModelReadings
from ..evaluation.reading import Sizes
from ..session.defaults import TAIL
from .exam import Exam, asker, prompt_of

LITTLE = Sizes(last=1, greedy=1, rows=1)
"""Distributions and recall play no part in tuning by answers."""


def exam_readings(
    model: Any,
    tokenizer: Any,
    identity: ModelIdentity,
    exams: Sequence[Exam],
    tail: int = TAIL,
    sizes: Sizes = LITTLE,
) -> ModelReadings:
    """Exams of one length, with what is asked about each; see `sparseprefill.adapters.calibration.search`.

    tail: as of `attach`. sizes: what else is looked at, but for its `tail`. Works with any causal language model of
    transformers that answers the tasks, and the tokenizer that the exams were made with.
    """
    made = [prompt_of(exam, tokenizer) for exam in exams]
    return ModelReadings(
        model,
        identity,
        [prompt for prompt, _ in made],
        [evolve(sizes, tail=behind) for _, behind in made],
        [asker(model, tokenizer, exam) for exam in exams],
        tail,
    )
