"""CpuExecutor: sparse attention on CPUs by PyTorch's own fused attention, over gathered keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill.errors import UnsupportedCallError
from sparseprefill.executors.reference import REFERENCE
from sparseprefill.mask.lists import IndexLists
from sparseprefill.parts.workspace import TILE, default_workspace
from sparseprefill.plan import Kernel, Plan, Result, Skipped, SoftmaxState, check_plan

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.mask.mask import SparseMask

KERNELS = (Kernel("cpu"),)
GATHERED = 4 << 20
"""Bytes of keys that are gathered at once, about; as many of values, and at most as many of logits that are held."""
MASS = 1024
"""Keys whose shares of a query tile's softmax are worked out at once, about."""
RUN = 1 << 20
"""Pairs of a head's neighbouring query tiles with every key in reach, from which they are one dense call."""
TOGETHER = 512
"""Rows of neighbouring query tiles with one list of single keys that are computed together, at most."""
COLUMNS = 1 << 20
"""Single keys that are collected before they are computed, about."""
ALIKE = 0.9
"""Query tiles are computed together if the shortest of their lists has this part of the longest one's entries."""
JOINED = 9
"""Tiles of a list, up to which `ALIKE` means as many: the diagonal tile is then computed with the others."""


@frozen
class CpuExecutor:
    """Query tiles with about as many keys are computed together: their keys are gathered, and PyTorch's fused attention
    runs over all of them at once. Tiles on the diagonal are one causal call, but for short lists, which are computed
    with theirs. Neighbouring query tiles that have every key in reach are a call of their own, without gathering, and
    those with one list of stripes gather them once. What belongs to one row is merged by LSE.

    The fused kernel knows no softcap, no values of another size than the keys, and tells no row maximum, which
    `accumulate` owes: there, two batched products and a softmax do the same. float64 calls are computed in float64, all
    others in float32. Calls of which gradients are recorded, or with numbers that are not finite or whose products may
    overflow, are the reference's, and the result's kernel says why.

    Where a plan skips (`Plan.skip_below`), the j-th key tiles of all query tiles are looked at together, each
    query tile votes as a whole, and those that want theirs are computed together.
    """

    def unsupported(self, call: AttentionCall) -> str | None:
        """Why this executor cannot run the call, or None."""
        return (
            None
            if call.q.device.type == "cpu"
            else f"q is on {call.q.device}; move q, k and v to the CPU, or use AutoExecutor"
        )

    def workspace(self, call: AttentionCall) -> int:
        """Queries, keys and output in full precision, maps and lists, and what is gathered and computed at once."""
        heads, rows = call.q.shape[0] * call.q.shape[1], call.q.numel() // call.q.shape[-1]
        size, width = max(4, call.q.element_size()), call.q.shape[-1] + call.value_dim
        keys = call.kv_len * width * size
        held = (4 * rows + heads * call.kv_len) * (width + 2) * size + default_workspace(call, per_pair=64)
        columns = call.geometry.tile_rows(TILE) * call.kv_len  # of one head, if stripes select every key
        held += 64 * (columns + min(COLUMNS, heads * columns))
        logits = 1 + 2 * TILE // call.q.shape[-1]  # of a tile's rows, beside each gathered key
        return held + (2 + logits) * min(max(GATHERED, keys), rows * keys)

    def accumulate(self, call: AttentionCall, plan: Plan) -> SoftmaxState:
        """The carry, if any, merged with attention over the plan's mask; unnormalised."""
        if self._objection(call, plan):
            return REFERENCE.accumulate(call, plan)
        return _state(call, plan) if plan.skip_below is None else _skim(call, plan, plan.skip_below)[0]

    def execute(self, call: AttentionCall, plan: Plan) -> Result:
        """Output, LSE, and the tile mass of probed heads."""
        if reason := self._objection(call, plan):
            return evolve(REFERENCE.execute(call, plan), kernels=(Kernel("reference", reason),))
        skipped = None
        if plan.skip_below is not None:
            state, skipped = _skim(call, plan, plan.skip_below)
            out, lse = state.finish()
        else:
            out, lse, _ = _attend(call, plan.mask)
            if plan.carry is not None:
                out, lse = _merge(out, lse, *plan.carry.state.finish())
        probe = None if plan.probe is None else _tile_mass(call, plan, lse)
        if call.sinks is not None:
            share = torch.sigmoid(lse - call.sinks.to(lse.dtype)[:, None])
            out = torch.where(lse.isneginf()[..., None], out, out * share[..., None])
        return Result(out.to(call.q.dtype), lse, plan, probe, kernels=KERNELS, skipped=skipped)

    def execute_into(self, call: AttentionCall, plan: Plan, out: Tensor, lse: Tensor) -> Result:
        """Run `execute`, and copy output and LSE into tensors of the caller."""
        return self.execute(call, plan).into(out, lse)

    def _objection(self, call: AttentionCall, plan: Plan) -> str:
        """Why the reference must run the call; empty where it need not."""
        check_plan(call, plan)
        if reason := self.unsupported(call):
            raise UnsupportedCallError([f"CpuExecutor: {reason}"])
        if torch.is_grad_enabled() and any(x.requires_grad for x in (call.q, call.k, call.v)):
            return "gradients are recorded, but the keys gathered here are overwritten by later calls"
        return _odd_numbers(call)


def _odd_numbers(call: AttentionCall) -> str:
    """Whether some number could spoil rows that may not see its key: masks are added here, and products come first."""
    largest = [_largest(x) for x in (call.q, call.k, call.v)]
    if not all(map(math.isfinite, largest)):
        return "q, k or v is not finite, and would spoil rows that may not see it"
    logits = largest[0] * largest[1] * call.q.shape[-1] * max(1.0, call.softmax_scale)
    if logits > torch.finfo(torch.float64 if call.q.dtype == torch.float64 else torch.float32).max / 16:
        return "q and k are so large that their products may overflow"
    return ""


def _largest(x: Tensor) -> float:
    """The largest absolute value; not finite where one number is not."""
    if x.numel() == 0:
        return 0.0
    stored = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))  # as it lies in memory: spares a copy
    low, high = (float(one) for one in torch.aminmax(stored))
    return low if math.isnan(low) else max(abs(low), abs(high))


def _state(call: AttentionCall, plan: Plan) -> SoftmaxState:
    out, lse, most = _attend(call, plan.mask, most=True)
    share = torch.where(lse.isneginf(), 0.0, (lse - most).exp())
    state = SoftmaxState(most, share, out.mul_(share[..., None]))
    return state if plan.carry is None else plan.carry.state.merge(state)


def _skim(call: AttentionCall, plan: Plan, below: Tensor) -> tuple[SoftmaxState, Skipped]:
    """The carry, if any, resumed over the plan's mask, but for what its rows leave out: see `SkipSoftmax`."""
    mask, dtype = plan.mask, torch.float64 if call.q.dtype == torch.float64 else torch.float32
    shape = (call.q.shape[0], call.q.shape[1], call.q.shape[2])
    state = SoftmaxState.empty(shape, call.value_dim, dtype, call.q.device)
    if plan.carry is not None:
        state = state.merge(plan.carry.state)  # a copy
    pairs = torch.zeros(shape[:2], dtype=torch.int64)
    bounds = below.to(dtype).log().tolist()
    for b in range(shape[0]):
        row = _Row.of(call, mask, b, dtype)
        if row is not None:
            at = slice(row.begin, row.begin + row.q.shape[1])
            votes = _Votes.of(row, SoftmaxState(state.m[b, :, at], state.l[b, :, at], state.acc[b, :, at]), bounds[b])
            votes.run()
            state.m[b, :, at], state.l[b, :, at], state.acc[b, :, at] = votes.finish()
            pairs[b] = votes.skipped.view(shape[1], -1).sum(-1)
    return state, Skipped(pairs, mask.tile_q, mask.tile_q, mask.tile_k)


def _attend(call: AttentionCall, mask: SparseMask, *, most: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, Hq, Nq, Dv]``, zero for rows that see nothing, LSE ``[B, Hq, Nq]``, and each row's largest logit.

    most: whether the last is wanted; -inf without.
    """
    dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    shape = call.q.shape[:3]
    rows = [_Row.of(call, mask, b, dtype, most) for b in range(shape[0])]
    if len(rows) == 1 and rows[0] is not None and rows[0].q.shape[1] == shape[2]:
        alone = rows[0].attend()
        return alone[0][None], alone[1][None], alone[2][None]
    out = torch.zeros((*shape, call.value_dim), dtype=dtype)
    lse, largest = (torch.full(shape, -torch.inf, dtype=dtype) for _ in range(2))
    for b, row in enumerate(rows):
        if row is not None:
            at = slice(row.begin, row.begin + row.q.shape[1])
            out[b, :, at], lse[b, :, at], largest[b, :, at] = row.attend()
    return out, lse, largest


def _tile_mass(call: AttentionCall, plan: Plan, lse: Tensor) -> Tensor:
    """float32 ``[B, Hq, R, C]``: see `Result.probe`."""
    mask, probe = plan.mask, plan.probe
    mass = torch.zeros(mask.tile_map().shape)
    for b in range(call.q.shape[0]):
        row = _Row.of(call, mask, b, lse.dtype)
        if row is not None and probe is not None:
            rows, columns = row.tiles.shape[1:]
            own = lse[b, :, row.begin : row.begin + row.q.shape[1]]
            asked = row.tiles & probe[b, :, None, None]
            mass[b, :, row.skipped : row.skipped + rows, :columns] = _States.of(row).mass(own, asked)
    return mass


@frozen(eq=False)
class _Row:
    """One batch row without its padding: q ``[Hq, n, D]``, and the keys that these may see, k and v ``[Hkv, m, D]``.

    begin: index among the call's query rows of the first one here. first: its position among the keys.
    tiles: bool ``[Hq, R, C]``, the mask's tiles for the R query tiles that these rows touch. start: the first of these
    on the row's grid, and skipped: the call's query tiles before it. stripes: lists ``[1, Hq, G]`` of groups of query
    tiles, `group` the number of the first on the row's grid. most: whether each row's largest logit is wanted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: SparseMask
    scale: float
    begin: int
    first: int
    start: int
    skipped: int
    tiles: Tensor
    stripes: IndexLists | None
    group: int
    softcap: float | None
    most: bool

    @classmethod
    def of(
        cls, call: AttentionCall, mask: SparseMask, batch: int, dtype: torch.dtype, most: bool = False
    ) -> _Row | None:
        """The rows that are tokens; None where there are none."""
        g = call.geometry
        position, first, last = (int(x[batch]) for x in g.token_range())
        if first >= last:
            return None
        begin = 0 if g.starts is None else int(g.starts[batch])
        k, v = (x[batch, :, begin : begin + last].to(dtype) for x in (call.k, call.v))
        q = call.q[batch, :, first - position : last - position].to(dtype)
        start, end = first // mask.tile_q, (last - 1) // mask.tile_q + 1
        row = start - position // mask.tile_q
        columns = -(-last // mask.tile_k)
        tiles = mask.tile_map()[batch, :, row : row + end - start, :columns]
        stripes = mask.with_stripe_width(1).stripes
        if stripes is not None:
            one = slice(batch, batch + 1)
            stripes = IndexLists(stripes.counts[one], stripes.offsets[one], stripes.indices)
        group = position // (mask.tile_q * mask.group)
        at = (call.softmax_scale, first - position, first, start, row)
        return cls(q, k, v, mask, *at, tiles, stripes, group, call.softcap, most)

    @property
    def share(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[0] // self.k.shape[0]

    @property
    def fused(self) -> bool:
        """Whether PyTorch's fused kernel gives all that is wanted."""
        return self.softcap is None and not self.most and self.v.shape[-1] == self.q.shape[-1]

    def attend(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output ``[Hq, n, Dv]``, zero for rows that see nothing, LSE and largest logit ``[Hq, n]``."""
        if self.fused and self._sees_all():
            return self._dense()
        states = _States.of(self)
        states.add_tiles(states.add_dense() if self.fused else self.tiles)
        if self.stripes is not None:
            states.add_stripes(self.stripes)
        return states.finish()

    def _sees_all(self) -> bool:
        """Whether the tiles hold every key in reach, of a call without a window."""
        return bool(self.dense_tiles().all())

    def dense_tiles(self) -> Tensor:
        """bool ``[Hq, R]``: query tiles that have every key in reach; none of a call with a window."""
        if self.mask.geometry.window is not None:
            return torch.zeros(self.tiles.shape[:2], dtype=torch.bool)
        last = self.tile_starts() + self.mask.tile_q - 1
        reach = torch.arange(self.tiles.shape[2]) * self.mask.tile_k <= last[:, None]
        return (self.tiles | ~reach).all(-1)

    def tile_starts(self) -> Tensor:
        """int64 [R]: position of the first row of each query tile."""
        return (self.start + torch.arange(self.tiles.shape[1])) * self.mask.tile_q

    @property
    def before(self) -> int:
        """Rows of the first query tile that come before these."""
        return self.first - self.start * self.mask.tile_q

    def tiled(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Of rows ``[Hq, n, *]`` query tiles ``[Hq * R, Tq, *]``; `value` where a tile reaches beyond the rows."""
        heads, rows = self.tiles.shape[:2]
        edges = (self.before, rows * self.mask.tile_q - self.before - x.shape[1])
        padded = functional.pad(x, (0, 0) * (x.dim() - 2) + edges, value=value)
        return padded.reshape(heads * rows, self.mask.tile_q, *x.shape[2:])

    def untiled(self, x: Tensor) -> Tensor:
        """The rows ``[Hq, n, *]`` of query tiles ``[Hq * R, Tq, *]``."""
        whole = x.reshape(self.tiles.shape[0], -1, *x.shape[2:])
        return whole[:, self.before : self.before + self.q.shape[1]]

    def _dense(self) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = self.dense(slice(0, self.q.shape[0]), 0, self.q.shape[1])
        return out, lse, torch.full_like(lse, -torch.inf)

    def dense(self, heads: slice, first: int, behind: int) -> tuple[Tensor, Tensor]:
        """Output ``[h, n, D]`` and LSE ``[h, n]`` of rows `first` to `behind` over every key that they may see.

        heads: one query head, or all.
        """
        of = slice(heads.start // self.share, -(-heads.stop // self.share))
        q, k, v = self.q[None, heads, first:behind], self.k[None, of], self.v[None, of]
        n, end = self.first + first, self.first + behind
        out, lse = _fused(q, k[:, :, n:end], v[:, :, n:end], self.scale, causal=True)
        if n:
            out, lse = _merge(out, lse, *_fused(q, k[:, :, :n], v[:, :, :n], self.scale))
        return out[0], lse[0]


@frozen(eq=False)
class _States:
    """Output, LSE and largest logits of one batch row in the making, as query tiles.

    q: ``[Hq * R, Tq, D]``; where the first or the last tile reaches beyond the rows, zeros. k, v: ``[Hkv * C * Tk,
    D]``, the keys of tiles, the last one filled up with zeros. out: ``[Hq * R, Tq, Dv]``. lse, most: ``[Hq * R, Tq]``.
    """

    row: _Row
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    most: Tensor
    _rooms: dict[str, Tensor] = field(factory=dict, init=False)

    @classmethod
    def of(cls, row: _Row) -> _States:
        """Nothing attended to yet."""
        heads, rows, columns = row.tiles.shape
        tile_q, tile_k = row.mask.tile_q, row.mask.tile_k
        q = _padded(row.q, row.before, rows * tile_q - row.before - row.q.shape[1])
        k, v = (_padded(x, 0, columns * tile_k - x.shape[1]).flatten(0, 1).contiguous() for x in (row.k, row.v))
        q = q.reshape(heads * rows, tile_q, -1)
        lse, most = (torch.full(q.shape[:2], -torch.inf, dtype=q.dtype) for _ in range(2))
        return cls(row, q, k, v, q.new_zeros(*q.shape[:2], v.shape[-1]), lse, most)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Those of the rows themselves: ``[Hq, n, Dv]`` and twice ``[Hq, n]``."""
        return self.row.untiled(self.out), self.row.untiled(self.lse), self.row.untiled(self.most)

    def add_dense(self) -> Tensor:
        """Neighbouring query tiles that have every key in reach, where they are enough work; the tiles that are left.

        Nothing may have been attended to yet.
        """
        row, tile_q = self.row, self.row.mask.tile_q
        heads, rows = row.tiles.shape[:2]
        dense = row.dense_tiles()
        edges = functional.pad(dense, (1, 1)).to(torch.int8).diff(dim=-1)
        begins, ends = ((edges == sign).nonzero().tolist() for sign in (1, -1))
        left, offset = row.tiles.clone() if begins else row.tiles, row.start * tile_q - row.first
        out, lse = self.out.view(heads, rows * tile_q, -1), self.lse.view(heads, -1)
        for (head, begin), (_, end) in zip(begins, ends, strict=True):
            first, behind = max(begin * tile_q + offset, 0), min(end * tile_q + offset, row.q.shape[1])
            if (behind - first) * (row.first + behind) < RUN:
                continue
            at = slice(first - offset, behind - offset)
            out[head, at], lse[head, at] = (x[0] for x in row.dense(slice(head, head + 1), first, behind))
            left[head, begin:end] = False
        return left

    def add_tiles(self, tiles: Tensor) -> None:
        """Tiles, bool ``[Hq, R, C]``."""
        for piece in self._pieces(tiles):
            k, v = (self.gather(name, piece.tiles, self.row.mask.tile_k) for name in ("k", "v"))
            self._add(piece.items, k, v, seen=piece.seen, causal=piece.causal)

    def mass(self, lse: Tensor, asked: Tensor) -> Tensor:
        """float32 ``[Hq, R, C]``: the share of its rows' softmax that each of the tiles has that are asked for.

        lse: ``[Hq, n]`` of the rows. asked: bool ``[Hq, R, C]``.
        """
        row, tile_k = self.row, self.row.mask.tile_k
        heads, rows, columns = asked.shape
        base = row.tiled(torch.where(lse.isneginf(), 0.0, lse), torch.inf)
        real = (base < torch.inf).sum(-1)
        found = torch.zeros(heads * rows, columns)
        for piece in self._pieces(asked, max(1, MASS // tile_k)):
            k = self.gather("k", piece.tiles, tile_k)
            p = _logits(self.q.index_select(0, piece.items), k, row, piece.seen)
            p.sub_(base.index_select(0, piece.items)[..., None]).exp_()
            own = p.sum(1).unflatten(-1, (-1, tile_k)).sum(-1) / real[piece.items, None]
            at = piece.items[:, None] * columns + piece.tiles % columns
            found.view(-1).index_add_(0, at.flatten(), own.flatten().float())
        return found.view(asked.shape)

    def _pieces(self, tiles: Tensor, most: int | None = None) -> Iterator[_Piece]:
        """The work on some tiles, bool ``[Hq, R, C]``, cut so that the keys of a piece are gathered at once.

        most: tiles of a query tile in one piece, which then comes in several; None for all of them.
        """
        held = most is not None or not self.row.fused
        if most is None and self._window is None and self.row.mask.tile_q == self.row.mask.tile_k:
            joined = self._short(tiles)
            yield from self._joined(tiles & joined[..., None], held)
            tiles = tiles & ~joined[..., None]
        yield from self._partial(tiles, held)
        columns, tile_k = tiles.shape[2], self.row.mask.tile_k
        full = tiles & self.full(self._distance())
        head, _, column = full.nonzero(as_tuple=True)
        entries = self.kv_head(head) * columns + column
        counts = full.sum(-1).flatten()
        which = torch.arange(counts.numel())
        if most is not None:
            parts = (counts + most - 1) // most
            which = which.repeat_interleave(parts)
            done = (torch.arange(which.numel()) - (parts.cumsum(0) - parts)[which]) * most
            counts = (counts[which] - done).clamp(max=most)
        for items, index, entry in _batches(counts, entries, self.bytes_of(tile_k, held)):
            seen = None if entry is None else entry.repeat_interleave(tile_k, 1)[:, None]
            yield _Piece(which[items], index, seen)

    def _short(self, tiles: Tensor) -> Tensor:
        """bool ``[Hq, R]``: query tiles that have their diagonal tile and a few others, of square tiles."""
        distance = self._distance()
        count = (tiles & (distance >= 0)).sum(-1)
        return (tiles & (distance == 0)).any(-1) & (count > 1) & (count <= JOINED)

    def _joined(self, tiles: Tensor, held: bool) -> Iterator[_Piece]:
        """Query tiles with as many tiles each, their diagonal tiles first."""
        columns, size = tiles.shape[2], self.row.mask.tile_k
        tiles = (tiles & (self._distance() >= 0)).flip(-1)
        head, _, behind = tiles.nonzero(as_tuple=True)
        entries = self.kv_head(head) * columns + columns - 1 - behind
        for items, index, _ in _batches(tiles.sum(-1).flatten(), entries, self.bytes_of(size, held)):
            seen = torch.ones(size, index.shape[1] * size, dtype=torch.bool)
            seen[:, :size].tril_()
            yield _Piece(items, index, seen)

    def _partial(self, tiles: Tensor, held: bool) -> Iterator[_Piece]:
        """Tiles of which some rows see some keys only: those of one distance from the diagonal at a time."""
        tile_q, tile_k = self.row.mask.tile_q, self.row.mask.tile_k
        distance = self._distance()
        partial = tiles & self._reachable(distance) & ~self.full(distance)
        for offset in torch.unique(distance[partial.any(0)]).tolist():
            head, tile, column = (partial & (distance == offset)).nonzero(as_tuple=True)
            apart = offset + torch.arange(tile_q)[:, None] - torch.arange(tile_k)
            causal = offset == 0 and tile_q == tile_k and self._window is None
            entries = self.kv_head(head) * tiles.shape[2] + column
            items = head * tiles.shape[1] + tile
            for part in _cut(items.numel(), self.bytes_of(tile_k, held)):
                yield _Piece(items[part], entries[part, None], self.seen(apart), causal)

    def add_stripes(self, stripes: IndexLists) -> None:
        """Single columns, those apart that only some rows of a query tile may see."""
        columns: dict[int, _Columns] = {}
        partial = _Columns(self, 1, exact=True)
        starts, tile_q = self.row.tile_starts(), self.row.mask.tile_q
        for head in range(self.row.tiles.shape[0]):
            for run, tiles in self._runs(stripes, head):
                which, position = self._listed(stripes, head, tiles)
                apart = starts[tiles][which] - position  # of the first row from a key
                near, full = apart > -tile_q * run, apart >= 0
                if self._window is not None:
                    near &= apart < self._window
                    full &= apart + tile_q * run <= self._window
                whole = columns.setdefault(run, _Columns(self, run))
                whole.take(head, tiles, which, position, near & full)
                some = near & ~full
                if not bool(some.any()):
                    continue
                for i in range(run):  # tile by tile
                    apart = starts[tiles + i][which] - position
                    near, full = some & (apart > -tile_q), apart >= 0
                    if self._window is not None:
                        near &= apart < self._window
                        full &= apart + tile_q <= self._window
                    whole = columns.setdefault(1, _Columns(self, 1))
                    whole.take(head, tiles + i, which, position, near & full)
                    partial.take(head, tiles + i, which, position, near & ~full)
        for collected in (*columns.values(), partial):
            collected.flush()

    def _runs(self, stripes: IndexLists, head: int) -> Iterator[tuple[int, Tensor]]:
        """Every query tile with stripes: so many neighbours that have the same ones, and the first of each, ``[n]``.

        Only where no tile holds a stripe: else neighbours differ in what is left of their list.
        """
        rows = self.row.tiles.shape[1]
        counts, offsets = self._list_of(stripes, head, torch.arange(rows))
        there = counts > 0
        if not self.row.mask.disjoint:
            yield 1, there.nonzero()[:, 0]
            return
        new = torch.ones(rows, dtype=torch.bool)
        new[1:] = (counts.diff() != 0) | (offsets.diff() != 0)
        begin = new.nonzero()[:, 0]
        length = functional.pad(begin, (0, 1), value=rows).diff()
        begin, length = begin[there[begin]], length[there[begin]]
        run = 1 << (max(1, TOGETHER // self.row.mask.tile_q)).bit_length() - 1
        while run:
            number = length // run
            which = torch.arange(begin.numel()).repeat_interleave(number)
            at = torch.arange(which.numel()) - (number.cumsum(0) - number)[which]
            if which.numel():
                yield run, begin[which] + at * run
            begin, length, run = begin + number * run, length - number * run, run // 2

    def _list_of(self, stripes: IndexLists, head: int, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """int64 ``[n]`` each, of query tiles of a head: how many stripes they have, and where their list begins."""
        group = (self.row.start + tiles) // self.row.mask.group - self.row.group
        return stripes.counts[0, head, group].to(torch.int64), stripes.offsets[0, head, group]

    def _listed(self, stripes: IndexLists, head: int, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Stripes of some query tiles of a head that no tile holds: which of the tiles, and the key's position."""
        row = self.row
        counts, offsets = self._list_of(stripes, head, tiles)
        which = torch.arange(tiles.numel()).repeat_interleave(counts)
        at = torch.arange(which.numel()) + (offsets - counts.cumsum(0) + counts)[which]
        position = stripes.indices[at].to(torch.int64)
        meant = (position >= 0) & (position < row.k.shape[1])
        if not row.mask.disjoint:
            column = torch.div(position, row.mask.tile_k, rounding_mode="floor").clamp(0, row.tiles.shape[2] - 1)
            meant &= ~row.tiles[head, tiles[which], column]
        return (which, position) if bool(meant.all()) else (which[meant], position[meant])

    def columns_of(self, stripes: IndexLists, head: int) -> tuple[Tensor, Tensor]:
        """Of one head, ``[R, w]``: which entries are keys that no tile holds, and their positions."""
        row, tiles = self.row, self.row.tiles[head]
        group = (row.start + torch.arange(tiles.shape[0])) // row.mask.group - row.group
        of = slice(head, head + 1)
        own = IndexLists(stripes.counts[:, of], stripes.offsets[:, of], stripes.indices)
        entry, position = (x[0, 0, group] for x in own.padded(int(own.counts.max())))
        entry &= (position >= 0) & (position < row.k.shape[1])
        if not row.mask.disjoint:
            tile = torch.div(position, row.mask.tile_k, rounding_mode="floor").clamp(0, tiles.shape[1] - 1)
            entry &= ~torch.gather(tiles, 1, tile)
        return entry, position

    def add_columns(
        self, counts: Tensor, items: Tensor, position: Tensor, kv_head: Tensor, *, run: int = 1, exact: bool = False
    ) -> None:
        """Single keys of query tiles: `counts` of each of the `items`, then positions and KV heads of all of them.

        run: neighbouring query tiles for which an item stands. exact: rows that come before a key, or after its window,
        do not see it; else every row sees every key.
        """
        columns = self.row.tiles.shape[2] * self.row.mask.tile_k
        index = kv_head * columns + position
        starts = self.row.tile_starts()[items % self.row.tiles.shape[1]]
        size = self.bytes_of(1, not self.row.fused, run)
        for chosen, order, real in _batches(counts, torch.arange(index.numel()), size):
            rows = index[order]
            k, v = self.gather("k", rows), self.gather("v", rows)
            seen = None if real is None else real[:, None]
            if exact:
                apart = starts[chosen, None] - position[order]
                seen = self.seen(apart[:, None] + torch.arange(self.row.mask.tile_q * run)[:, None])
                seen = seen if real is None else seen & real[:, None]
            self._add(items[chosen], k, v, seen=seen, run=run)

    def _add(
        self, items: Tensor, k: Tensor, v: Tensor, *, seen: Tensor | None = None, causal: bool = False, run: int = 1
    ) -> None:
        """Attention of some query tiles ``[n]`` over keys of their own, ``[n, w, D]``, merged with what was before.

        seen: bool that broadcasts to ``[n, run * Tq, w]``. causal: it says no more than that row i sees keys 0 to i.
        run: neighbouring query tiles that have the same keys, of which the items are the first.
        """
        if run > 1:
            items = (items[:, None] + torch.arange(run)).flatten()
        q = self.q.index_select(0, items).view(k.shape[0], -1, self.q.shape[-1])
        if self.row.fused:
            seen = None if causal else seen
            found = _fused(q[:, None], k[:, None], v[:, None], self.row.scale, bias=_bias(seen, q.dtype), causal=causal)
            out, lse = (x.squeeze(1) for x in found)
        else:
            out, lse, most = _plain(_logits(q, k, self.row, seen), v)
            most = torch.maximum(most.view(items.numel(), -1), self.most.index_select(0, items))
            self.most.index_copy_(0, items, most)
        if seen is not None and seen.shape[-2] > 1 and not bool(seen.any(-1).all()):
            blind = ~seen.any(-1)
            out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)
        out, lse = out.reshape(items.numel(), -1, out.shape[-1]), lse.reshape(items.numel(), -1)
        before = self.lse.index_select(0, items)
        if bool((before > -torch.inf).any()):
            out, lse = _merge(out, lse, self.out.index_select(0, items), before)
        self.out.index_copy_(0, items, out)
        self.lse.index_copy_(0, items, lse)

    def gather(self, name: str, index: Tensor, run: int = 1) -> Tensor:
        """Of k or v, runs of rows by number ``[n, w]``: ``[n, w * run, D]``, in memory that the next ones use again."""
        source: Tensor = getattr(self, name)
        width = run * source.shape[1]
        size = index.numel() * width
        room = self._rooms.get(name)
        if room is None or room.numel() < size:
            room = self._rooms[name] = source.new_empty(size)
        torch.index_select(source.view(-1, width), 0, index.flatten(), out=room[:size].view(-1, width))
        return room[:size].view(index.shape[0], -1, source.shape[1])

    def kv_head(self, head: Tensor) -> Tensor:
        """Of query heads."""
        return head // self.row.share

    def _distance(self) -> Tensor:
        """int64 [R, C]: from the first key of a tile to its first row."""
        return self.row.tile_starts()[:, None] - torch.arange(self.row.tiles.shape[2]) * self.row.mask.tile_k

    def _reachable(self, distance: Tensor) -> Tensor:
        near = distance > -self.row.mask.tile_q
        return near if self._window is None else near & (distance - self.row.mask.tile_k + 1 < self._window)

    def full(self, distance: Tensor) -> Tensor:
        """By how far a tile's first row is from a tile's first key: whether all of its rows see all of its keys."""
        full = distance >= self.row.mask.tile_k - 1
        return full if self._window is None else full & (distance + self.row.mask.tile_q <= self._window)

    def seen(self, apart: Tensor) -> Tensor:
        """By how far a row is from a key: whether it sees it."""
        return apart >= 0 if self._window is None else (apart >= 0) & (apart < self._window)

    @property
    def _window(self) -> int | None:
        return self.row.mask.geometry.window

    def bytes_of(self, keys: int, held: bool = False, run: int = 1) -> int:
        """What so many keys of `run` query tiles count against `GATHERED`. held: whether their logits are held."""
        rows = run * self.row.mask.tile_q if held else 0
        return keys * max(self.k.shape[-1], rows) * self.k.element_size()


@frozen(eq=False)
class _Votes:
    """Skip-softmax of one batch row in the making, query tile by query tile.

    m, l: ``[Hq * R, Tq]``, acc: ``[Hq * R, Tq, Dv]``, of a softmax in progress. real: bool ``[Hq * R, Tq]``, rows that
    are tokens. bound: the threshold's logarithm. skipped: int64 ``[Hq * R]``, pairs left out.
    """

    states: _States
    m: Tensor
    l: Tensor  # noqa: E741
    acc: Tensor
    real: Tensor
    bound: float
    skipped: Tensor

    @classmethod
    def of(cls, row: _Row, state: SoftmaxState, bound: float) -> _Votes:
        """From a state of its rows, ``[Hq, n]`` and ``[Hq, n, Dv]``."""
        m, l, acc = row.tiled(state.m, -torch.inf), row.tiled(state.l), row.tiled(state.acc)  # noqa: E741
        real = row.tiled(torch.ones_like(state.m, dtype=torch.bool))
        return cls(_States.of(row), m, l, acc, real, bound, torch.zeros(m.shape[0], dtype=torch.int64))

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """m, l and acc of the rows."""
        row = self.states.row
        return row.untiled(self.m), row.untiled(self.l), row.untiled(self.acc)

    def run(self) -> None:
        """Tiles in their order, then stripes."""
        row = self.states.row
        order, counts = self._order()
        columns, tile_k = row.tiles.shape[2], row.mask.tile_k
        starts = row.tile_starts().repeat(row.tiles.shape[0])
        head = torch.arange(order.shape[0]) // row.tiles.shape[1]
        whole = self.states.full(starts[:, None] - order * tile_k) & self.real.all(1)[:, None]
        there = torch.arange(columns) < counts[:, None]
        for j in range(int(counts.max())):
            for items, seen_by_all in (((there & whole)[:, j], True), ((there & ~whole)[:, j], False)):
                chosen = items.nonzero().flatten()
                index = self.states.kv_head(head[chosen]) * columns + order[chosen, j]
                for part in _cut(chosen.numel(), self.states.bytes_of(tile_k)):
                    some, apart = chosen[part], None
                    if not seen_by_all:
                        apart = (starts[some] - order[some, j] * tile_k)[:, None, None] + self._grid(tile_k)
                    self._step(some, index[part, None], tile_k, apart, None)
        if row.stripes is not None:
            self._stripes(row.stripes)

    def _order(self) -> tuple[Tensor, Tensor]:
        """int64 ``[Hq * R, C]``, columns of the mask's tiles as they come, and how many each query tile has."""
        row = self.states.row
        tiles, columns = row.tiles.flatten(0, 1), row.tiles.shape[2]
        column = torch.arange(columns)
        beyond = (column + 1) * row.mask.tile_k - 1 > row.tile_starts()[:, None]
        beyond = beyond.repeat(row.tiles.shape[0], 1)
        place = torch.where(beyond, columns - column, 2 * columns - column)  # those behind the first row lead
        first = (tiles.cumsum(1) == 1) & tiles & ~beyond
        place = torch.where(first, columns, place)
        return place.masked_fill_(~tiles, torch.iinfo(place.dtype).max).argsort(1), tiles.sum(1)

    def _stripes(self, stripes: IndexLists) -> None:
        row, tile_k = self.states.row, self.states.row.mask.tile_k
        rows, starts = row.tiles.shape[1], row.tile_starts()
        for head in range(row.tiles.shape[0]):
            entry, position = self.states.columns_of(stripes, head)
            base = int(self.states.kv_head(torch.tensor(head))) * row.tiles.shape[2] * tile_k
            for first in range(0, position.shape[1], tile_k):
                here, at = entry[:, first : first + tile_k], position[:, first : first + tile_k]
                at = torch.where(here, at, 0)
                items = head * rows + torch.arange(rows)
                for part in _cut(rows, self.states.bytes_of(tile_k)):
                    apart = (starts[part, None] - at[part])[:, None] + torch.arange(row.mask.tile_q)[:, None]
                    self._step(items[part], base + at[part], 1, apart, here[part, None])

    def _grid(self, keys: int) -> Tensor:
        return torch.arange(self.states.row.mask.tile_q)[:, None] - torch.arange(keys)

    def _step(self, items: Tensor, index: Tensor, run: int, apart: Tensor | None, there: Tensor | None) -> None:
        """One step of some query tiles: those of which a row wants it go on.

        index: as of `_States.gather`. apart: ``[n, Tq, w]``, from each key to each row; None where all rows are real
        and see every key. there: which keys count, or None.
        """
        states, seen = self.states, None
        if apart is not None:
            seen = states.seen(apart) & self.real[items][..., None]
            seen = seen if there is None else seen & there
        logits = _logits(states.q.index_select(0, items), states.gather("k", index, run), states.row, seen)
        most, m = logits.amax(-1), self.m.index_select(0, items)
        wanted = (~(most < m + self.bound) & self.real[items]).any(1)
        lost = items[~wanted]
        gone = torch.full(lost.shape, logits[0].numel()) if seen is None else seen[~wanted].sum((1, 2))
        self.skipped.index_add_(0, lost, gone)
        items = items[wanted]
        if items.numel() == 0:
            return
        if lost.numel():
            logits, most, m, index = logits[wanted], most[wanted], m[wanted], index[wanted]
        highest = torch.maximum(m, most)
        base = torch.where(highest.isneginf(), 0.0, highest)
        p, alpha = logits.sub_(base[..., None]).exp_(), (m - base).exp_()
        self.m.index_copy_(0, items, highest)
        self.l.index_copy_(0, items, self.l.index_select(0, items) * alpha + p.sum(-1))
        values = states.gather("v", index, run)
        acc = torch.baddbmm(self.acc.index_select(0, items) * alpha[..., None], p, values)
        self.acc.index_copy_(0, items, acc)


class _Columns:
    """Single keys of query tiles, collected over heads, so that tiles of several heads are computed together.

    run, exact: see `_States.add_columns`.
    """

    def __init__(self, states: _States, run: int, *, exact: bool = False) -> None:
        self._states, self._run, self._exact = states, run, exact
        self._clear()

    def _clear(self) -> None:
        self._counts: list[Tensor] = []
        self._items: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._heads: list[Tensor] = []
        self._held = 0

    def take(self, head: int, tiles: Tensor, which: Tensor, position: Tensor, entry: Tensor) -> None:
        """Those of one head: query tiles ``[n]``; of each key which of these, its position, and whether it counts."""
        if not bool(entry.all()):
            which, position = which[entry], position[entry]
        self._counts.append(torch.bincount(which, minlength=tiles.numel()))
        self._items.append(head * self._states.row.tiles.shape[1] + tiles)
        self._positions.append(position)
        self._heads.append(torch.full_like(position, head // self._states.row.share))
        self._held += position.numel()
        if self._held > COLUMNS:
            self.flush()

    def flush(self) -> None:
        """Compute what was collected."""
        if self._held:
            parts = (self._counts, self._items, self._positions, self._heads)
            self._states.add_columns(*(torch.cat(part) for part in parts), run=self._run, exact=self._exact)
        self._clear()


@frozen(eq=False)
class _Piece:
    """Query tiles ``[n]`` with as many tiles of keys each: numbers ``[n, w]`` among the tiles of all KV heads.

    seen: bool that broadcasts to ``[n, Tq, w * Tk]``, None where all is seen. causal: see `_States._add`.
    """

    items: Tensor
    tiles: Tensor
    seen: Tensor | None
    causal: bool = False


def _batches(counts: Tensor, entries: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Lists of about the same length together: their numbers ``[n]``, their entries ``[n, w]``, and which of these are
    real, bool ``[n, w]``, None where all are. What is not real repeats some entry.

    counts: int64 ``[lists]``. entries: of all lists, one after the other. size: bytes that one entry gathers.
    """
    offsets = counts.cumsum(0) - counts
    order = torch.argsort(counts, descending=True, stable=True)
    sizes = counts[order].tolist()
    begin, end = 0, sum(1 for n in sizes if n)
    while begin < end:
        width = sizes[begin]
        most = max(1, GATHERED // (width * size))
        stop = begin
        while stop < min(end, begin + most) and sizes[stop] >= ALIKE * width:
            stop += 1
        items = order[begin:stop]
        slot = torch.arange(width)
        real = None if sizes[stop - 1] == width else slot < counts[items, None]
        where = offsets[items, None] + slot
        yield items, entries[where if real is None else where.clamp_(max=entries.numel() - 1)], real
        begin = stop


def _cut(count: int, size: int) -> Iterator[slice]:
    """Runs of items, each of so many bytes."""
    step = max(1, GATHERED // size)
    return (slice(first, first + step) for first in range(0, count, step))


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, bias: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, N, D]`` and LSE ``[B, H, N]`` by PyTorch's fused kernel."""
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = run(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def _logits(q: Tensor, k: Tensor, row: _Row, seen: Tensor | None) -> Tensor:
    """``[n, Tq, w]`` of queries ``[n, Tq, D]`` and keys ``[n, w, D]``; -inf where a key is not seen."""
    logits = torch.bmm(q * row.scale, k.transpose(1, 2))
    if row.softcap is not None:
        logits.div_(row.softcap).tanh_().mul_(row.softcap)
    if seen is None:
        return logits
    if seen.dim() == 2:  # one mask for all of them is added faster than filled in
        return logits.add_(torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf))
    return logits.masked_fill_(~seen, -torch.inf)


def _plain(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[n, Tq, Dv]``, LSE and largest logit ``[n, Tq]`` of logits, which are overwritten, over values."""
    most = logits.amax(-1)
    logits.sub_(torch.where(most.isneginf(), 0.0, most)[..., None]).exp_()
    total = logits.sum(-1)
    out = torch.bmm(logits, v).div_(torch.where(total == 0, 1.0, total)[..., None])
    return out, most + total.log(), most


def _bias(seen: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What the fused kernel adds to logits ``[n, 1, Tq, w]``."""
    if seen is None:
        return None
    bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
    return bias[:, None] if bias.dim() == 3 else bias


def _merge(out: Tensor, lse: Tensor, other: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE over two disjoint sets of keys; `out` is overwritten."""
    both = torch.logaddexp(lse, more)
    base = torch.where(both.isneginf(), 0.0, both)
    out.mul_((lse - base).exp_()[..., None]).addcmul_(other, (more - base).exp_()[..., None])
    return out, both


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    """Zero rows before and after those of ``[H, n, D]``; itself where there are none."""
    if not (before or after):
        return x
    padded = x.new_empty(x.shape[0], before + x.shape[1] + after, x.shape[2])
    padded[:, before : before + x.shape[1]] = x
    padded[:, :before] = padded[:, before + x.shape[1] :] = 0.0
    return padded
