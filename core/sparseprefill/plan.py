"""Values between stages: a Plan into the executor, a Result out of it, and a softmax in progress between passes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from functools import cached_property, reduce
from operator import or_
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall, check_call
from sparseprefill.errors import MaskError, ParameterError, printed
from sparseprefill.mask.count import share
from sparseprefill.mask.geometry import Geometry, same_device
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import Priority
from sparseprefill.mask.recorded import apart
from sparseprefill.mask.tile_map import TileMap
from sparseprefill.memory import Memory
from sparseprefill.pages import odd_layout


class Remark(str):
    """A note of a plan that reports show to the user, such as why a slower kernel served."""

    __slots__ = ()


EXACT_DTYPES = (torch.float32, torch.float64)
"""Types of sums: float64 for float64 calls."""


def base_of(most: Tensor) -> Tensor:
    """The number to take from logits before `exp`: largest of a row; 0 where that is -inf, as of no logits at all."""
    return torch.where(most.isneginf(), 0.0, most)


@frozen(eq=False)
class SoftmaxState:
    """Unnormalised partial attention: running maximum, sum and weighted values, in natural-log units.

    m: ``[B, Hq, Nq]`` row maximum of the logits so far, -inf where none. l: ``[B, Hq, Nq]`` sum of ``exp(s - m)``.
    acc: ``[B, Hq, Nq, Dv]`` sum of ``exp(s - m) * v``. All float32 (float64 for float64 calls).
    """

    m: Tensor
    l: Tensor  # noqa: E741  (the paper's and FlashAttention's name)
    acc: Tensor
    _made_for: Any = field(default=None, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        for name, x in (("m", self.m), ("l", self.l), ("acc", self.acc)):
            plain = isinstance(x, Tensor) and x.layout == torch.strided and not x.is_nested
            if not plain or x.dtype not in EXACT_DTYPES:
                raise MaskError(f"SoftmaxState.{name} is {printed(x)}: pass a tensor of float32, or of float64")
            if x.dtype != self.m.dtype or x.device != self.m.device:
                given = f"{x.dtype} on {x.device}, m is {self.m.dtype} on {self.m.device}"
                raise MaskError(f"SoftmaxState.{name} is {given}: pass tensors of one dtype on one device")
        if self.m.shape != self.l.shape or self.acc.shape[:-1] != self.m.shape:
            shapes = (tuple(self.m.shape), tuple(self.l.shape), tuple(self.acc.shape))
            raise MaskError(f"SoftmaxState shapes are {shapes}: pass m and l [B, H, N] and acc [B, H, N, Dv]")

    def serves(self, q: Tensor) -> bool:
        """True where it was handed over for no call before, or for one of these queries. It is theirs from then on."""
        if self._made_for is None:
            object.__setattr__(self, "_made_for", weakref.ref(q))
            return True
        mine: bool = self._made_for() is q
        return mine

    @classmethod
    def empty(cls, shape: tuple[int, int, int], width: int, dtype: torch.dtype, device: torch.device) -> SoftmaxState:
        """Nothing attended to yet."""
        m = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        return cls(m, torch.zeros_like(m), torch.zeros(*shape, width, dtype=dtype, device=device))

    def merge(self, other: SoftmaxState) -> SoftmaxState:
        """The state over both sets of keys, which must be disjoint. Associative and commutative; -inf safe."""
        m = torch.maximum(self.m, other.m)
        base = base_of(m)
        mine, theirs = torch.exp(self.m - base), torch.exp(other.m - base)
        acc = self.acc * mine[..., None] + other.acc * theirs[..., None]
        return SoftmaxState(m, self.l * mine + other.l * theirs, acc)

    def finish(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output ``[B, Hq, Nq, Dv]`` and LSE ``[B, Hq, Nq]`` (natural log, sinks left out; -inf for empty rows).

        sinks: ``[Hq]`` logits that join the denominator of the output.
        """
        lse, total = self.m + torch.log(self.l), self.l
        if sinks is not None:
            total = total + torch.exp(sinks.to(self.m.dtype)[:, None] - base_of(self.m))
        out = self.acc / torch.where(total == 0, 1.0, total)[..., None]
        return out, lse


@frozen(eq=False)
class Carry:
    """Attention that an estimator has computed already: its softmax state and the region it covers.

    Raises MaskError for a region that is no mask, or a state that is none.
    """

    state: SoftmaxState
    region: SparseMask

    def __attrs_post_init__(self) -> None:
        _check("Carry.state", self.state, SoftmaxState)
        _check("Carry.region", self.region, SparseMask)
        _check_device("Carry.state", self.state.m, self.region.geometry)


@frozen(eq=False)
class _Ruled:
    """A mask, and rules on its grid that are waiting to be united with it, apart from what a carry's region holds."""

    mask: SparseMask
    region: SparseMask | None
    rules: tuple[TileMap, ...] = ()

    @cached_property
    def united(self) -> SparseMask:
        """All of them together."""
        return self.mask.with_rules(self.rules, self.region)

    def __call__(self) -> SparseMask:
        return self.united


@frozen(eq=False)
class Plan:
    """The order to an executor: which pairs to compute, and how.

    mask: tiles and stripes still to do; disjoint from `carry.region`. A function may stand in its place, which makes
    the mask when it is first read: dense attention needs none to run.
    carry: real output made on the way, or None.
    probe: bool ``[B, Hq]``, heads whose attention mass per tile of the mask is wanted in `Result.probe`, or None.
    priority: what tiles and columns are worth by the estimator's own scores, for refiners that must choose, or None.
    skip_below: float32 ``[B]``, thresholds from 0 to less than 1: while it runs, the executor leaves out key tiles
    whose largest logit lies so far below the running maximum of their rows that ``exp`` of the difference is less
    (`SkipSoftmax`). 0: of this batch row none is left out; so is a row of 1 and more, which is refused where the host
    can see it. None: nothing is ever left out. On the call's device.
    notes: evidence that a method keeps for its own observer, and each `Remark` for the user.

    Raises MaskError, naming the field, for a mask that is none, a carry of another call, a probe of other heads, a
    priority that is none, or thresholds that are none; where a function makes the mask, when it is first read.
    """

    _mask: SparseMask | Callable[[], SparseMask]
    carry: Carry | None = None
    probe: Tensor | None = field(default=None, kw_only=True)
    priority: Priority | None = field(default=None, kw_only=True)
    skip_below: Tensor | None = field(default=None, kw_only=True)
    notes: Mapping[str, Any] = field(factory=dict, kw_only=True)

    def __attrs_post_init__(self) -> None:
        mask = self._mask.mask if isinstance(self._mask, _Ruled) else self._mask
        if isinstance(mask, SparseMask):
            self._check_rest(mask)
        elif isinstance(mask, type) or not callable(mask):
            raise MaskError(f"Plan.mask is {_shown(mask)}: pass a SparseMask")

    def _check_rest(self, mask: SparseMask) -> None:
        if not isinstance(self.notes, Mapping):
            raise MaskError(f"Plan.notes is {_shown(self.notes)}: pass a table of names and values")
        if self.carry is not None:
            _check("Plan.carry", self.carry, Carry)
            region = self.carry.region.geometry
            if region is not mask.geometry and not mask.geometry.fits(region):
                mine, theirs = mask.geometry.describe(), region.describe()
                raise MaskError(f"Plan.carry covers {theirs}, the mask is for {mine}: make both for one call")
            rows, wanted_state = tuple(self.carry.state.m.shape), (region.batch, region.heads, region.q_len)
            if rows != wanted_state:
                raise MaskError(f"Plan.carry.state has rows {rows}: pass one of the call's {wanted_state}, [B, Hq, Nq]")
        if self.probe is not None:
            wanted = (mask.geometry.batch, mask.geometry.heads)
            _check("Plan.probe", self.probe, Tensor)
            _check_tensor("Plan.probe", self.probe, torch.bool, wanted, "a bool tensor [B, Hq]")
            _check_device("Plan.probe", self.probe, mask.geometry)
        if self.priority is not None:
            _check("Plan.priority", self.priority, Priority)
        if self.skip_below is not None:
            given, wanted_rows = self.skip_below, (mask.geometry.batch,)
            _check_tensor("Plan.skip_below", given, torch.float32, wanted_rows, "a float32 tensor [B]")
            _check_device("Plan.skip_below", given, mask.geometry)
            if given.device.type == "cpu" and not apart(_are_shares, given):  # of others none is read
                raise MaskError(f"Plan.skip_below is {given.tolist()}: pass thresholds from 0 to less than 1")

    @cached_property
    def mask(self) -> SparseMask:
        """Tiles and stripes still to do. MaskError where the function that was given makes something else."""
        if isinstance(self._mask, SparseMask):
            return self._mask
        made = self._mask()
        if not isinstance(self._mask, _Ruled):
            _check("Plan.mask", made, SparseMask)
            self._check_rest(made)
        return made

    @property
    def geometry(self) -> Geometry:
        """The sizes of the call that the mask is for; rules that wait are not united for it."""
        return self.base.geometry

    @property
    def base(self) -> SparseMask:
        """The mask without rules that wait."""
        given = self._mask
        return given.mask if isinstance(given, _Ruled) else given if isinstance(given, SparseMask) else self.mask

    @property
    def masks(self) -> tuple[SparseMask, ...]:
        """Every mask that is computed, the carry's region first; no pair is in two of them."""
        return (self.mask,) if self.carry is None else (self.carry.region, self.mask)

    def computed(self) -> tuple[SparseMask, ...]:
        """The plan's masks as lists alone, without their maps of tiles: what a record keeps, to be counted."""
        return tuple(mask.listed() for mask in self.masks)

    def grid(self, tile: int | None = None) -> tuple[int, int]:
        """Tokens of a query tile and of a key tile: the mask's own, or those of a square tile."""
        return (self.base.tile_q, self.base.tile_k) if tile is None else (tile, tile)

    def common_grid(self) -> tuple[int, int]:
        """The mask's tiles; where a carry's region lies on others, the largest that divide both."""
        return math.gcd(*(mask.tile_q for mask in self.masks)), math.gcd(*(mask.tile_k for mask in self.masks))

    def tiles_on(self, tile_q: int, tile_k: int) -> Tensor:
        """bool ``[B, Hq, R, C]``: the key tiles of all masks, on a grid that divides theirs; not to be written to."""
        found = [mask.tiles_on(tile_q, tile_k) for mask in self.masks if mask.has_tiles]
        return reduce(or_, found) if found else self.base.tiles_on(tile_q, tile_k)

    def begun(self, call: AttentionCall) -> SoftmaxState:
        """A state of its own for the call, float32 or better: that of the carry, or nothing attended to yet."""
        (batch, heads, rows), dtype = call.q.shape[:3], torch.promote_types(call.q.dtype, torch.float32)
        state = SoftmaxState.empty((batch, heads, rows), call.value_dim, dtype, call.q.device)
        if self.carry is None:
            return state
        if self.carry.state.acc.shape[3] != call.value_dim:
            wide = f"values of {self.carry.state.acc.shape[3]}"
            raise MaskError(f"Plan.carry.state has {wide}: pass one of the call's dimension {call.value_dim}")
        return state.merge(self.carry.state)

    def keep(self, tile: int | None = None, **rules: Any) -> Plan:
        """The plan with the tiles of rules, such as ``sink=2`` or ``band=1``, those that the carry holds left out.

        Rules are collected, and united with the mask once, when it is first read. tile: tokens of the square tiles that
        they speak of; None for the plan's own, and of others they are united at once. rules: fields of `TileMap`.
        Raises MaskError for values that are none, TypeError for a rule that there is not.
        """
        mask, given = self.base, self._mask
        region = None if self.carry is None else self.carry.region
        grid = mask.tile_q, mask.tile_k
        if tile is not None and (tile, tile) != grid:
            return self.widen(SparseMask.from_rules(mask.geometry, tile, **rules))
        if region is not None and (region.tile_q, region.tile_k) != grid:
            return self.widen(SparseMask.from_rules(mask.geometry, grid, **rules))
        if not isinstance(given, _Ruled) or given.region is not region:
            given = _Ruled(self.mask, region)
        more = TileMap(geometry=mask.geometry, tile_q=mask.tile_q, tile_k=mask.tile_k, **rules)
        return evolve(self, mask=evolve(given, rules=(*given.rules, more)))

    def widen(self, extra: SparseMask) -> Plan:
        """The plan with the pairs of one more mask, those that the carry holds already left out."""
        if self.carry is not None:
            extra = extra - self.carry.region
        return evolve(self, mask=self.mask | extra)


@frozen(eq=False)
class Planned:
    """A call that waits, with its plan, to be executed together with others: see `Pipeline.begin`."""

    call: AttentionCall
    plan: Plan
    memory: Memory


@frozen
class Kernel:
    """The kernel that computed a result's output.

    name: "reference", "cpu" (PyTorch's fused attention over gathered keys), "torch" (dense attention of its own), the
    name of a registered kernel, such as "portable" (Triton, any GPU), or what an executor calls its own.
    reason: why none that comes before it did: each with what it has against the call or the GPU, or that this variant
    of it does not compile or launch here, as in "my-kernel: a sliding window or softcap".
    """

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


@frozen(eq=False)
class Skipped:
    """Parts of a plan's mask that an executor left out because their logits cannot matter (`Plan.skip_below`).

    pairs: int64 ``[B, Hq]``, pairs of rows and keys that the mask holds and that are not in the output; on the device.
    Who votes: `rows` query rows (of one query tile, from a multiple of `rows` on) over `keys` keys at a time, of a tile
    or that follow each other in a list of stripes. The order of the steps is that of the query block of `block` rows:
    see `refiners.skip`.
    """

    pairs: Tensor
    block: int
    rows: int
    keys: int


EXACT = "call"
"""The precision of the call's dtype; others are named by kernels (`Features.precisions`), such as "int8"."""
BOUND = 0.1
"""Of the error of a head in a reduced precision, unless another is asked for. Rounding weights and values to e4m3's
three bits alone makes 0.04 where attention is flat (docs/numerics.md)."""


@frozen(eq=False)
class Rounding:
    """Facts about a call that was computed in a reduced precision.

    kind: the precision, such as "int8". errors: float32 ``[B, Hq]`` on the device: how far sampled query rows of each
    head are from the same in the call's precision, as a share of their norm. bound: of the executor; heads beyond it
    were computed in the call's precision.
    """

    kind: str
    errors: Tensor
    bound: float

    @property
    def heads(self) -> Tensor:
        """bool ``[B, Hq]``: those that were computed in the reduced precision."""
        return self.errors <= self.bound


@frozen(eq=False)
class Parts:
    """Facts about a call that ran in parts.

    geometry: of the whole call. count: how many parts. pairs: of each head, int64 ``[B, Hq]`` on the device.
    """

    geometry: Geometry
    count: int
    pairs: Tensor


@frozen(eq=False)
class Result:
    """The outcome of a call.

    out: ``[B, Hq, Nq, Dv]`` in the call's dtype, zeros in padding rows. lse: ``[B, Hq, Nq]`` float32 (float64 for
    float64 calls), natural log over the keys computed, sinks left out, -inf in padding rows; no
    corrector changes it.
    plan: what was executed. Of a call that ran in parts, a plan of all their masks together, without notes or carry;
    reading its mask raises MaskError where the parts' masks were too large to keep.
    probe: float32 ``[B, Hq, R, C]``, attention mass of each tile averaged over the tile's real rows; zero for heads
    that were not probed and tiles that the mask does not hold. None if nothing was probed, or in parts.
    parts: of a call that ran in parts (`Pipeline.workspace`); None otherwise.
    dense: why dense attention ran instead of a method's stages; empty where the stages ran.
    corrected: the class of the corrector that changed the output; empty where none did. `lse`, `mask` and `probe` speak
    of the pairs computed all the same.
    kernels: what computed the output, several where parts of the call met different ones; empty where the executor does
    not tell.
    skipped: what the executor left out of the mask while it ran, and who voted; None where the plan asks for nothing of
    the kind, or the executor does not do it.
    rounded: of a call in a reduced precision, what that cost; None otherwise, for a reason that `kernels` has.
    """

    out: Tensor
    lse: Tensor
    plan: Plan
    probe: Tensor | None = None
    parts: Parts | None = field(default=None, kw_only=True)
    dense: str = field(default="", kw_only=True)
    corrected: str = field(default="", kw_only=True)
    kernels: tuple[Kernel, ...] = field(default=(), kw_only=True)
    skipped: Skipped | None = field(default=None, kw_only=True)
    rounded: Rounding | None = field(default=None, kw_only=True)

    @cached_property
    def mask(self) -> SparseMask:
        """Everything selected, the carry's region included; all of it is computed but for what `skipped` counts.

        MaskError where parts had masks too large to keep.
        """
        carry = self.plan.carry
        return self.plan.mask if carry is None else carry.region | self.plan.mask

    @property
    def density(self) -> float:
        """Pairs computed / pairs that causality, window and padding allow (host sync); skipped ones are not."""
        if self.skipped is not None:
            geometry = self.plan.mask.geometry if self.parts is None else self.parts.geometry
            return share(self.pairs() - self.skipped.pairs, geometry)
        return self.mask.density if self.parts is None else share(self.parts.pairs, self.parts.geometry)

    @property
    def skipped_share(self) -> float:
        """The share of the mask's pairs that were skipped, from 0 to 1 (host sync)."""
        if self.skipped is None:
            return 0.0
        return int(self.skipped.pairs.sum()) / max(1, int(self.pairs().sum()))

    def pairs(self) -> Tensor:
        """int64 ``[B, Hq]``: pairs that the mask of each head holds, the skipped ones included; no host sync."""
        if self.parts is not None:
            return self.parts.pairs
        return reduce(torch.add, (mask.pairs() for mask in self.plan.computed()))

    def into(self, out: Tensor, lse: Tensor) -> Result:
        """The result with `out` and `lse` copied into tensors of the caller."""
        out.copy_(self.out)
        lse.copy_(self.lse)
        return evolve(self, out=out, lse=lse)


def check_plan(call: object, plan: object) -> None:
    """The first check of executors, without reading a value from the device.

    ParameterError for anything that is no AttentionCall, or no Plan; MaskError for the plan of another call.
    """
    given = call if isinstance(call, AttentionCall) else check_call(call)
    if not isinstance(plan, Plan):
        raise ParameterError(f"plan is {_shown(plan)}: pass a Plan, such as Plan(SparseMask.full(call))")
    if plan.geometry is not given.geometry:
        check_geometry(given, plan.geometry, "plan has")
    for mask in plan.masks:
        if mask.doubtful:
            _ = mask.looked_at


def check_geometry(call: AttentionCall, geometry: Geometry, who: str) -> None:
    """MaskError for the mask of another call, by its geometry. who: begins the message, as in ``plan has``."""
    if not geometry.fits(call.geometry):
        made, wanted = geometry.describe(), call.geometry.describe()
        raise MaskError(f"{who} a mask for {made}; the call is {wanted}: it must be made for this call")


def _check_tensor(name: str, given: Tensor, dtype: torch.dtype, shape: tuple[int, ...], words: str) -> None:
    odd = odd_layout(given) if isinstance(given, Tensor) else _shown(given)
    if odd or given.dtype != dtype or tuple(given.shape) != shape:
        raise MaskError(f"{name} is {odd or f'{given.dtype} {tuple(given.shape)}'}: pass {words} = {shape}")


def _check_device(name: str, given: Tensor, geometry: Geometry) -> None:
    if given.device != geometry.device and not same_device(given.device, geometry.device):
        raise MaskError(f"{name} is on {given.device}: move it to the call's device {geometry.device}")


def _are_shares(x: Tensor) -> bool:
    """True if all numbers lie from 0 to less than 1 (host sync)."""
    return bool(((x >= 0) & (x < 1)).all())


def _check(name: str, value: object, wanted: type) -> None:
    if not isinstance(value, wanted):
        raise MaskError(f"{name} is {_shown(value)}: pass a {wanted.__name__}")


def _shown(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
