"""Our executor beside other people's kernels, on the same masks in the same run."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from lab.bench.case import Part, call_of, random_mask
from lab.bench.clock import Clock
from lab.bench.shape import Shape
from sparseprefill.call import AttentionCall
from sparseprefill.errors import MaskError, UnsupportedCallError
from sparseprefill.mask.count import allowed_pairs

from .peers import FULL, PEERS, Mask, Peer, Work

MASKS = (
    "full",
    *(f"tiles:{share}" for share in (0.5, 0.25, 0.1, 0.05)),
    "diagonal+stripes:0.1",
    "diagonal+stripes:0.05",
)
"""Unless others are given."""
ROWS = 128
"""Query rows, evenly spaced, whose attention is computed in float32 for the comparison."""
AT_ONCE = 1 << 29
"""Logits of that comparison that may be there at a time."""
BESIDE = 0.25
"""Share of the clock's budget that dense attention takes before the kernels of a mask, and behind them."""
Step = Callable[[str], None]


@frozen(kw_only=True)
class Score:
    """One kernel on one mask.

    seconds: by the device's clock. dense: of the fastest dense kernel, `baseline`, before and after the kernels of this
    mask. pairs: that count; allowed: all that causality allows, both over heads. plan: seconds until the kernel has its
    lists, not part of `seconds`. off: how far its output is from attention in float32, as a share of the norm.
    syncs: how often planning and running waited for the device, on GPUs. refused: why the kernel does not take this
    mask. error: what went wrong, an output that is off included; then no time is kept.
    """

    kernel: str
    mask: str
    shape: Shape
    pairs: int = 0
    allowed: int = 1
    seconds: float = 0.0
    dense: float = 0.0
    baseline: str = ""
    plan: float | None = None
    off: float | None = None
    syncs: int | None = None
    refused: str = ""
    error: str = ""

    @property
    def counts(self) -> bool:
        """Whether there is a time."""
        return self.seconds > 0

    @property
    def density(self) -> float:
        """Pairs that count over those that causality allows."""
        return self.pairs / self.allowed

    @property
    def flops(self) -> float:
        """Floating point operations a second, of the pairs that count: four for each of a head's dimensions."""
        return 4 * self.shape.head_dim * self.pairs / self.seconds if self.counts else 0.0

    @property
    def efficiency(self) -> float:
        """The share of the fastest dense kernel's pairs a second: density times dense time over time."""
        return self.density * self.dense / self.seconds if self.counts else 0.0


@frozen
class Scoreboard:
    """Measures every kernel that is here on the masks, one length at a time. seed: of inputs and masks."""

    clock: Clock
    masks: Sequence[tuple[Part, ...]]
    seed: int = 0
    peers: Sequence[Peer] = field(default=PEERS)

    @cached_property
    def present(self) -> list[Peer]:
        """Those that can run here."""
        return [peer for peer in self.peers if not peer.missing(self.clock.device)]

    @property
    def steps(self) -> int:
        """Kernels on masks at one length."""
        dense = sum(peer.dense for peer in self.present)
        return dense + (len(self.present) - dense) * len(self.masks)

    def run(self, shape: Shape, step: Step = lambda name: None) -> list[Score]:
        """The scores at one length, dense kernels first. step: is told each kernel and mask before its turn.

        Whatever a kernel of others raises is told in its score.
        """
        call = call_of(shape, "random", self.seed, self.clock.device)
        allowed = allowed_pairs(call.geometry)
        found: list[Score] = []
        full = _Judge(call, (random_mask(call, FULL, self.seed), FULL))
        fastest: tuple[float, str, Work | None] = (0.0, "", None)
        for peer in (peer for peer in self.present if peer.dense):
            step(f"{peer.name}, full")
            score, work = self._score(peer, full, Score(kernel=peer.name, mask="full", shape=shape, allowed=allowed))
            found.append(score)
            if score.counts and (fastest[2] is None or score.seconds < fastest[0]):
                fastest = score.seconds, peer.name, work
        found = [evolve(score, dense=fastest[0], baseline=fastest[1]) for score in found]
        for parts in self.masks:
            judge = full if parts == FULL else _Judge(call, (random_mask(call, parts, self.seed), parts))
            found += self._of_mask(judge, shape, allowed, fastest[1], fastest[2], step)
        return found

    def _of_mask(
        self, judge: _Judge, shape: Shape, allowed: int, baseline: str, dense: Work | None, step: Step
    ) -> list[Score]:
        """The kernels that take masks, with the fastest dense one before and after them: a GPU's clock changes."""
        name = " + ".join(map(str, judge.mask[1]))
        times = [] if dense is None else self.clock.times(dense.run, share=BESIDE)
        scores = []
        for peer in (peer for peer in self.present if not peer.dense):
            step(f"{peer.name}, {name}")
            score, _ = self._score(peer, judge, Score(kernel=peer.name, mask=name, shape=shape, allowed=allowed))
            scores.append(score)
        times += [] if dense is None else self.clock.times(dense.run, share=BESIDE)
        middle = statistics.median(times) if times else 0.0
        return [evolve(score, dense=middle, baseline=baseline) for score in scores]

    def _score(self, peer: Peer, judge: _Judge, score: Score) -> tuple[Score, Work | None]:
        try:
            with torch.no_grad():
                work = peer.make(judge.call, judge.mask)
                off = judge.off(work)
                score = evolve(score, pairs=work.pairs, off=off)
                if not off <= peer.within:
                    return evolve(score, error=f"its output is off by {off:.3g}"), None
                plan = None if work.plan is None else self.clock.median(work.plan)
                return evolve(score, seconds=self.clock.median(work.run), plan=plan, syncs=_syncs(work)), work
        except (MaskError, UnsupportedCallError) as error:
            return evolve(score, refused=str(error)), None
        except Exception as error:
            # Whatever a kernel of others raises for what it does not take; its score says so, and the rest goes on.
            return evolve(score, error=f"{type(error).__name__}: {(str(error) or 'no reason').splitlines()[0]}"), None


@frozen(eq=False)
class _Judge:
    """Compares outputs on one mask with attention in float32 over the pairs that a kernel computes."""

    call: AttentionCall
    mask: Mask
    _known: list[Tensor] = field(factory=list, init=False)

    def off(self, work: Work) -> float:
        """The norm of the difference in some rows over that of the truth (host sync)."""
        rows = torch.linspace(0, self.call.kv_len - 1, min(ROWS, self.call.kv_len), device=self.call.q.device)
        rows = rows.round().to(torch.int64).unique()
        out = work.out(work.run())[:, :, rows].float()
        if work.keep != self.mask[0].to_dense:
            truth = exact(self.call, work.keep, rows)
        else:
            if not self._known:
                self._known.append(exact(self.call, work.keep, rows))
            truth = self._known[0]
        return float((out - truth).norm() / truth.norm().clamp(min=1e-30))


def exact(call: AttentionCall, keep: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Attention of some query rows in float32, ``[B, Hq, n, D]``; a row without a pair gives zeros.

    keep: bool ``[B, Hq, n, Nkv]``, the pairs of rows int64 ``[n]``.
    """
    size = max(1, AT_ONCE // (call.q.shape[0] * call.q.shape[1] * call.kv_len))
    return torch.cat([_exact(call, keep(part), part) for part in rows.split(size)], 2)


def _exact(call: AttentionCall, keep: Tensor, rows: Tensor) -> Tensor:
    found = []
    for head in range(call.kv_heads):
        mine = slice(head * call.group, (head + 1) * call.group)
        k, v = (x[:, head : head + 1].float() for x in (call.k, call.v))
        logits = call.q[:, mine, rows].float() @ k.mT * call.softmax_scale
        weight = torch.softmax(logits.masked_fill(~keep[:, mine], -torch.inf), -1)
        found.append(weight.nan_to_num(0.0) @ v)
    return torch.cat(found, 1)


def _syncs(work: Work) -> int | None:
    """How often planning and running wait for the device; both are warm."""
    if not torch.cuda.is_initialized():
        return None
    with _waits_told() as told:
        if work.plan is not None:
            work.plan()
        work.run()
    return len(told)


@contextmanager
def _waits_told() -> Iterator[list[warnings.WarningMessage]]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message=".*called a synchronizing CUDA operation")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield told
        finally:
            torch.cuda.set_sync_debug_mode(before)
