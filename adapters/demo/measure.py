"""The embedded model's tasks as a measure for tuning."""

from __future__ import annotations

from typing import Any

from attrs import evolve, field, frozen

from sparseprefill.pipeline import Pipeline

from ..calibration.search import Measured
from ..evaluation.comparison import Comparison
from ..evaluation.contender import Contender
from ..evaluation.reading import Sizes
from .exam import Exam, asker, make_exam, prompt_of
from .seeds import TUNING

LITTLE = Sizes(last=1, greedy=1, rows=1)
"""Distributions and recall play no part in tuning by answers."""


@frozen
class ExamMeasure:
    """Runs a pipeline on several exams of one length; see `sparseprefill.adapters.calibration.search.Measure`.

    texts: exams of each length. questions: of each family. seed: of the first exam. Works with any causal language
    model of transformers that answers the tasks, and its tokenizer.
    """

    model: Any
    tokenizer: Any
    texts: int = 2
    questions: int = 4
    seed: int = TUNING
    _exams: dict[int, list[Exam]] = field(factory=dict, init=False)
    _read: dict[int, list[Comparison]] = field(factory=dict, init=False)

    def __call__(self, pipeline: Pipeline | None, tokens: int) -> Measured:
        """Sum of answers and seconds, mean of densities; the first error ends it."""
        outcomes = []
        for comparison in self._compared(tokens):
            outcome = comparison.run(Contender("tuning", pipeline))
            if outcome.error:
                return Measured(0, 0, 1.0, 0.0, outcome.error)
            outcomes.append(outcome)
        return Measured(
            sum(one.right for one in outcomes),
            sum(one.asked for one in outcomes),
            sum(one.density for one in outcomes) / len(outcomes),
            sum(one.seconds for one in outcomes),
        )

    def exams(self, tokens: int) -> list[Exam]:
        """The exams of a length, made once; ValueError where the questions do not fit in it."""
        if tokens not in self._exams:
            seeds = range(self.seed, self.seed + self.texts)
            self._exams[tokens] = [make_exam(self.tokenizer, tokens, seed, self.questions) for seed in seeds]
        return self._exams[tokens]

    def _compared(self, tokens: int) -> list[Comparison]:
        """Each exam, read by the model's own attention once."""
        if tokens not in self._read:
            self._read[tokens] = [self._comparison(exam) for exam in self.exams(tokens)]
        return self._read[tokens]

    def _comparison(self, exam: Exam) -> Comparison:
        prompt, behind = prompt_of(exam, self.tokenizer)
        ask = asker(self.model, self.tokenizer, exam)
        return Comparison.of(self.model, prompt, evolve(LITTLE, tail=behind), ask=ask)
