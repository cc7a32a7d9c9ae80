"""The running record of one layer: how its calls ran, why, and how dense they were; and that of prompts."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator
from functools import reduce

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from sparseprefill.breakeven.before import Before
from sparseprefill.call import AttentionCall
from sparseprefill.mask.count import allowed_pairs
from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.mask import SparseMask
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Kernel, Remark, Result, Rounding

from .kinds import Kinds
from .report import LayerRecall, LayerReport, Mode

UNSKIPPED = "the executor cannot skip tiles by their logits; it computed the whole mask"


def sizes(call: AttentionCall) -> tuple[int, int, int]:
    """Batch rows, queries and keys of a call."""
    return call.q.shape[0], call.q.shape[2], call.kv_len


@frozen(eq=False)
class Uncounted:
    """Source of the number of pairs that a result computed: its lists, or, where it ran in parts, the count on the
    device.

    skipped: of these pairs those that were left out by their logits; None where none could be.
    """

    geometry: Geometry
    lists: tuple[SparseMask, ...] = ()
    pairs: Tensor | None = None
    skipped: Tensor | None = None

    @classmethod
    def of(cls, result: Result) -> Uncounted:
        """Nothing is read on the host."""
        skipped = None if result.skipped is None else result.skipped.pairs
        if result.parts is not None:
            return cls(result.parts.geometry, pairs=result.parts.pairs, skipped=skipped)
        lists = result.plan.computed()
        return cls(lists[0].geometry, lists, skipped=skipped)

    @property
    def held(self) -> int:
        """Memory that keeping it would hold, in bytes: of lists whole storages, which rows and heads may share."""
        own = sum([x.nbytes for x in (self.skipped, self.pairs) if x is not None])
        lists = [part for one in self.lists for part in (one.tiles, one.stripes) if part is not None]
        held = [x for one in lists for x in (one.counts, one.offsets, one.indices)]
        return own + sum([x.untyped_storage().nbytes() for x in held])

    def counted(self) -> Uncounted:
        """A copy with a number for each head, counted on the device, in the place of the lists; nothing waits."""
        if self.pairs is not None:
            return self
        device = self.geometry.device
        with torch.cuda.device(device if device.type == "cuda" else -1):
            if len(self.lists) == 1:
                return evolve(self, lists=(), pairs=self.lists[0].pairs_by_tile())
            return evolve(self, lists=(), pairs=reduce(torch.add, (one.pairs() for one in self.lists)))

    def count(self) -> tuple[int, int]:
        """Computed and allowed pairs over batch and heads (host sync)."""
        return int(self._selected()) - self.left_out(), allowed_pairs(self.geometry)

    def left_out(self) -> int:
        """Pairs of the lists that were skipped (host sync)."""
        return 0 if self.skipped is None else int(self.skipped.sum())

    def density(self) -> Tensor:
        """float64 scalar on the device: computed / allowed pairs over batch and heads; nan where none is allowed."""
        pairs = self._selected() if self.skipped is None else self._selected() - self.skipped.sum()
        return pairs.double() / (self.geometry.visible_counts().sum().double() * self.geometry.heads)

    def _selected(self) -> Tensor:
        """Pairs that the lists hold: a number on the device."""
        pairs = [one.pairs() for one in self.lists] if self.pairs is None else [self.pairs]
        return torch.stack([one.sum() for one in pairs]).sum()


@frozen(eq=False)
class Ran:
    """Record of a call that ran sparse. sizes: batch rows, queries, keys. serial: of its prefill. kernels:
    that served it, or an executor that does not tell. remarks: for the user. rounded: of a reduced precision."""

    sizes: tuple[int, int, int]
    serial: int
    done: Uncounted
    kernels: tuple[Kernel | str, ...]
    remarks: tuple[str, ...] = ()
    rounded: Rounding | None = None

    @classmethod
    def of(cls, result: Result, sizes: tuple[int, int, int], serial: int, executor: str = "") -> Ran:
        """Nothing is read on the host. executor: its name, where the result does not tell kernels."""
        remarks = [UNSKIPPED] if result.plan.skip_below is not None and result.skipped is None else []
        remarks += [str(note) for note in result.plan.notes.values() if isinstance(note, Remark)]
        kernels = result.kernels or (executor,)
        return cls(sizes, serial, Uncounted.of(result), kernels, tuple(remarks), result.rounded)

    @classmethod
    def by(cls, pipeline: Pipeline, call: AttentionCall, serial: int, result: Result) -> Ran:
        """Of a pipeline's call."""
        return cls.of(result, sizes(call), serial, type(pipeline.executor).__name__)

    @property
    def tensors(self) -> list[Tensor]:
        """Those that differ from layer to layer, of a call that was counted."""
        errors = None if self.rounded is None else self.rounded.errors
        return [x for x in (self.done.pairs, self.done.skipped, errors) if x is not None]

    def counted(self) -> Ran:
        """The pairs counted on the device, in the place of the lists."""
        return evolve(self, done=self.done.counted())

    def over(self, found: Iterator[Tensor]) -> Ran:
        """The same of a layer with other tensors, as `tensors` has them."""
        old, rounded = self.done, self.rounded
        pairs = None if old.pairs is None else next(found)
        done = Uncounted(old.geometry, (), pairs, None if old.skipped is None else next(found))
        return evolve(self, done=done, rounded=None if rounded is None else evolve(rounded, errors=next(found)))

    def bare(self) -> Ran:
        """Without its prefill."""
        return evolve(self, serial=-1)


@define(eq=False)
class Room:
    """Bytes that the results which wait hold, over all layers of a session: a sum at hand, since every call asks."""

    held: int = 0


@define(eq=False)
class LayerRecord:
    """Counts of one layer, and what the density of its last prefill needs.

    cross: calls of its cross attention. serial: of the last prefill, None before the first. pairs: (computed, allowed)
    pairs measured in it. waiting: results of it that are not measured yet; held: bytes of them, which count in `room`,
    too, without those counted at once. lost: some result was neither kept nor counted, in a CUDA graph's capture or for
    lack of memory, so that the density is unknown. skips: whether a result of it could leave out pairs by their logits;
    skipped: how many did, and how many the masks held. rounded: of its last call in a reduced precision.
    """

    layer: int
    room: Room = field(factory=Room)
    modes: Counter[Mode] = field(factory=Counter)
    reasons: Kinds = field(factory=Kinds)
    cross: int = 0
    last: Mode = "unused"
    sizes: tuple[int, int, int] = (0, 0, 0)
    serial: int | None = None
    pairs: tuple[int, int] = (0, 0)
    waiting: list[Uncounted] = field(factory=list)
    held: int = 0
    lost: bool = False
    total: tuple[int, int] = (0, 0)
    skips: bool = False
    skipped: tuple[int, int] = (0, 0)
    rounded: Rounding | None = None

    def count(self, mode: Mode, sizes: tuple[int, int, int]) -> None:
        """One call ran in `mode`; sizes: batch rows, queries, keys."""
        self.modes[mode] += 1
        self.last, self.sizes = mode, sizes

    def ran(self, call: Ran, most: float | None) -> None:
        """One call ran sparse. most: see `keep`; None to `measure` at once."""
        self.count("sparse", call.sizes)
        self.begin(call.serial)
        self.rounded = call.rounded or self.rounded
        if most is None:
            self.measure(call.done)
        else:
            self.keep(call.done, most)

    def begin(self, serial: int) -> None:
        """Forget the results of the prefill before, if `serial` is another."""
        if serial != self.serial:
            self.serial, self.pairs, self.lost = serial, (0, 0), False
            self.skips, self.skipped, self.rounded = False, (0, 0), None
            self.waiting.clear()
            self._hold(0)

    def measure(self, result: Uncounted) -> None:
        """Count the pairs now (host sync)."""
        self.total = _add(self.total, self._take(result))

    def keep(self, result: Uncounted, most: float = math.inf) -> None:
        """Count the pairs when a report asks. Where the room would hold more than `most` bytes then, the device counts
        them at once, and nothing waits for that; what it cannot count then is lost."""
        held = result.held
        if self.room.held + held <= most:
            self._hold(self.held + held)
        else:
            try:
                found = None if recording() else result.counted()
            except torch.OutOfMemoryError:
                found = None
            if found is None:
                self.lost = True
                return
            result = found
        self.waiting.append(result)

    def _take(self, result: Uncounted) -> tuple[int, int]:
        """Computed and allowed pairs of one result of the last prefill, counted now (host sync)."""
        pairs = result.count()
        self.pairs = _add(self.pairs, pairs)
        if result.skipped is not None:
            gone = result.left_out()
            self.skips, self.skipped = True, _add(self.skipped, (gone, pairs[0] + gone))
        return pairs

    def report(self, *, mean: bool, recall: LayerRecall | None = None) -> LayerReport:
        """The record as it stands; measures the results that wait (host sync)."""
        while self.waiting:
            self._take(self.waiting.pop())
        self._hold(0)
        batch, queries, keys = self.sizes
        return LayerReport(
            layer=self.layer,
            mode=self.last,
            sparse_calls=self.modes["sparse"],
            window_calls=self.modes["window"],
            dense_calls=self.modes["dense"],
            cross_calls=self.cross,
            reasons=self.reasons.counts(),
            density=None if self.lost or self.last != "sparse" else _ratio(self.pairs),
            mean_density=_ratio(self.total) if mean else None,
            skipped=None if self.lost or self.last != "sparse" or not self.skips else _ratio(self.skipped),
            in_16_bits=None if self.rounded is None or self.last != "sparse" else _heads_of(~self.rounded.heads),
            recall=recall,
            batch=batch,
            query_length=queries,
            key_length=keys,
        )

    def _hold(self, held: int) -> None:
        self.room.held += held - self.held
        self.held = held


@define(eq=False)
class Prompts:
    """ran: prompts by how they ran, and behind what, as "sparse behind dense". cached: tokens that a cache held before
    them, by how they were computed."""

    ran: Counter[str] = field(factory=Counter, init=False)
    cached: Counter[str] = field(factory=Counter, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def count(self, mode: Mode, before: Before | None) -> None:
        """A prompt ran in a mode. before: what a cache held of it; None for nothing, or where nobody tells."""
        with self._lock:
            self.ran[mode if before is None else f"{mode} behind {before.mostly}"] += 1
            for how, tokens in by_how(before).items():
                self.cached[how] += tokens


def by_how(before: Before | None) -> dict[str, int]:
    """Cached tokens by how they were computed; without those that there are none of."""
    if before is None:
        return {}
    found = {"sparse": before.sparse, "dense": before.dense, "unknown": before.unknown}
    return {how: tokens for how, tokens in found.items() if tokens}


def recording() -> bool:
    """True if a CUDA graph is captured: nothing may be asked of the device then, and figures would be no figures."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _heads_of(which: Tensor) -> tuple[int, ...]:
    """Indices of the heads that are in ``[B, Hq]`` in any batch row (host sync)."""
    return tuple(which.any(0).nonzero().flatten().tolist())


def _add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


def _ratio(pairs: tuple[int, int]) -> float | None:
    return pairs[0] / pairs[1] if pairs[1] else None
