"""Compile kernels for Hopper without a GPU, through their own launchers: ``python offline.py [every] [into=FOLDER]``.

Those of attention, those of sampled rows, those of statistics that chunks extend, and those of methods that read keys.

With ``every``, all variants; else `FEW` of attention, in which each of its branches is compiled, and of estimates all
but those of pages that hold the call's own type: what reads pages is in those of fp8, which convert besides. With
``into``, each kernel's PTX is left in the folder, so that two versions can be compared by ``diff -r``; set
TRITON_DISABLE_LINE_INFO=1 for that, or moved lines differ.

Prints a JSON object: variant -> names of the kernels that were compiled for it; what fails ends it with the error.
Run it without TRITON_INTERPRET, which is read when a kernel module is imported.

A fake driver names capability 9.0 as the target, tensors lie on the CPU, and each launch stops behind its compilation.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, field, frozen
from sparseprefill.plugins.anchor_attention import kernels as anchor
from sparseprefill.plugins.anchor_attention.layout import Regions
from sparseprefill.plugins.bfla import kernels as bfla
from sparseprefill.plugins.kascade import kernels as kascade
from sparseprefill.plugins.kascade.budget import Rows
from sparseprefill.plugins.rowmax import RowMaxConfig
from sparseprefill.plugins.rowmax import launch as rowmax
from sparseprefill.plugins.xattention import kernels as xattention
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sparseprefill import AttentionCall, Carry, Pages, Plan, SoftmaxState, SparseMask
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels import groups as groups
from sparseprefill.kernels.attention import launch as attention
from sparseprefill.kernels.attention.record import PORTABLE
from sparseprefill.kernels.family import choose as choosing
from sparseprefill.kernels.family import known as handing
from sparseprefill.kernels.family.chips import row
from sparseprefill.kernels.family.record import Family
from sparseprefill.kernels.hopper import launch as hopper
from sparseprefill.kernels.hopper.record import HOPPER, HOPPER_INT8
from sparseprefill.kernels.lists.order import draws_of_lists
from sparseprefill.kernels.sampled import by_tile, floor
from sparseprefill.kernels.sampled import mass as sampled
from sparseprefill.kernels.statistics.key_means import key_means
from sparseprefill.mask.samples import KeptKeys, deal
from sparseprefill.statistics.sampled import last_rows

LENGTH = 256
FP8 = torch.float8_e4m3fn
RUN = JITFunction.run
SHARED = 232448
"""Bytes of shared memory that a program may have on an H100."""


@frozen(eq=False)
class Variant:
    """One way to launch attention.

    kind: of mask, tiles, stripes or both. values: head dimension of V, where it is not `width`. carry: resume a state.
    state: leave one. probe: mass of tiles. page: tokens of a page, or 0. padded: left and right padding, and sinks.
    more: fields of the call. tile: of the mask; small ones compile faster. skip: leave out steps by their logits.
    requests: that share the launch. stored: what pages hold, where that is another type; they then have scales.
    columns: keys of a stripe. behind: keys before the rows, of which enough have long lists cut.
    """

    kind: str
    width: int = 64
    values: int = 0
    dtype: torch.dtype = torch.bfloat16
    carry: bool = False
    state: bool = False
    probe: bool = False
    page: int = 0
    padded: bool = False
    more: dict[str, Any] = field(factory=dict)
    tile: int | tuple[int, int] = 32
    skip: bool = False
    requests: int = 1
    stored: torch.dtype | None = None
    columns: int = 1
    eight: bool = False
    behind: int = 0

    @property
    def keys(self) -> int:
        """Of the call."""
        return LENGTH + self.behind

    def call(self) -> AttentionCall:
        """Two query heads of one KV head."""
        q = torch.zeros(1, 2, LENGTH, self.width, dtype=self.dtype)
        k, v = (
            torch.zeros(1, 1, self.keys, width, dtype=self.dtype) for width in (self.width, self.values or self.width)
        )
        if self.page:
            count = self.keys // self.page
            cache = torch.zeros(2, count, self.page, 1, self.width, dtype=self.stored or self.dtype)
            one = None if self.stored is None else torch.ones(1)
            table = torch.arange(count, dtype=torch.int32)
            pages = Pages(cache[0], cache[1], table, self.keys, dtype=self.dtype, k_scale=one, v_scale=one)
            return AttentionCall.of_pages(q, pages, **self.more)
        call = AttentionCall(q, k, v, **self.more)
        if not self.padded:
            return call
        starts, lengths = (torch.tensor([value], dtype=torch.int32) for value in (3, 200))
        return evolve(call, starts=starts, lengths=lengths, sinks=torch.zeros(2))

    def mask(self, call: AttentionCall) -> SparseMask:
        """Every tile, every eighth column, or both, which overlap."""
        tiles = SparseMask.full(call, self.tile)
        keep = torch.arange(self.keys // self.columns).remainder(8).eq(0).view(1, 1, 1, -1)
        stripes = SparseMask.from_stripes(call, keep, 2, self.tile, width=self.columns, diagonal=False)
        return {"tiles": tiles, "stripes": stripes, "both": tiles | stripes}[self.kind]

    def together(self) -> None:
        """Requests with the same pages, whose rows follow each other in one tensor."""
        one = self.call()
        q = torch.zeros(self.requests * LENGTH, 2, self.width, dtype=self.dtype)
        calls = [evolve(one, q=rows.transpose(0, 1)[None]) for rows in q.split(LENGTH)]
        TritonExecutor().execute_many(calls, [Plan(self.mask(call)) for call in calls])

    def run(self) -> None:
        """Through the executor, as any call."""
        if self.requests > 1:
            self.together()
            return
        call = self.call()
        shape = (1, 2, LENGTH)
        state = SoftmaxState.empty(shape, self.values or self.width, torch.float32, call.q.device)
        carry = Carry(state, SparseMask.empty(call, self.tile)) if self.carry else None
        plan = Plan(self.mask(call), carry, probe=torch.ones(1, 2, dtype=torch.bool) if self.probe else None)
        plan = evolve(plan, skip_below=torch.full((1,), 0.01)) if self.skip else plan
        executor = TritonExecutor(precision="int8" if self.eight else "call")
        (executor.accumulate if self.state else executor.execute)(call, plan)


VARIANTS = {
    "tiles": Variant("tiles", width=128),
    "stripes": Variant("stripes"),
    "both, padded": Variant("both", padded=True, probe=True),
    "resumed state": Variant("tiles", carry=True, state=True),
    "pages": Variant("both", page=16),
    "window, softcap": Variant("both", more={"window": 100, "softcap": 30.0}),
    "float32": Variant("tiles", dtype=torch.float32),
    "skip": Variant("both", width=128, skip=True),
    "requests": Variant("both", page=16, requests=2),
    "wide": Variant("both", padded=True, columns=16),
    "wide, skip": Variant("stripes", width=128, skip=True, columns=16),
    "192 with 128": Variant("both", width=192, values=128, padded=True, tile=128),
    "192 with 128, resumed state": Variant("tiles", width=192, values=128, carry=True, state=True, tile=128),
    "512": Variant("both", width=512, tile=128),
    "512, skip": Variant("both", width=512, tile=128, skip=True),
    "512, pages": Variant("both", width=512, page=16, tile=128),
}
HOPPER_VARIANTS = {
    "hopper: 64, both": Variant("both", padded=True, tile=(128, 64)),
    "hopper: 128, tiles resumed": Variant("tiles", width=128, carry=True, tile=128),
    "hopper: 256, stripes": Variant("stripes", width=256, dtype=torch.float16, state=True, tile=128),
    "hopper: pages": Variant("both", width=128, page=16, tile=(128, 64)),
    "hopper: requests": Variant("both", width=128, page=16, tile=(128, 64), requests=2),
    "hopper: fp8": Variant("both", width=128, page=16, tile=(128, 64), stored=torch.float8_e4m3fn),
    "hopper: fp8, resumed": Variant("tiles", width=256, page=128, carry=True, tile=128, stored=torch.float8_e5m2),
    "hopper: fp8, stripes": Variant(
        "stripes", dtype=torch.float16, page=16, state=True, tile=128, stored=torch.float8_e4m3fn
    ),
    "hopper: 8 bits": Variant("tiles", width=128, tile=128, eight=True),
    "hopper: 8 bits, pages": Variant("tiles", width=128, page=16, tile=128, eight=True),
    "hopper: skip": Variant("both", width=128, tile=128, skip=True),
    "hopper: skip, resumed, pages": Variant("tiles", page=16, carry=True, tile=(128, 64), skip=True),
    "hopper: wide": Variant("both", width=128, tile=(128, 64), columns=16),
    "hopper: wide, pages": Variant("stripes", width=128, page=16, tile=(128, 64), columns=16),
    "hopper: wide, fp8": Variant("both", width=128, page=16, tile=(128, 64), stored=torch.float8_e4m3fn, columns=16),
    "hopper: cut, pages": Variant("both", width=128, page=16, tile=(128, 64), columns=16, behind=4096),
    "hopper: cut, resumed": Variant("tiles", width=256, carry=True, state=True, tile=128, behind=4096),
    "hopper: cut, requests": Variant("both", width=128, page=16, tile=(128, 64), requests=2, behind=4096),
}
FEW = (
    "both, padded", "resumed state", "window, softcap", "skip", "requests", "wide", "192 with 128", "512",
    "hopper: 64, both",
    "hopper: 256, stripes", "hopper: requests", "hopper: fp8", "hopper: skip, resumed, pages", "hopper: wide",
    "hopper: cut, pages", "hopper: cut, resumed",
    "hopper: 8 bits, pages",
)  # fmt: skip


@frozen(eq=False)
class Sampled:
    """One way to look at sampled rows by key tile. keys: which keys a mask keeps, too. of: the call."""

    of: Variant
    keys: bool = False

    def run(self) -> None:
        """Every fourth row."""
        call = self.of.call()
        rows = torch.arange(0, LENGTH, 4)[None]
        keys = KeptKeys(torch.ones(1, 2, 1, LENGTH, dtype=torch.bool), torch.zeros_like(rows)) if self.keys else None
        by_tile.tile_lse(call, rows, torch.ones_like(rows, dtype=torch.bool), 128, keys)


ROWS = {
    "rows: 128": Sampled(Variant("tiles", width=128)),
    "rows: keys": Sampled(Variant("tiles", width=128), keys=True),
    "rows: float32, padded": Sampled(Variant("tiles", dtype=torch.float32, padded=True), keys=True),
    "rows: pages": Sampled(Variant("tiles", page=16, more={"window": 100, "softcap": 30.0})),
    "rows: fp8 pages": Sampled(Variant("tiles", width=128, page=16, stored=FP8), keys=True),
}


@frozen(eq=False)
class Floor:
    """The steps of a recall floor behind the pass over the keys. kept: of stripes, too. target: as it has it."""

    grid: tuple[int, int]
    kept: bool = False
    target: float = 0.95

    def run(self) -> None:
        """Eight rows speak for 16 query tiles."""
        geometry = Variant("tiles").call().geometry
        at = deal(geometry, 16, 8, None)
        every = torch.zeros(1, 2, 8, 32)
        held = floor.Held(torch.ones(1, 2, 16, 32, dtype=torch.bool), torch.ones(1, 1, 16, 32, dtype=torch.bool))
        by = (every, every if self.kept else None)
        floor.raised(by, at, held, self.grid, target=self.target, dense_from=0.5, neighbours=True)


FLOOR = {
    "floor: tiles": Floor((128, 128)),
    "floor: stripes": Floor((128, 128), kept=True),
    "floor: all, uneven": Floor((24, 16), target=1.0),
}


@frozen(eq=False)
class Prefix:
    """A statistic of key tiles, of which two are known. tile: their tokens, rows of what is kept."""

    of: Variant
    make: Callable[..., torch.Tensor]
    tile: int
    columns: tuple[int, ...]

    def run(self) -> None:
        """Afresh and extended, which is one kernel."""
        call = self.of.call()
        self.make(call, self.tile)
        self.make(call, self.tile, torch.zeros(1, 1, *self.columns), 2)


PREFIX = {
    "means": Prefix(Variant("tiles", width=128), key_means, 128, (2, 128)),
    "means: pages": Prefix(Variant("tiles", width=80, page=16), key_means, 100, (2, 80)),
    "means: fp8 pages": Prefix(Variant("tiles", width=128, page=16, stored=FP8), key_means, 128, (2, 128)),
}


class Order:
    """The order of query blocks."""

    def run(self) -> None:
        draws_of_lists(torch.zeros(1, 12, 128, dtype=torch.int32), None, 0, 1, 16, 132)


@frozen(eq=False)
class Estimate:
    """What a method's launcher makes of the keys of a call."""

    make: Callable[[AttentionCall], object]
    of: Variant

    def run(self) -> None:
        """All launches."""
        self.make(self.of.call())


def sampled_sums(call: AttentionCall) -> object:
    """Attention of the last 64 rows by key and by diagonal, as several methods sum it."""
    rows, real = last_rows(call, 64)
    return sampled.sampled_mass(call, rows[:, None], real[:, None], 64, 64)


def block_scores(call: AttentionCall) -> object:
    """BFLA's."""
    return bfla.block_scores(call, 128, 16)


def tile_scores(call: AttentionCall) -> object:
    """XAttention's."""
    return xattention.tile_scores(call, 8, 128)


def stripes(call: AttentionCall) -> object:
    """AnchorAttention's."""
    return anchor.stripes(call, Regions(32, 1, 32), torch.zeros(call.q.shape[:3]), 12.0)


def column_sums(call: AttentionCall) -> object:
    """Kascade's."""
    tiles = torch.arange(4)[None]
    rows = Rows.of(call.geometry, tiles, 64, 8, torch.float32)
    return kascade.column_sums(call, rows, tiles * 64, 192)


def kept_tiles(call: AttentionCall) -> object:
    """rowmax's, in the call's type."""
    return rowmax.kept_tiles(call, RowMaxConfig(every=2, width=None, union="group", precision="exact"))


def kept_tiles_in_8_bits(call: AttentionCall) -> object:
    """The same by products of e4m3, with a union and under a window."""
    call = evolve(call, window=100, softcap=30.0, sinks=torch.zeros(2))
    return rowmax.kept_tiles(call, RowMaxConfig(every=2, width=None, union="group", precision="fp8"))


def kept_columns(call: AttentionCall) -> object:
    """rowmax's narrow columns, in the call's type; those of one key and two have a branch of their own."""
    for width in (1, 2):
        rowmax.kept_tiles(call, RowMaxConfig(union="head", every=32, width=width, precision="exact"))
    return rowmax.kept_tiles(call, RowMaxConfig(union="head", every=4, width=16, precision="exact"))


def kept_columns_in_8_bits(call: AttentionCall) -> object:
    """The same by products of e4m3; columns of 8 keys are the portable kernel's."""
    rowmax.kept_tiles(call, RowMaxConfig(union="head", every=4, width=8, precision="fp8"))
    return rowmax.kept_tiles(call, RowMaxConfig(union="head", every=4, width=16, precision="fp8"))


READERS: dict[str, Callable[[AttentionCall], object]] = {
    "sums": sampled_sums,
    "bfla": block_scores,
    "xattention": tile_scores,
    "anchor": stripes,
    "kascade": column_sums,
    "rowmax": kept_tiles,
    "rowmax in 8 bits": kept_tiles_in_8_bits,
    "rowmax, columns": kept_columns,
    "rowmax, columns in 8 bits": kept_columns_in_8_bits,
}
SOURCES = {
    "": Variant("tiles", width=128),
    ": pages": Variant("tiles", width=128, page=16),
    ": fp8 pages": Variant("tiles", width=128, page=16, stored=FP8),
}
ESTIMATES = {name + kind: Estimate(make, of) for name, make in READERS.items() for kind, of in SOURCES.items()}


def pretend(active: Target) -> None:
    """From now on this process has an H100, by this driver, and all launchers take the device for one."""
    driver.set_active(active)  # pyright: ignore[reportArgumentType]
    replace(compiler, max_shared_mem=lambda _: SHARED)
    replace(torch.cuda, get_device_properties=lambda *_: Properties)
    replace(TritonExecutor, unsupported=lambda *_: None)
    for module in (attention, by_tile, sampled, kascade, anchor, groups, rowmax):
        replace(module, chip=lambda _: row((9, 0)))


def known(*families: Family) -> None:
    """Executors that are built from now on know these kernels and the portable one, on any device."""
    records = (*(evolve(one, rank=20) for one in families), PORTABLE)
    replace(handing, installed=lambda: records)


class Target:
    """The part of a driver that compilation asks."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@frozen
class Launcher:
    """Triton's of a kernel, of one that needs scratch memory, so that no step goes round it (`repeat.straight`)."""

    launched: Callable[..., None]
    global_scratch_size: int = 1
    profile_scratch_size: int = 0

    def __call__(self, *arguments: Any) -> None:
        self.launched(*arguments)


class Loading(Target):
    """Also loads what was compiled, known by its bytes, and gives each launch to `launched`."""

    def __init__(self, launched: Callable[..., None]) -> None:
        self.utils = self
        self.launched = launched

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return 1, (name, hash(code)), 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Launcher:
        return Launcher(self.launched)


class Properties:
    """Of an H100."""

    multi_processor_count = 132


def replace(place: Any, **values: Any) -> None:
    """Set names of a module or class, for the life of this process."""
    for name, value in values.items():
        setattr(place, name, value)


def compiling(compiled: list[str], only: str, keep: Callable[[str, str], None]) -> Callable[..., Any]:
    """`JITFunction.run` without the launch, which notes what it compiled; names without `only` are passed over.

    keep: is given each kernel's name and PTX.
    """

    def warm(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        del warmup
        assert isinstance(options.get("enable_fp_fusion"), bool), f"a launch of {self.fn.__name__} leaves it to Triton"
        if only not in self.fn.__name__:
            return None
        kernel: Any = RUN(self, *args, grid=grid, warmup=True, **options)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        assert kernel.asm["ptx"]
        keep(self.fn.__name__, kernel.asm["ptx"])
        compiled.append(self.fn.__name__)
        return kernel

    return warm


def main() -> None:
    compiled: list[str] = []
    folder = next((Path(word.removeprefix("into=")) for word in sys.argv[1:] if word.startswith("into=")), None)
    at = [""]

    def keep(name: str, ptx: str) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            words = re.sub(r"[ :]+", "_", f"{at[0]}.{len(compiled)}.{name}.ptx")
            (folder / words).write_text(ptx, encoding="utf-8")

    pretend(Target())
    replace(hopper, LEAST_KEYS=0, LEAST_ITEMS=0, LEAST_BLOCKS=0)
    replace(groups, COPY=0)  # or keys of a prompt this short would be copied out of their pages
    found: dict[str, list[str]] = {}
    every = "every" in sys.argv[1:]
    asked = {*VARIANTS, *HOPPER_VARIANTS} if every else {*FEW}
    estimates = {name: one for name, one in ESTIMATES.items() if every or not name.endswith(": pages")}
    # What the portable kernel repairs behind the Hopper kernel, it compiles in variants of its own.
    families: list[tuple[tuple[Family, ...], Mapping[str, Any], str]] = [
        ((), VARIANTS, ""), ((HOPPER, HOPPER_INT8), HOPPER_VARIANTS, "hopper"), ((), ROWS, "row_tiles"),
        ((), FLOOR, "_kernel"), ((), PREFIX, "_kernel"), ((), {"order": Order()}, "_kernel"),
        ((), estimates, "_kernel"),
    ]  # fmt: skip
    for records, variants, only in families:
        replace(JITFunction, run=compiling(compiled, only, keep))
        known(*records)
        for name, variant in variants.items():
            if isinstance(variant, Variant) and name not in asked:
                continue
            at[0] = name
            variant.run()
            found[name] = list(compiled)
            compiled.clear()
    if choosing.FAILED:
        raise next(iter(choosing.FAILED.values()))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
