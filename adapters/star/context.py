"""A context that the ranks hold together, and the questions about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch import Tensor

from sparseprefill.errors import ParameterError

from .answer import Answer, columns, counting_cache
from .options import SameScores, check_options, check_scores, seeded, shown, stops
from .tokens import Rows, digest, rows_of

if TYPE_CHECKING:
    from .api import Star
    from .layout import Layout


@define(eq=False)
class Context:
    """Contexts whose phase 1 is done: one for each batch row. Made by `Star.encode`; every rank makes the same calls.

    tokens: of each row, all that is known: context, questions, answers. Each `generate` is a turn that goes on where
    the last one ended, until `rewind`.
    """

    star: Star
    tokens: list[list[int]]
    layouts: tuple[Layout, ...]
    phase: Answer
    _done: list[int] = field(init=False)
    _context: tuple[int, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._done = [layout.context for layout in self.layouts]
        self._context = tuple(map(len, self.tokens))

    @property
    def held(self) -> tuple[int, ...]:
        """Context tokens of each batch row whose keys this rank holds."""
        return tuple(layout.held(self.star.ranks.rank) for layout in self.layouts)

    def generate(self, questions: Rows, *, seed: int = 0, **options: Any) -> list[list[int]]:
        """The model's answers, by its own `generate` on every rank.

        questions: token ids of each batch row, at least one each. seed: of sampling, the same on every rank.
        options: of `generate`, such as max_new_tokens, do_sample, temperature, eos_token_id, streamer.
        Returns each row's new tokens, up to its end token. Raises ParameterError for what cannot run over ranks,
        RankError where a rank fails, stalls, was asked something else, or computes what is not finite.
        """
        star, model = self.star, self.star.model
        check_options(options, model.generation_config)
        asked = self._asked(questions)
        said = {"questions": digest(asked), "before": digest(self.tokens), "seed": seed}
        star.ranks.agree("generate", {**said, "options": shown(options, model.generation_config)})
        with star.ranks.run("phase 2"):
            ids, mask, past = self._next(asked)
            same = SameScores(star.ranks)
            processors = [*(options.pop("logits_processor", None) or []), same]
            with star.switch.to(self.phase), seeded(seed, ids.device):
                out = model.generate(
                    ids,
                    attention_mask=mask,
                    past_key_values=counting_cache(list(star.layers), past),
                    logits_processor=processors,
                    **options,
                )
            same.check()
            return self._answered(out[:, ids.shape[1] :].tolist(), stops(options, model.generation_config))

    @torch.no_grad()
    def logits(self, questions: Rows) -> Tensor:
        """Read questions and return the logits ``[B, Q, vocabulary]`` of their tokens, aligned at the end."""
        star, asked = self.star, self._asked(questions)
        star.ranks.agree("logits", {"questions": digest(asked), "before": digest(self.tokens)})
        with star.ranks.run("phase 2"):
            ids, mask, past = self._next(asked)
            places = (mask.cumsum(-1) - 1).clamp_min(0)
            with star.switch.to(self.phase):
                out: Tensor = star.model(
                    input_ids=ids[:, past:],
                    position_ids=places[:, past:],
                    past_key_values=counting_cache(list(star.layers), past),
                    logits_to_keep=max(map(len, asked)),
                ).logits
            check_scores(star.ranks, out)
            self._done = list(map(len, self.tokens))
            return out

    def rewind(self) -> None:
        """Forget all questions and answers: the next question is the first."""
        self.tokens = [row[:count] for row, count in zip(self.tokens, self._context, strict=True)]
        self._done = [layout.context for layout in self.layouts]
        self.phase.tails.clear()

    def _asked(self, questions: Rows) -> list[list[int]]:
        asked = rows_of("questions", questions)
        if len(asked) != len(self.tokens):
            raise ParameterError(f"questions: {len(asked)} rows for {len(self.tokens)} contexts; pass one for each")
        return asked

    def _next(self, asked: Sequence[list[int]]) -> tuple[Tensor, Tensor, int]:
        """Take the questions in: ids and mask of all tokens on the device, and columns that are done."""
        device = next(self.star.switch.decoder.parameters()).device
        self.tokens = [before + new for before, new in zip(self.tokens, asked, strict=True)]
        real = [len(row) - count for row, count in zip(self.tokens, self._done, strict=True)]
        self.phase.expect(list(self.star.layers), real)
        ids, mask, past = columns(self.tokens, self._done, self.star.fill)
        return ids.to(device), mask.to(device), past

    def _answered(self, rows: list[list[int]], ends: frozenset[int]) -> list[list[int]]:
        """Note the answers. The last token of all is not computed yet; padding behind an end token is forgotten."""
        answers = []
        for number, row in enumerate(rows):
            end = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
            answers.append(row[:end])
            self.tokens[number] += row[:end]
            self._done[number] = len(self.tokens[number]) - (end == len(row))
        self.phase.keep([done - layout.context for done, layout in zip(self._done, self.layouts, strict=True)])
        return answers
