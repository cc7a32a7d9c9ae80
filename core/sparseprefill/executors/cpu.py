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
"""Bytes of keys that are gathered at once, about; as many of values, and at most as many of logits that are held. This
and the others below are round guesses."""
MASS = 1024
"""Keys whose shares of a query tile's softmax are worked out at once, about."""
RUN = 1 << 20
"""Pairs of a head's neighbouring query tiles with every key in reach, from which they are one dense call."""
TOGETHER = 512
"""Rows of neighbouring query tiles with one list of stripes that are computed together, at most."""
COLUMNS = 1 << 20
"""Stripes whose lists are looked at together, about."""
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
    mask, shape = plan.mask, (call.q.shape[0], call.q.shape[1], call.q.shape[2])
    state = SoftmaxState.empty(shape, call.value_dim, _dtype(call), call.q.device)
    if plan.carry is not None:
        state = state.merge(plan.carry.state)  # a copy
    pairs = torch.zeros(shape[:2], dtype=torch.int64)
    bounds = below.to(state.m.dtype).log().tolist()
    for b, row in _rows(call, mask):
        votes = _Votes.of(row, SoftmaxState(*(x[b, :, row.rows] for x in (state.m, state.l, state.acc))), bounds[b])
        votes.run()
        for whole, part in ((state.m, votes.m), (state.l, votes.l), (state.acc, votes.acc)):
            whole[b, :, row.rows] = row.untiled(part)
        pairs[b] = votes.skipped.view(shape[1], -1).sum(-1)
    return state, Skipped(pairs, mask.tile_q, mask.tile_q, mask.tile_k)


def _attend(call: AttentionCall, mask: SparseMask, *, most: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, Hq, Nq, Dv]``, zero for rows that see nothing, LSE ``[B, Hq, Nq]``, and each row's largest logit.

    most: whether the last is wanted; -inf without.
    """
    dtype, shape = _dtype(call), call.q.shape[:3]
    out = torch.zeros((*shape, call.value_dim), dtype=dtype)
    lse, largest = torch.full((2, *shape), -torch.inf, dtype=dtype)
    for b, row in _rows(call, mask, most):
        row.add(row.tile_entries(row.add_dense() if row.fused else row.tiles))
        for entries in row.stripe_entries():
            row.add(entries)
        if row.rows == slice(0, shape[2]) and shape[0] == 1:  # spares a copy
            return row.untiled(row.out)[None], row.untiled(row.lse)[None], row.untiled(row.most)[None]
        for whole, part in ((out, row.out), (lse, row.lse), (largest, row.most)):
            whole[b, :, row.rows] = row.untiled(part)
    return out, lse, largest


def _tile_mass(call: AttentionCall, plan: Plan, lse: Tensor) -> Tensor:
    """float32 ``[B, Hq, R, C]``: see `Result.probe`."""
    mass = torch.zeros(plan.mask.tile_map().shape)
    for b, row in _rows(call, plan.mask):
        rows, columns = row.tiles.shape[1:]
        asked = row.tiles if plan.probe is None else row.tiles & plan.probe[b, :, None, None]
        mass[b, :, row.skipped : row.skipped + rows, :columns] = row.mass(lse[b, :, row.rows], asked)
    return mass


def _dtype(call: AttentionCall) -> torch.dtype:
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32


def _rows(call: AttentionCall, mask: SparseMask, most: bool = False) -> Iterator[tuple[int, _Row]]:
    """The batch rows that have tokens."""
    for b in range(call.q.shape[0]):
        row = _Row.of(call, mask, b, most)
        if row is not None:
            yield b, row


@frozen(eq=False)
class _Row:
    """One batch row without its padding: its n tokens as query tiles, the keys that these may see, and output in the
    making.

    q: ``[Hq * R, Tq, D]``, the R query tiles that the tokens touch; where the first or the last tile reaches beyond
    them, zeros. k, v: ``[Hkv * C * Tk, D]``, the last key tile filled up with zeros. out: ``[Hq * R, Tq, Dv]``. lse,
    most: ``[Hq * R, Tq]``.
    rows: the tokens' place among the call's query rows. first: the position of the first one, and start: its query tile
    on the row's grid. skipped: the call's query tiles before that. tiles: bool ``[Hq, R, C]``, the mask's tiles.
    batch: number of the row. group: number of its first query tile group on the grid. wants_most: whether each row's
    largest logit is wanted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    most: Tensor
    mask: SparseMask
    tiles: Tensor
    rows: slice
    first: int
    start: int
    skipped: int
    batch: int
    group: int
    scale: float
    softcap: float | None
    wants_most: bool
    _rooms: dict[str, Tensor] = field(factory=dict, init=False)

    @classmethod
    def of(cls, call: AttentionCall, mask: SparseMask, batch: int, most: bool = False) -> _Row | None:
        """Nothing attended to yet; None where no row is a token."""
        g, dtype, (tile_q, tile_k) = call.geometry, _dtype(call), (mask.tile_q, mask.tile_k)
        position, first, last = (int(x[batch]) for x in g.token_range())
        if first >= last:
            return None
        begin = 0 if g.starts is None else int(g.starts[batch])
        start, end, columns = first // tile_q, (last - 1) // tile_q + 1, -(-last // tile_k)
        skipped, rows = start - position // tile_q, slice(first - position, last - position)
        k, v = (_padded(x[batch, :, begin : begin + last].to(dtype), 0, columns * tile_k) for x in (call.k, call.v))
        q = _padded(call.q[batch, :, rows].to(dtype), first - start * tile_q, (end - start) * tile_q)
        q = q.reshape(-1, tile_q, q.shape[-1])
        lse, largest = (torch.full(q.shape[:2], -torch.inf, dtype=dtype) for _ in range(2))
        return cls(
            q,
            k.flatten(0, 1).contiguous(),
            v.flatten(0, 1).contiguous(),
            q.new_zeros(*q.shape[:2], v.shape[-1]),
            lse,
            largest,
            mask,
            mask.tile_map()[batch, :, skipped : skipped + end - start, :columns],
            rows,
            first,
            start,
            skipped,
            batch,
            position // (tile_q * mask.group),
            call.softmax_scale,
            call.softcap,
            most,
        )

    @property
    def share(self) -> int:
        """Query heads of a KV head."""
        heads, _, columns = self.tiles.shape
        return heads * columns * self.mask.tile_k // self.k.shape[0]

    @property
    def fused(self) -> bool:
        """Whether PyTorch's fused kernel gives all that is wanted."""
        return self.softcap is None and not self.wants_most and self.v.shape[-1] == self.q.shape[-1]

    def tile_starts(self) -> Tensor:
        """int64 [R]: position of the first row of each query tile."""
        return (self.start + torch.arange(self.tiles.shape[1])) * self.mask.tile_q

    @property
    def before(self) -> int:
        """Rows of the first query tile that come before the tokens."""
        return self.first - self.start * self.mask.tile_q

    def tiled(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Of rows ``[Hq, n, *]`` query tiles ``[Hq * R, Tq, *]``; `value` where a tile reaches beyond the rows."""
        return _padded(x, self.before, self.tiles.shape[1] * self.mask.tile_q, value).reshape(
            -1, self.mask.tile_q, *x.shape[2:]
        )

    def untiled(self, x: Tensor) -> Tensor:
        """The rows ``[Hq, n, *]`` of query tiles ``[Hq * R, Tq, *]``."""
        whole = x.reshape(self.tiles.shape[0], -1, *x.shape[2:])
        return whole[:, self.before : self.before + self.rows.stop - self.rows.start]

    def near(self, apart: Tensor, width: int, rows: int) -> Tensor:
        """By how far the first of `rows` rows is from the first of `width` keys: whether any of them sees any key."""
        near, window = apart > -rows, self.mask.geometry.window
        return near if window is None else near & (apart - width + 1 < window)

    def full(self, apart: Tensor, width: int, rows: int) -> Tensor:
        """By the same distance: whether all rows see all keys."""
        full, window = apart >= width - 1, self.mask.geometry.window
        return full if window is None else full & (apart + rows <= window)

    def seen(self, apart: Tensor) -> Tensor:
        """By how far a row is from a key: whether it sees it."""
        return self.near(apart, 1, 1)

    def bytes_of(self, keys: int, held: bool = False, run: int = 1) -> int:
        """What so many keys of `run` query tiles count against `GATHERED`. held: whether their logits are held."""
        rows = run * self.mask.tile_q if held else 0
        return keys * max(self.k.shape[-1], rows) * self.k.element_size()

    def gather(self, name: str, index: Tensor, width: int) -> Tensor:
        """Blocks of `width` rows of k or v by number ``[n, w]``: ``[n, w * width, D]``, in memory used again."""
        source: Tensor = getattr(self, name)
        size = index.numel() * width * source.shape[1]
        room = self._rooms.get(name)
        if room is None or room.numel() < size:
            room = self._rooms[name] = source.new_empty(size)
        blocks = source.view(-1, width * source.shape[1])
        torch.index_select(blocks, 0, index.flatten(), out=room[:size].view(-1, blocks.shape[1]))
        return room[:size].view(index.shape[0], -1, source.shape[1])

    def add_dense(self) -> Tensor:
        """Neighbouring query tiles that have every key in reach, where they are enough work; the tiles that are left.

        Nothing may have been attended to yet. Nothing is gathered for them.
        """
        (heads, rows, columns), tile_q = self.tiles.shape, self.mask.tile_q
        if self.mask.geometry.window is not None:
            return self.tiles
        reach = torch.arange(columns) * self.mask.tile_k < self.tile_starts()[:, None] + tile_q
        dense = (self.tiles | ~reach).all(-1)
        if bool(dense.all()):  # all heads at once, however short: dense attention to the bit
            self._add_rows(slice(0, heads), 0, rows)
            return torch.zeros_like(self.tiles)
        edges = functional.pad(dense, (1, 1)).to(torch.int8).diff(dim=-1)
        begins, ends = ((edges == sign).nonzero().tolist() for sign in (1, -1))
        left = self.tiles.clone() if begins else self.tiles
        for (head, begin), (_, end) in zip(begins, ends, strict=True):
            if self._add_rows(slice(head, head + 1), begin, end, least=RUN):
                left[head, begin:end] = False
        return left

    def _add_rows(self, heads: slice, begin: int, end: int, least: int = 0) -> bool:
        """Every key that they may see, for the query tiles `begin` to `end` of one query head or of all.

        Whether that was done: not where a head has fewer than `least` pairs of them.
        """
        (query_heads, _, columns), (tile_q, tile_k) = self.tiles.shape, (self.mask.tile_q, self.mask.tile_k)
        first = self.start * tile_q
        rows = self.rows.stop - self.rows.start
        at = slice(max(begin * tile_q, self.before), min(end * tile_q, self.before + rows))
        n, behind = first + at.start, first + at.stop
        if (at.stop - at.start) * behind < least:
            return False
        q, out, lse = (x.view(query_heads, -1, x.shape[-1]) for x in (self.q, self.out, self.lse[..., None]))
        kv_heads = slice(heads.start // self.share, -(-heads.stop // self.share))
        k, v = (x.view(-1, columns * tile_k, x.shape[-1])[None, kv_heads] for x in (self.k, self.v))
        mine = q[None, heads, at]
        found, more = _fused(mine, k[:, :, n:behind], v[:, :, n:behind], self.scale, causal=True)
        if n:
            found, more = _merge(found, more, *_fused(mine, k[:, :, :n], v[:, :, :n], self.scale))
        out[heads, at], lse[heads, at] = found[0], more[0, ..., None]
        return True

    def tile_entries(self, tiles: Tensor) -> _Entries:
        """Tiles, bool ``[Hq, R, C]``, of each query tile."""
        _, rows, columns = tiles.shape
        head, tile, column = tiles.nonzero(as_tuple=True)
        apart = self.tile_starts()[tile] - column * self.mask.tile_k
        index = head // self.share * columns + column
        return _Entries(head * rows + tile, index, apart, self.mask.tile_k)

    def stripe_entries(self) -> Iterator[_Entries]:
        """Stripes that no tile holds, some heads at a time; query tiles that share a list go together."""
        mask, (heads, rows, columns) = self.mask, self.tiles.shape
        if mask.stripes is None:
            return
        width, keys = mask.stripe_width, columns * mask.tile_k
        group = (self.start + torch.arange(rows)) // mask.group - self.group
        counts, offsets = (x[self.batch][:, group] for x in (mask.stripes.counts, mask.stripes.offsets))
        step = max(1, COLUMNS // max(1, int(counts.sum(1).max())))
        for first in range(0, heads, step):
            count, offset = (x[first : first + step].to(torch.int64) for x in (counts, offsets))
            for run, some in self._runs(count, offset):
                if some.numel() == 0:
                    continue
                count_of = count.flatten()[some]
                which = torch.arange(some.numel()).repeat_interleave(count_of)
                at = torch.arange(which.numel()) + (offset.flatten()[some] - count_of.cumsum(0) + count_of)[which]
                item, position = (first * rows + some)[which], mask.stripes.indices[at].to(torch.int64) * width
                keep = (position >= 0) & (position < keys)
                if not mask.disjoint:
                    column = torch.div(position, mask.tile_k, rounding_mode="floor").clamp(0, columns - 1)
                    keep &= ~self.tiles.flatten(0, 1)[item, column]
                if not bool(keep.all()):
                    item, position = item[keep], position[keep]
                apart = self.tile_starts()[item % rows] - position
                index = (item // rows // self.share * keys + position) // width
                yield _Entries(item, index, apart, width, run)

    def _runs(self, counts: Tensor, offsets: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every query tile with stripes: neighbours that have the same ones by the first of them, ``[n]``, and how many
        they are; then all others.

        Only where no tile holds a stripe: else neighbours differ in what is left of their list. counts, offsets: ``[h,
        R]``.
        """
        rows = counts.shape[1]
        most = max(1, min(rows, TOGETHER // self.mask.tile_q)) if self.mask.disjoint else 1
        run = 1 << most.bit_length() - 1
        ahead = self.start % run
        edges = (ahead, -(ahead + rows) % run)
        lists = torch.stack([functional.pad(x, edges, value=-1) for x in (counts, offsets)]).unflatten(2, (-1, run))
        alike = (lists == lists[..., :1]).all(-1).all(0)  # [h, runs of the grid]
        head, number = (alike & (lists[0, ..., 0] > 0)).nonzero(as_tuple=True)
        yield run, head * rows + number * run - ahead
        alone = ~alike.repeat_interleave(run, 1)[:, ahead : ahead + rows] & (counts > 0)
        yield 1, alone.flatten().nonzero()[:, 0]

    def add(self, entries: _Entries) -> None:
        """Attend to key blocks of query tiles, of which some rows may see some keys only."""
        for piece in self._pieces(entries, held=not self.fused):
            k, v = (self.gather(name, piece.index, entries.width) for name in ("k", "v"))
            self._add(piece, k, v, entries.run)

    def mass(self, lse: Tensor, asked: Tensor) -> Tensor:
        """float32 ``[Hq, R, C]``: the share of its rows' softmax that each of the tiles has that are asked for.

        lse: ``[Hq, n]`` of the rows. asked: bool ``[Hq, R, C]``.
        """
        tile_k, columns = self.mask.tile_k, asked.shape[2]
        base = self.tiled(torch.where(lse.isneginf(), 0.0, lse), torch.inf)
        real = (base < torch.inf).sum(-1)
        found = torch.zeros(base.shape[0], columns)
        for piece in self._pieces(self.tile_entries(asked), held=True, most=max(1, MASS // tile_k)):
            p = _logits(self.q.index_select(0, piece.items), self.gather("k", piece.index, tile_k), self, piece.seen)
            p.sub_(base.index_select(0, piece.items)[..., None]).exp_()
            own = p.sum(1).unflatten(-1, (-1, tile_k)).sum(-1) / real[piece.items, None]
            at = piece.items[:, None] * columns + piece.index % columns
            found.view(-1).index_add_(0, at.flatten(), own.flatten().float())
        return found.view(asked.shape)

    def _pieces(self, entries: _Entries, *, held: bool, most: int | None = None) -> Iterator[_Piece]:
        """The work, cut so that a piece's keys are gathered at once: what all rows of a query tile see, and the rest.

        held: whether logits are held. most: blocks of a query tile in one piece, which then comes in several; None for
        all of them.
        """
        width, rows = entries.width, entries.run * self.mask.tile_q
        size = self.bytes_of(width, held, entries.run)
        full, near = self.full(entries.apart, width, rows), self.near(entries.apart, width, rows)
        if most is None and width == rows == self.mask.tile_k and self.mask.geometry.window is None:
            short = near & self._short(entries, near)
            joined = entries.where(short.nonzero()[:, 0].flip(0))  # the diagonal tile is then the first of its list
            for some, counts, part in joined.split(joined.apart >= 0, None):
                for chosen, at, _ in _batches(counts, size):  # of one length: see `JOINED`
                    below = torch.ones(rows, at.shape[1] * width, dtype=torch.bool)
                    below[:, :width].tril_()
                    yield _Piece(some[chosen], part.index[at], below)
            full, near = full & ~short, near & ~short
        for some, counts, part in entries.split(full, most):
            for chosen, at, real in _batches(counts, size):
                seen = None if real is None else real.repeat_interleave(width, 1)[:, None]
                yield _Piece(some[chosen], part.index[at], seen)
        edge = near & ~full
        if width == self.mask.tile_k:  # of one distance from the diagonal at a time, which are seen alike
            for offset in torch.unique(entries.apart[edge]).tolist():
                part = entries.where(edge & (entries.apart == offset))
                seen = self.seen(offset + torch.arange(rows)[:, None] - torch.arange(width))
                causal = offset == 0 and rows == width and self.mask.geometry.window is None
                for cut in _cut(part.item.numel(), size):
                    yield _Piece(part.item[cut], part.index[cut, None], seen, causal)
            return
        for some, counts, part in entries.split(edge, most):
            for chosen, at, real in _batches(counts, size):
                apart = (part.apart[at][..., None] - torch.arange(width)).flatten(1)
                seen = self.seen(apart[:, None] + torch.arange(rows)[:, None])
                seen = seen if real is None else seen & real.repeat_interleave(width, 1)[:, None]
                yield _Piece(some[chosen], part.index[at], seen)

    def _short(self, entries: _Entries, near: Tensor) -> Tensor:
        """bool: blocks of query tiles that have their diagonal tile and a few others, of square tiles."""
        item, number = entries.item, self.q.shape[0]
        count, own = (torch.bincount(item[some], minlength=number) for some in (near, entries.apart == 0))
        return ((own > 0) & (count > 1) & (count <= JOINED))[item]

    def _add(self, piece: _Piece, k: Tensor, v: Tensor, run: int) -> None:
        """Attention of a piece's query tiles over keys of their own, ``[n, w, D]``, merged with what was before."""
        items, seen = piece.items, piece.seen
        if run > 1:
            items = (items[:, None] + torch.arange(run)).flatten()
        q = self.q.index_select(0, items).view(k.shape[0], -1, self.q.shape[-1])
        if self.fused:
            bias = None if piece.causal else _bias(seen, q.dtype)
            found = _fused(q[:, None], k[:, None], v[:, None], self.scale, bias=bias, causal=piece.causal)
            out, lse = (x.squeeze(1) for x in found)
        else:
            out, lse, most = _plain(_logits(q, k, self, seen), v)
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


@frozen(eq=False)
class _Entries:
    """Key blocks of query tiles, one query tile after the other.

    item: int64 ``[m]``, of each block its query tile, ascending, which stands for `run` neighbours that have the same
    blocks. index: of each its number among the blocks of all KV heads. apart: how far the query tile's first row is
    from its first key. width: keys of a block.
    """

    item: Tensor
    index: Tensor
    apart: Tensor
    width: int
    run: int = 1

    def where(self, keep: Tensor) -> _Entries:
        """Some of the blocks."""
        return evolve(self, item=self.item[keep], index=self.index[keep], apart=self.apart[keep])

    def split(self, keep: Tensor, most: int | None) -> Iterator[tuple[Tensor, Tensor, _Entries]]:
        """Some of the blocks by query tile, and by parts of at most so many: query tiles, how many blocks each has, and
        the blocks themselves. Nothing where there are none."""
        if not bool(keep.any()):
            return
        part = self if bool(keep.all()) else self.where(keep)
        items, counts = torch.unique_consecutive(part.item, return_counts=True)
        if most is not None:
            pieces = (counts + most - 1) // most
            which = torch.arange(items.numel()).repeat_interleave(pieces)
            done = (torch.arange(which.numel()) - (pieces.cumsum(0) - pieces)[which]) * most
            items, counts = items[which], (counts[which] - done).clamp(max=most)
        yield items, counts, part


@frozen(eq=False)
class _Piece:
    """Query tiles ``[n]`` with as many key blocks each: their numbers ``[n, w]`` among those of all KV heads.

    seen: bool that broadcasts to ``[n, rows, keys]``, None where all is seen. causal: it says no more than that row i
    sees keys 0 to i.
    """

    items: Tensor
    index: Tensor
    seen: Tensor | None
    causal: bool = False


@frozen(eq=False)
class _Votes:
    """Skip-softmax of one batch row in the making, query tile by query tile.

    m, l: ``[Hq * R, Tq]``, acc: ``[Hq * R, Tq, Dv]``, of a softmax in progress. real: bool ``[Hq * R, Tq]``, rows that
    are tokens. bound: the threshold's logarithm. skipped: int64 ``[Hq * R]``, pairs left out.
    """

    row: _Row
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
        m, l, acc = m.clone(), l.clone(), acc.clone()  # noqa: E741 - where nothing is padded they are the state's own
        real = row.tiled(torch.ones_like(state.m)) > 0
        return cls(row, m, l, acc, real, bound, torch.zeros(m.shape[0], dtype=torch.int64))

    def run(self) -> None:
        """Tiles in their order, then stripes."""
        row, tile_k = self.row, self.row.mask.tile_k
        (heads, rows, columns), (order, counts) = row.tiles.shape, self._order()
        base = torch.arange(heads).repeat_interleave(rows) // row.share * columns
        apart = row.tile_starts().repeat(heads)[:, None] - order * tile_k
        whole = row.full(apart, tile_k, row.mask.tile_q) & self.real.all(1)[:, None]
        there = torch.arange(columns) < counts[:, None]
        for j in range(int(counts.max())):
            for seen_by_all in (True, False):
                chosen = (there & (whole == seen_by_all))[:, j].nonzero().flatten()
                for part in _cut(chosen.numel(), row.bytes_of(tile_k)):
                    some = chosen[part]
                    self._step(
                        some, (base[some] + order[some, j])[:, None], tile_k, apart[some, j, None], whole=seen_by_all
                    )
        if row.mask.stripes is not None:
            for head in range(heads):
                self._stripes(head, row.mask.stripes)

    def _order(self) -> tuple[Tensor, Tensor]:
        """int64 ``[Hq * R, C]``, columns of the mask's tiles as they come, and how many each query tile has."""
        row = self.row
        tiles, columns = row.tiles.flatten(0, 1), row.tiles.shape[2]
        column = torch.arange(columns)
        beyond = (column + 1) * row.mask.tile_k - 1 > row.tile_starts()[:, None]
        beyond = beyond.repeat(row.tiles.shape[0], 1)
        place = torch.where(beyond, columns - column, 2 * columns - column)  # those behind the first row lead
        first = (tiles.cumsum(1) == 1) & tiles & ~beyond
        place = torch.where(first, columns, place)
        return place.masked_fill_(~tiles, torch.iinfo(place.dtype).max).argsort(1), tiles.sum(1)

    def _stripes(self, head: int, stripes: IndexLists) -> None:
        """A head's stripes, as many keys at a time as a tile has."""
        row, mask, (_, rows, columns) = self.row, self.row.mask, self.row.tiles.shape
        width, keys, tiles = mask.stripe_width, columns * mask.tile_k, row.tiles[head]
        group = (row.start + torch.arange(rows)) // mask.group - row.group
        own = stripes.narrow(row.batch, head)
        entry, index = (x[0, 0, group] for x in own.padded(int(own.counts.max())))
        position = index * width
        entry = entry & (position >= 0) & (position < keys)
        if not mask.disjoint:
            tile = torch.div(position, mask.tile_k, rounding_mode="floor").clamp(0, columns - 1)
            entry = entry & ~torch.gather(tiles, 1, tile)
        position = torch.where(entry, position, 0)
        apart, base = row.tile_starts()[:, None] - position, head // row.share * keys
        for first in range(0, position.shape[1], mask.tile_k // width):
            here = slice(first, first + mask.tile_k // width)
            for part in _cut(rows, row.bytes_of(mask.tile_k)):
                items, there = (head * rows + torch.arange(rows))[part], entry[part, here]
                self._step(items, (base + position[part, here]) // width, width, apart[part, here], there)

    def _step(
        self,
        items: Tensor,
        index: Tensor,
        width: int,
        apart: Tensor,
        there: Tensor | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """One step of some query tiles: those of which a row wants it go on.

        index: of key blocks, as of `_Row.gather`. apart: ``[n, w]``, from each one's first key to the first row. there:
        which blocks count, or None for all. whole: all rows are real and see every key.
        """
        row, seen = self.row, None
        if not whole:
            keys = (apart[..., None] - torch.arange(width)).flatten(1)[:, None]
            seen = row.seen(keys + torch.arange(row.mask.tile_q)[:, None]) & self.real[items][..., None]
            seen = seen if there is None else seen & there.repeat_interleave(width, 1)[:, None]
        logits = _logits(row.q.index_select(0, items), row.gather("k", index, width), row, seen)
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
        acc = torch.baddbmm(self.acc.index_select(0, items) * alpha[..., None], p, row.gather("v", index, width))
        self.acc.index_copy_(0, items, acc)


def _batches(counts: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Lists of about the same length together: their numbers ``[n]``, where their entries are ``[n, w]``, and which of
    these are real, bool ``[n, w]``, None where all are. What is not real repeats some entry.

    counts: int64 ``[lists]``, of lists that follow each other. size: bytes that one entry gathers.
    """
    offsets, total = counts.cumsum(0) - counts, int(counts.sum())
    order = torch.argsort(counts, descending=True, stable=True)
    sizes = counts[order].tolist()
    begin, end = 0, len(sizes)
    while begin < end:
        width = sizes[begin]
        most = max(1, GATHERED // (width * size))
        stop = begin
        while stop < min(end, begin + most) and sizes[stop] >= ALIKE * width:
            stop += 1
        items = order[begin:stop]
        slot = torch.arange(width)
        where = offsets[items, None] + slot
        real = None if sizes[stop - 1] == width else slot < counts[items, None]
        yield items, where if real is None else where.clamp_(max=total - 1), real
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


def _padded(x: Tensor, before: int, rows: int, value: float = 0.0) -> Tensor:
    """The rows of ``[H, n, *]`` among `rows` of them, the others being `value`; itself where there are no others."""
    if x.shape[1] == rows:
        return x
    padded = x.new_full((x.shape[0], rows, *x.shape[2:]), value)
    padded[:, before : before + x.shape[1]] = x
    return padded
