"""The texts of every length with questions, and a model that reads them and answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen
from sparseprefill.adapters.calibration.fit import ModelReadings
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.cli.setup import Source
from sparseprefill.adapters.demo.exam import Exam, asker, make_exam, prompt_of
from sparseprefill.adapters.evaluation.comparison import Ask, Comparison
from sparseprefill.adapters.evaluation.reading import Sizes

from sparseprefill.profiles.identity import ModelIdentity


@frozen
class Asked(ModelReadings):
    """A model that is asked about each prompt, too.

    asks: questions to each prompt. behind: tokens of the first question and its answer, which are held back from it.
    """

    asks: Sequence[Ask] = ()
    behind: Sequence[int] = ()

    def compared(self, prompt: int) -> Comparison:
        """The prompt, by index, read by the model's own attention, and its answers."""
        sizes = evolve(self.sizes, tail=self.behind[prompt])
        return Comparison.of(self.model, self.prompts[prompt], sizes, ask=self.asks[prompt])


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


def readings_of(
    model: Any, source: Source, identity: ModelIdentity, exams: Mapping[int, Sequence[Exam]], tail: int, sizes: Sizes
) -> Callable[[int], Asked]:
    """A loaded model that reads the tasks of a length.

    tail: as `attach` takes it. sizes: what else is looked at of a text. Works with any causal language model of
    transformers that answers the tasks.
    """

    def readings(tokens: int) -> Asked:
        prompts, behind = zip(*(prompt_of(exam, source.tokenizer) for exam in exams[tokens]), strict=True)
        asks = [asker(model, source.tokenizer, exam) for exam in exams[tokens]]
        return Asked(model, identity, prompts, sizes, tail, asks, behind)

    return readings
