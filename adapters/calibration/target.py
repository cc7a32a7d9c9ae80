"""How near to dense a setting must stay."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

from attrs import field, frozen

from sparseprefill.errors import ParameterError
from sparseprefill.validate import maybe, number, one_of

from ..evaluation.outcome import Outcome, Summary

Rows = Literal["all", "end"]
"""Rows in which limits hold."""


@frozen(kw_only=True)
class Target:
    """Limits that a setting must keep, all that are given.

    agreement: least share of rows in which dense and sparse choose the same next token. kl: most nats of
    KL(dense || sparse) per row, on average. recall: least attention mass kept, on average. rows: where the limits
    hold: `all`, in the rows of the whole prompt and at its end, each by itself; or `end`, at the end alone, for
    prompts that are read once and asked about behind their last row.

    Raises ParameterError for a number out of range, other rows, or where there is no limit at all.
    """

    agreement: float | None = field(default=None, validator=maybe(number(0.0, 1.0)))
    kl: float | None = field(default=None, validator=maybe(number(0.0)))
    recall: float | None = field(default=None, validator=maybe(number(0.0, 1.0)))
    rows: Rows = field(default="all", validator=one_of(*get_args(Rows)))

    def __attrs_post_init__(self) -> None:
        if all(one is None for one in (self.agreement, self.kl, self.recall)):
            raise ParameterError("target is empty: pass agreement, kl or recall")

    def shortfall(self, found: Sequence[Outcome]) -> float:
        """What was lost over what may be lost, of the limit that is broken most: up to 1 the target is met.

        found: outcomes of a setting. Infinite where it failed, or loses something where nothing may be lost.
        """
        one = Summary.of(found, 0)
        if one.failed or not found:
            return math.inf
        everywhere = self.rows == "all"
        near = [one.inside, one.end] if everywhere else [one.end]
        lost = [0.0]
        if self.agreement is not None:
            lost += [_over(1.0 - (each.agreement if each else 0.0), 1.0 - self.agreement) for each in near]
        if self.kl is not None:
            lost += [_over(each.kl if each else math.inf, self.kl) for each in near]
        if self.recall is not None:
            kept = min(one.recall, one.last_recall) if everywhere else one.last_recall
            lost.append(_over(1.0 - kept, 1.0 - self.recall))
        return max(lost)

    def __str__(self) -> str:
        words = {
            "agreement": "agreement of at least {}",
            "kl": "KL of at most {}",
            "recall": "recall of at least {}",
        }
        given = {name: getattr(self, name) for name in words}
        limits = " and ".join(words[name].format(f"{value:g}") for name, value in given.items() if value is not None)
        return limits + ("" if self.rows == "all" else " at the prompt's end")


def _over(lost: float, allowed: float) -> float:
    """lost / allowed, where a rounding error of either counts as nothing."""
    if lost <= allowed + 1e-9:
        return min(1.0, lost / allowed) if allowed > 0.0 and lost > 0.0 else 0.0
    return lost / allowed if allowed > 0.0 else math.inf
