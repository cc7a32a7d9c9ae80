"""The running record of one layer: how its calls ran, why, and how dense they were."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attrs import define, field

from sparseprefill.density import selected_pairs

from .report import LayerReport, Mode

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask import SparseMask
    from sparseprefill.plan import Plan


@define(eq=False)
class LayerRecord:
    """Counts of one layer, and what the density of its last prefill needs.

    pairs: (computed, allowed) pairs measured in the last prefill. waiting: masks of it that are not measured yet.
    lost: some mask was neither kept nor measured, so that the density is unknown.
    """

    layer: int
    modes: Counter[Mode] = field(factory=Counter)
    reasons: Counter[str] = field(factory=Counter)
    last: Mode = "unused"
    sizes: tuple[int, int, int] = (0, 0, 0)
    serial: int = -1
    pairs: tuple[int, int] = (0, 0)
    waiting: list[tuple[SparseMask, ...]] = field(factory=list)
    held: int = 0
    lost: bool = False
    total: tuple[int, int] = (0, 0)

    def count(self, mode: Mode, sizes: tuple[int, int, int]) -> None:
        """One call ran in `mode`; sizes: batch rows, queries, keys."""
        self.modes[mode] += 1
        self.last, self.sizes = mode, sizes

    def begin(self, serial: int) -> None:
        """Forget the masks of the prefill before, if `serial` is another."""
        if serial != self.serial:
            self.serial, self.pairs, self.held, self.lost = serial, (0, 0), 0, False
            self.waiting.clear()

    def measure(self, masks: tuple[SparseMask, ...]) -> None:
        """Count the pairs now (host sync)."""
        pairs = count_pairs(masks)
        self.pairs, self.total = _add(self.pairs, pairs), _add(self.total, pairs)

    def keep(self, masks: tuple[SparseMask, ...], size: int) -> None:
        """Count the pairs when a report asks."""
        self.waiting.append(masks)
        self.held += size

    def report(self, *, mean: bool) -> LayerReport:
        """The record as it stands; measures the masks that wait (host sync)."""
        while self.waiting:
            self.pairs = _add(self.pairs, count_pairs(self.waiting.pop()))
        self.held = 0
        batch, queries, keys = self.sizes
        return LayerReport(
            layer=self.layer,
            mode=self.last,
            sparse_calls=self.modes["sparse"],
            band_calls=self.modes["band"],
            dense_calls=self.modes["dense"],
            reasons=dict(self.reasons),
            density=None if self.lost or self.last != "sparse" else _ratio(self.pairs),
            mean_density=_ratio(self.total) if mean else None,
            batch=batch,
            query_length=queries,
            key_length=keys,
        )


def sizes(call: AttentionCall) -> tuple[int, int, int]:
    """Batch rows, queries and keys of a call."""
    return call.q.shape[0], call.q.shape[2], call.k.shape[2]


def computed(plan: Plan) -> tuple[SparseMask, ...]:
    """The masks of a plan, carry region included. They are disjoint, so no union has to be built to count them."""
    return (plan.mask,) if plan.carry is None else (plan.carry.region, plan.mask)


def count_pairs(masks: tuple[SparseMask, ...]) -> tuple[int, int]:
    """Computed and allowed pairs over batch and heads (host sync)."""
    geometry = masks[0].geometry
    allowed = int(geometry.visible_counts().sum()) * geometry.heads
    return sum(int(selected_pairs(mask).sum()) for mask in masks), allowed


def stored_bytes(masks: tuple[SparseMask, ...]) -> int:
    """Memory that keeping the masks would hold, in bytes."""
    lists = [part for mask in masks for part in (mask.tiles, mask.stripes) if part is not None]
    return sum(x.untyped_storage().nbytes() for part in lists for x in (part.counts, part.offsets, part.indices))


def _add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


def _ratio(pairs: tuple[int, int]) -> float | None:
    return pairs[0] / pairs[1] if pairs[1] else None
