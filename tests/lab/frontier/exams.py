"""The texts of every length, with questions or as they are, and a model that reads them and answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen
from sparseprefill.adapters.calibration.fit import ModelReadings
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.cli.searched import SAMPLED
from sparseprefill.adapters.cli.setup import Source
from sparseprefill.adapters.demo.exam import Exam, asker, make_exam, prompt_of
from sparseprefill.adapters.demo.tasks import TUNING
from sparseprefill.adapters.evaluation.comparison import Ask, Comparison
from sparseprefill.adapters.evaluation.prompts import Prompt
from sparseprefill.adapters.evaluation.reading import Sizes
from sparseprefill.adapters.evaluation.texts import built_in

from sparseprefill.profiles.identity import ModelIdentity

CLUSTERED = 4
"""Texts that tables of a model are made from."""


@frozen
class Asked(ModelReadings):
    """A model that is asked about each prompt, too, where there are questions.

    asks: questions to each prompt. behind: tokens of the first question and its answer, which are held back from it.
    """

    asks: Sequence[Ask] = field(default=(), kw_only=True)
    behind: Sequence[int] = field(default=(), kw_only=True)

    def held_back(self, prompt: int) -> int:
        """Tokens of a prompt, by index, that are no part of its prefill."""
        return self.behind[prompt] if self.behind else self.sizes.tail

    def compared(self, prompt: int) -> Comparison:
        """The prompt, by index, read by the model's own attention, and its answers."""
        sizes = evolve(self.sizes, tail=self.held_back(prompt))
        ask = self.asks[prompt] if self.asks else None
        return Comparison.of(self.model, self.prompts[prompt], sizes, ask=ask, progress=self.progress)


@frozen(eq=False)
class Texts:
    """What a model reads: texts of each length. read: gives the model, once it is loaded, with the texts of a length.
    others: prompts of texts that are not measured, to make a model's tables from."""

    read: Callable[[Any, ModelIdentity, int], Asked]
    others: Sequence[Prompt]

    @classmethod
    def of_tasks(
        cls, source: Source, lengths: Sequence[int], texts: int, questions: int, seed: int, tail: int, sizes: Sizes
    ) -> Texts:
        """Texts with the embedded model's tasks. CommandError where they do not fit."""
        exams = exams_of(source, lengths, texts, questions, seed)
        others = exams_of(source, [min(SAMPLED, lengths[0])], CLUSTERED, 1, TUNING)
        prompts = [prompt_of(exam, source.tokenizer)[0] for own in others.values() for exam in own]

        def read(model: Any, identity: ModelIdentity, tokens: int) -> Asked:
            return readings_of(model, source, identity, exams, tail, sizes)(tokens)

        return cls(read, prompts)

    @classmethod
    def natural(
        cls,
        source: Source,
        lengths: Sequence[int],
        texts: int,
        seed: int,
        tail: int,
        sizes: Sizes,
        kinds: Sequence[str],
    ) -> Texts:
        """Natural texts of all kinds, or some, in turn, with passages and facts that are restated in them."""
        for tokens in lengths:
            source.check_tokens(tokens)
        made = {tokens: built_in(source.tokenizer, tokens, texts, seed, kinds) for tokens in lengths}
        others = built_in(source.tokenizer, min(SAMPLED, lengths[0]), CLUSTERED, seed + texts + 1, kinds)

        def read(model: Any, identity: ModelIdentity, tokens: int) -> Asked:
            return Asked(model, identity, made[tokens], evolve(sizes, greedy=1, repeats=1), tail)

        return cls(read, others)


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
        return Asked(model, identity, prompts, sizes, tail, asks=asks, behind=behind)

    return readings
