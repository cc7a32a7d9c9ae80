"""The embedded model's tasks as prompts, for tuning by answers and for frontiers."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from sparseprefill.profiles.identity import ModelIdentity

from ..calibration.fit import ModelReadings
from ..evaluation.reading import Sizes
from ..session.defaults import TAIL
from .exam import asker, make_exam, prompt_of
from .seeds import TUNING

LITTLE = Sizes(last=1, greedy=1, rows=1)
"""Distributions and recall play no part in tuning by answers."""


def exam_readings(
    model: Any,
    tokenizer: Any,
    identity: ModelIdentity,
    tokens: int,
    texts: int = 2,
    questions: int = 4,
    seed: int = TUNING,
    tail: int = TAIL,
    sizes: Sizes = LITTLE,
) -> ModelReadings:
    """Exams of one length, with what is asked about each; see `sparseprefill.adapters.calibration.search`.

    texts: exams. questions: of each family. seed: of the first exam. tail: as of `attach`. sizes: what else is
    looked at, but for its `tail`. Works with any causal language model of transformers that answers the tasks, and its
    tokenizer. ValueError where the questions do not fit.
    """
    exams = [make_exam(tokenizer, tokens, each, questions) for each in range(seed, seed + texts)]
    made = [prompt_of(exam, tokenizer) for exam in exams]
    return ModelReadings(
        model,
        identity,
        [prompt for prompt, _ in made],
        [evolve(sizes, tail=behind) for _, behind in made],
        [asker(model, tokenizer, exam) for exam in exams],
        tail,
    )
