"""One layer with K and V read through a block table, next to the same work on contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, field, frozen
from sparseprefill.adapters.vllm.pages import pages_of
from torch import Tensor

from lab.bench.case import call_of, parse_mask, random_mask
from lab.bench.clock import Clock
from lab.bench.shape import Shape
from sparseprefill.call import AttentionCall
from sparseprefill.errors import SparsePrefillError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.memory import Memory
from sparseprefill.pages import Pages
from sparseprefill.plan import Plan, Result
from sparseprefill.registry import default_registry
from sparseprefill.validate import one_of, whole

from .engine import described

MASKS, PAGES, CACHES, LAYOUTS = ("tiles:0.1", "stripes:0.05", "full"), (16, 128), ("model", "fp8"), ("LBNHC", "LBHNC")
COPIES = ("auto", "never", "always")
FP8 = torch.float8_e4m3fn
SCALE = 1 / 16
"""Factor on the numbers of an fp8 cache."""


@frozen(kw_only=True)
class Case:
    """page: tokens of one. cache: its numbers, the model's type or fp8. layout: vLLM's name. copies: of K and V out of
    their pages before they are read, auto where the library finds that faster.

    work: a mask as text, for the executor; or a method's estimate, by name, of which `parameters` differ from defaults.
    """

    work: str
    method: bool = False
    parameters: Mapping[str, Any] = field(factory=dict)
    page: int = field(validator=whole())
    cache: str = field(validator=one_of(*CACHES))
    layout: str = field(validator=one_of(*LAYOUTS))
    copies: str = field(default="auto", validator=one_of(*COPIES))

    def __str__(self) -> str:
        return f"{self.work}, pages of {self.page}, {self.cache}, {self.layout}, copies {self.copies}"


@frozen(kw_only=True)
class Read:
    """Medians in seconds: contiguous, paged, and gather, which copies K and V out of their pages and no more; of an
    estimate, K alone.

    difference: largest of the outputs; of an estimate, see `_chosen`. copied: what
    was copied in spite of all, "k", "v" or both.
    """

    case: Case
    contiguous: float = 0.0
    paged: float = 0.0
    gather: float = 0.0
    difference: float = 0.0
    density: float = 1.0
    copied: str = ""
    error: str = ""

    @property
    def ratio(self) -> float | None:
        """Paged over contiguous."""
        return self.paged / self.contiguous if self.contiguous else None


@define
class Paging:
    """Measures cases of one shape. clock: of the device. seed: of inputs, masks and the order of the pages."""

    shape: Shape
    clock: Clock
    seed: int = 0
    _plans: dict[str, Plan] = field(factory=dict, init=False)

    def measure(self, case: Case) -> Read:
        """The row of a case. An error of the library, or lack of memory, is told in the row."""
        try:
            return self._row(case)
        except (SparsePrefillError, torch.OutOfMemoryError) as error:
            return Read(case=case, error=described(error))

    def _row(self, case: Case) -> Read:
        call = call_of(self.shape, "heads" if case.method else "random", self.seed, self.clock.device)
        make, work = self._stored(call, case), self._work(call, case)
        there = make()
        flat = AttentionCall(call.q, there.keys(), there.values())
        last: list[Pages] = []

        def paged() -> Any:
            last[:] = [make()]  # anew, or a copy once made would serve all runs
            if case.copies != "always":
                return work(AttentionCall.of_pages(call.q, last[0]))
            if case.method:
                last[0].keys()  # estimates take a copy that there is
                return work(AttentionCall.of_pages(call.q, last[0]))
            return work(AttentionCall(call.q, *_copy(last[0])))

        ours, theirs = paged(), work(flat)
        difference, density = (_chosen if case.method else _outputs)(ours, theirs), theirs.mask.density
        del ours, theirs
        seconds, contiguous = self.clock.beside(paged, lambda: work(flat))
        gather = self.clock.median(lambda: make().keys() if case.method else _copy(make()))
        return Read(
            case=case,
            contiguous=contiguous,
            paged=seconds,
            gather=gather,
            difference=difference,
            density=density,
            copied=" ".join(sorted(last[0].gathered)),
        )

    def _work(self, call: AttentionCall, case: Case) -> Callable[[AttentionCall], Any]:
        if case.method:
            pipeline = default_registry().build(case.work, **case.parameters)
            return lambda given: pipeline.plan(given, Memory())
        plan, executor = self._plan(call, case.work), AutoExecutor()
        return lambda given: executor.execute(given, plan)

    def _plan(self, call: AttentionCall, mask: str) -> Plan:
        if mask not in self._plans:
            self._plans.clear()  # one at a time: stripes take gigabytes
            self._plans[mask] = Plan(random_mask(call, parse_mask(mask), self.seed))
        return self._plans[mask]

    def _stored(self, call: AttentionCall, case: Case) -> Callable[[], Pages]:
        """A cache that holds the call's keys and values in pages out of order; makes `Pages` that nobody has read."""
        fp8 = FP8 if case.cache == "fp8" else None
        cache, table = filled(call.k[0], call.v[0], case.page, case.layout, fp8, self.seed)
        scale = torch.full((1,), SCALE, device=cache.device)
        scales = None if fp8 is None else (scale, scale)
        options: dict[str, Any] = {"dtype": call.q.dtype, "fp8": fp8, "scales": scales, "copies": case.copies == "auto"}
        return lambda: pages_of(cache, call.q.shape[3], table, call.kv_len, **options)


def filled(k: Tensor, v: Tensor, page: int, layout: str, fp8: torch.dtype | None, seed: int) -> tuple[Tensor, Tensor]:
    """A cache ``[pages, H, page, 2 * D]`` of vLLM's layout, bytes for fp8, and the int32 table of its pages.

    k, v: ``[H, N, D]``. As many pages as needed, and one more, in random order.
    """
    heads, tokens, size = k.shape
    count = -(-tokens // page)
    both = torch.cat([k, v], -1)
    if fp8 is not None:
        both = (both / SCALE).to(fp8).view(torch.uint8)
    padded = both.new_zeros(heads, count * page, 2 * size)
    padded[:, :tokens] = both
    source = torch.Generator().manual_seed(seed)
    table = torch.randperm(count + 1, generator=source)[:count].to(k.device, torch.int32)
    inner = (page, heads) if layout == "LBNHC" else (heads, page)
    cache = both.new_zeros(count + 1, *inner, 2 * size)
    cache = cache.transpose(1, 2) if layout == "LBNHC" else cache
    cache[table.long()] = padded.view(heads, count, page, 2 * size).transpose(0, 1)
    return cache, table


def _outputs(ours: Result, theirs: Result) -> float:
    """Largest difference, head by head: a whole output in float32 would not fit beside the rest."""
    return float(torch.stack([(a - b).abs().max() for a, b in zip(ours.out[0], theirs.out[0], strict=True)]).max())


def _chosen(ours: Plan, theirs: Plan) -> float:
    """Tiles that one keeps and the other does not, and by how many their lists of columns differ in length."""
    off = (ours.mask.tile_map() ^ theirs.mask.tile_map()).sum()
    mine, other = ours.mask.stripes, theirs.mask.stripes
    return float(off if mine is None or other is None else off + (mine.counts - other.counts).abs().sum())


def _copy(pages: Pages) -> tuple[Tensor, Tensor]:
    return pages.keys(), pages.values()
