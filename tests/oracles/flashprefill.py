"""FlashPrefill's threshold over sets and Python's numbers; shares no code with the refiner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def above(mine: Iterable[int], scores: Mapping[int, float], share: float) -> set[int]:
    """Of some entries those whose score is at least the share of the largest there is; -inf where it is unknown."""
    largest = max([0.0, *scores.values()])
    return {j for j in mine if scores[j] >= share * largest}
