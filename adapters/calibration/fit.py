"""From searches at several lengths to one profile: whose prompts are read, what goes into the file."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import asdict, field, frozen

from sparseprefill import __version__
from sparseprefill.breakeven.points import HeadShape, Point
from sparseprefill.breakeven.table import BreakEven
from sparseprefill.errors import SparsePrefillError
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import LengthRange
from sparseprefill.profiles.table import Progress
from sparseprefill.registry import Registry

from ..evaluation.comparison import Comparison
from ..evaluation.outcome import Outcome, Summary
from ..evaluation.prompts import Prompt
from ..evaluation.reading import Sizes
from ..session.defaults import TAIL
from . import measure
from .candidates import Candidate
from .measure import Clock, HeadSizes, calibrate, sizes, table_of
from .search import Search, Trial

SIZES = Sizes(greedy=16)
"""Amounts that are looked at of each prompt: a search reads much, so it follows the continuation less far than
`compare`."""
CHUNK = 2048
"""Rows of a prompt's chunk that the break-even table is measured at, besides whole prompts."""


@frozen
class ModelReadings:
    """A model that reads prompts, for a search; each prompt's dense pass is made once and kept.

    sizes: what is looked at of each prompt. tail: last rows of a prompt that get every key, as `attach` does it.
    progress: hears of each layer that has run.
    """

    model: Any
    identity: ModelIdentity
    prompts: Sequence[Prompt]
    sizes: Sizes
    tail: int = TAIL
    progress: Progress = lambda what, done, of: None
    _read: dict[int, Comparison] = field(factory=dict, init=False)

    @property
    def count(self) -> int:
        """The number of prompts."""
        return len(self.prompts)

    def stock(self, prompt: int) -> Outcome:
        """The outcome of the model's own attention on a prompt."""
        return self._comparison(prompt).stock

    def run(self, candidate: Candidate, prompt: int) -> Outcome:
        """The outcome of a candidate on it."""

        def told(what: str, done: int, of: int) -> None:
            self.progress(f"{candidate.name}: {what}", done, of)

        return self._comparison(prompt).run(candidate.contender(self.identity, self.tail), told)

    def again(self, prompt: int) -> Outcome:
        """The outcome of the model's own attention, its prefill timed once more (`Comparison.again`)."""
        self._read[prompt] = self._comparison(prompt).again()
        return self.stock(prompt)

    def compared(self, prompt: int) -> Comparison:
        """The prompt, by index, read by the model's own attention."""
        return Comparison.of(self.model, self.prompts[prompt], self.sizes, progress=self.progress)

    def _comparison(self, prompt: int) -> Comparison:
        if prompt not in self._read:
            self._read[prompt] = self.compared(prompt)
        return self._read[prompt]


def ranges(found: Iterable[Search], dense_below: int = 0) -> tuple[LengthRange, ...]:
    """Ranges of a profile: the choice of each length serves up to half the way to the next.

    dense_below: tokens below which calls run dense whatever was found; 0 for none.
    """
    ordered = sorted(found, key=lambda one: one.tokens)
    made = tuple(
        LengthRange(
            least=dense_below if i == 0 else (ordered[i - 1].tokens + one.tokens) // 2,
            tokens=one.tokens,
            method=None if one.chosen is None else one.chosen.candidate.name,
            parameters=None if one.chosen is None else dict(one.chosen.candidate.parameters),
            dense_layers=() if one.chosen is None else one.chosen.candidate.dense_layers,
            measured=_measured(one),
        )
        for i, one in enumerate(ordered)
    )
    short = LengthRange(least=0, tokens=max(1, dense_below), method=None, parameters=None)
    return (short, *made) if dense_below else made


def _measured(search: Search) -> dict[str, Any]:
    chosen = search.chosen
    known: dict[str, Any] = {"dense": figures(search.stock), "untried": search.untried}
    if chosen is not None:
        return {**known, **figures(chosen.outcomes), "shortfall": chosen.shortfall}
    return {**known, "reason": search.reason, "nearest": None if search.nearest is None else described(search.nearest)}


def described(trial: Trial) -> dict[str, Any]:
    """A trial as plain data; tables among its parameters are left out."""
    one = trial.candidate
    return {
        "method": one.name,
        "parameters": {name: value for name, value in one.parameters.items() if not isinstance(value, Mapping)},
        "dense_layers": list(one.dense_layers),
        "shortfall": trial.shortfall if trial.shortfall < float("inf") else None,
        **({"error": trial.error} if trial.error else figures(trial.outcomes)),
    }


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of several prompts; seconds of one prefill."""
    one = Summary.of(outcomes, 0)
    return {
        **{"prompts": one.prompts, "density": one.density, "seconds": one.seconds / max(1, one.prompts)},
        **{"recall": one.recall, "last_rows_recall": one.last_recall},
        **{"row_p1": one.row_p1, "row_lowest": one.row_lowest},
        **one.places,
    }


def break_even(
    made: Sequence[LengthRange],
    model: ModelIdentity,
    dtype: str,
    clock: Clock,
    registry: Registry,
    tail: int = TAIL,
    progress: Progress = lambda what, done, of: None,
) -> tuple[BreakEven | None, dict[str, str]]:
    """Times of the chosen settings beside dense attention's, by length, on the model's own heads.

    Each length is timed with a quarter and half of it, as far as they fall in its range, as whole prompts and as the
    last chunk. Beside the table comes what could not be timed, by method, with the reason; no table without any time.
    """
    heads = HeadSizes(heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim, dtype=dtype)
    points: dict[tuple[int, int], Point] = {}
    failed: dict[str, str] = {}
    for one in made:
        if one.method is None or one.parameters is None:
            continue
        keys = [n for n in (one.tokens // 4, one.tokens // 2, one.tokens) if n >= max(128, one.least)]
        pipeline = registry.build(one.method, **one.parameters).with_tail(tail)
        try:
            found = calibrate(heads, sizes(keys, (CHUNK,)), {one.method: pipeline}, clock, progress)
        except (SparsePrefillError, torch.OutOfMemoryError) as error:  # of inputs or of dense attention
            failed.setdefault(one.method, f"{one.tokens:,} tokens: {str(error).splitlines()[0]}")
            continue
        failed = {**found.failed, **failed}
        points |= {(point.queries, point.keys): point for point in found.shape.points if point.methods}
    if not any(point.whole for point in points.values()):
        return None, failed
    ordered = tuple(points[at] for at in sorted(points))
    shape = HeadShape(**asdict(heads), points=ordered)
    return table_of([shape], clock.device, clock.told), failed


def versions(methods: Iterable[str], registry: Registry) -> dict[str, str]:
    """Software that a profile was made with: this library's, and the plugins' that the methods are from."""
    wanted = set(methods)
    owners = {record.distribution for record in registry.plugins() if wanted & set(record.methods)}
    found = {"sparseprefill": __version__, "python": platform.python_version()}
    return found | measure.versions(*sorted({"torch", "transformers"} | owners - set(found)))
