"""Calls that are refused, one a row: a table holds the error, the words that it must say, and how to call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
from attrs import frozen

import sparseprefill as sp


@frozen
class Refusal:
    """One call that is refused.

    words: a pattern of `re` that the message must hold, with the field, its value and the remedy.
    """

    error: type[Exception]
    words: str
    run: Callable[[], object]

    def check(self) -> None:
        with pytest.raises(self.error, match=self.words):
            self.run()


def refused(
    error: type[Exception], words: str, function: Callable[..., object], /, *arguments: object, **options: object
) -> Refusal:
    """A row of a table: `function(*arguments, **options)` raises the error and says the words."""
    return Refusal(error, words, partial(function, *arguments, **options))


mask_error = partial(refused, sp.MaskError)
parameter_error = partial(refused, sp.ParameterError)
unknown_method = partial(refused, sp.UnknownMethodError)
unsupported = partial(refused, sp.UnsupportedCallError)
stage_error = partial(refused, sp.StageError)
invalid_call = partial(refused, sp.InvalidCallError)


def over(rows: Iterable[Refusal]) -> pytest.MarkDecorator:
    """A test of each row, as the parameter `refusal`, named by its words."""
    return pytest.mark.parametrize("refusal", rows, ids=lambda refusal: refusal.words)
