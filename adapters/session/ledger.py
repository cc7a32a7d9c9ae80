"""The running record of one layer: how its calls ran, why, and how dense they were."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from sparseprefill.mask.count import allowed_pairs

from .report import LayerRecall, LayerReport, Mode

if TYPE_CHECKING:
    from torch import Tensor

    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.geometry import Geometry
    from sparseprefill.mask.mask import SparseMask
    from sparseprefill.plan import Result


@frozen(eq=False)
class Uncounted:
    """What tells how many pairs a result computed: its masks, or, where it ran in parts, the count on the device."""

    geometry: Geometry
    masks: tuple[SparseMask, ...] = ()
    pairs: Tensor | None = None

    @classmethod
    def of(cls, result: Result) -> Uncounted:
        """Nothing is read on the host."""
        if result.parts is not None:
            return cls(result.parts.geometry, pairs=result.parts.pairs)
        masks = result.plan.computed()
        return cls(masks[0].geometry, masks)

    @property
    def held(self) -> int:
        """Memory that keeping it would hold, in bytes."""
        return sum(mask.nbytes for mask in self.masks) if self.pairs is None else self.pairs.nbytes

    def count(self) -> tuple[int, int]:
        """Computed and allowed pairs over batch and heads (host sync)."""
        found = [mask.pairs() for mask in self.masks] if self.pairs is None else [self.pairs]
        return sum(int(pairs.sum()) for pairs in found), allowed_pairs(self.geometry)


@define(eq=False)
class LayerRecord:
    """Counts of one layer, and what the density of its last prefill needs.

    cross: calls of its cross attention. pairs: (computed, allowed) pairs measured in the last prefill. waiting: results
    of it that are not measured yet.
    lost: some result was neither kept nor measured, so that the density is unknown.
    """

    layer: int
    modes: Counter[Mode] = field(factory=Counter)
    reasons: Counter[str] = field(factory=Counter)
    cross: int = 0
    last: Mode = "unused"
    sizes: tuple[int, int, int] = (0, 0, 0)
    serial: int = -1
    pairs: tuple[int, int] = (0, 0)
    waiting: list[Uncounted] = field(factory=list)
    held: int = 0
    lost: bool = False
    total: tuple[int, int] = (0, 0)

    def count(self, mode: Mode, sizes: tuple[int, int, int]) -> None:
        """One call ran in `mode`; sizes: batch rows, queries, keys."""
        self.modes[mode] += 1
        self.last, self.sizes = mode, sizes

    def begin(self, serial: int) -> None:
        """Forget the results of the prefill before, if `serial` is another."""
        if serial != self.serial:
            self.serial, self.pairs, self.held, self.lost = serial, (0, 0), 0, False
            self.waiting.clear()

    @property
    def causal(self) -> bool:
        """Whether the layer has had a prefill call of causal attention."""
        return self.modes.total() > 0

    def measure(self, result: Uncounted) -> None:
        """Count the pairs now (host sync)."""
        pairs = result.count()
        self.pairs, self.total = _add(self.pairs, pairs), _add(self.total, pairs)

    def keep(self, result: Uncounted) -> None:
        """Count the pairs when a report asks."""
        self.waiting.append(result)
        self.held += result.held

    def report(self, *, mean: bool, recall: LayerRecall | None = None) -> LayerReport:
        """The record as it stands; measures the results that wait (host sync)."""
        while self.waiting:
            self.pairs = _add(self.pairs, self.waiting.pop().count())
        self.held = 0
        batch, queries, keys = self.sizes
        return LayerReport(
            layer=self.layer,
            mode=self.last,
            sparse_calls=self.modes["sparse"],
            window_calls=self.modes["window"],
            dense_calls=self.modes["dense"],
            cross_calls=self.cross,
            reasons=dict(self.reasons),
            density=None if self.lost or self.last != "sparse" else _ratio(self.pairs),
            mean_density=_ratio(self.total) if mean else None,
            recall=recall,
            batch=batch,
            query_length=queries,
            key_length=keys,
        )


def sizes(call: AttentionCall) -> tuple[int, int, int]:
    """Batch rows, queries and keys of a call."""
    return call.q.shape[0], call.q.shape[2], call.kv_len


def _add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


def _ratio(pairs: tuple[int, int]) -> float | None:
    return pairs[0] / pairs[1] if pairs[1] else None
