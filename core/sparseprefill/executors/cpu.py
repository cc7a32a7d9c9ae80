"""CpuExecutor: sparse attention on CPUs by PyTorch's own fused attention, over gathered keys."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.errors import UnsupportedCallError
from sparseprefill.executors.reference import REFERENCE
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.parts.workspace import TILE, default_workspace
from sparseprefill.plan import Kernel, Plan, Result, Skipped, SoftmaxState, base_of, check_plan

KERNELS = (Kernel("cpu"),)
HOST = torch.device("cpu")
GATHERED = 4 << 20
"""Bytes of keys that are gathered at once, about; as many of values, and at most as many of logits that are held. This
and the others below are round guesses."""
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

    Where a plan skips (`Plan.skip_below`), the j-th key tiles of a head's query tiles are looked at together,
    each query tile votes as a whole, and those that want theirs are computed together.
    """

    def unsupported(self, call: AttentionCall) -> str | None:
        """Say why this executor cannot run the call, or None."""
        on = call.q.device
        return None if on.type == "cpu" else f"q is on {on}; move q, k and v to the CPU, or use AutoExecutor"

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

    @uncast
    def accumulate(self, call: AttentionCall, plan: Plan) -> SoftmaxState:
        """The carry, if any, merged with attention over the plan's mask; unnormalised."""
        if self._objection(call, plan):
            return REFERENCE.accumulate(call, plan)
        if plan.skip_below is not None:
            return _skim(call, plan, plan.skip_below)[0]
        out, lse, most = _attend(call, plan.mask, most=True)
        share = (lse - base_of(most)).exp()
        state = SoftmaxState(most, share, out.mul_(share[..., None]))
        return state if plan.carry is None else plan.carry.state.merge(state)

    @uncast
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
        probe = None if plan.probe is None else _tile_mass(call, plan.mask, lse, plan.probe)
        if call.sinks is not None:
            share = torch.sigmoid(lse - call.sinks.to(lse.dtype)[:, None])
            out = torch.where(lse.isneginf()[..., None], out, out * share[..., None])
        return Result(out.to(call.q.dtype), lse, plan, probe, kernels=KERNELS, skipped=skipped)

    def execute_into(self, call: AttentionCall, plan: Plan, out: Tensor, lse: Tensor) -> Result:
        """Run `execute`, and copy output and LSE into tensors of the caller."""
        return self.execute(call, plan).into(out, lse)

    def _objection(self, call: AttentionCall, plan: Plan) -> str:
        """Reason for the reference to run the call; empty where it need not."""
        check_plan(call, plan)
        if reason := self.unsupported(call):
            raise UnsupportedCallError([f"CpuExecutor: {reason}"])
        if torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (call.q, call.k, call.v, call.sinks)
        ):
            return "gradients are recorded, but the keys gathered here are overwritten by later calls"
        return _odd_numbers(call)


def _odd_numbers(call: AttentionCall) -> str:
    """Numbers that could spoil rows that may not see their key: masks are added here, and products come first."""
    largest = [_largest(x) for x in (call.q, call.k, call.v)]
    if not all(map(math.isfinite, largest)):
        return "q, k or v is not finite, and would spoil rows that may not see it"
    logits = largest[0] * largest[1] * call.q.shape[-1] * max(1.0, call.softmax_scale)
    if logits > torch.finfo(torch.promote_types(call.q.dtype, torch.float32)).max / 16:
        return "q and k are so large that their products may overflow"
    return ""


def _largest(x: Tensor) -> float:
    """The largest absolute value; not finite where one number is not."""
    if x.numel() == 0:
        return 0.0
    stored = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))  # as it lies in memory: spares a copy
    low, high = (float(one) for one in torch.aminmax(stored))
    return low if math.isnan(low) else max(abs(low), abs(high))


def _skim(call: AttentionCall, plan: Plan, below: Tensor) -> tuple[SoftmaxState, Skipped]:
    """The carry, if any, resumed over the plan's mask, but for what its rows leave out: see `SkipSoftmax`."""
    mask, state = plan.mask, plan.begun(call)
    pairs = torch.zeros(call.q.shape[:2], dtype=torch.int64, device=HOST)
    bounds = below.to(state.m.dtype).log().tolist()
    for b, row in _rows(call, mask):
        places = [x[b, :, row.rows] for x in (state.m, state.l, state.acc)]
        empty = (-torch.inf, 0.0, 0.0)
        own = SoftmaxState(*(row.tiled(x, none).clone() for x, none in zip(places, empty, strict=True)))
        for head in range(call.q.shape[1]):
            for position, there, width in row.in_order(head):
                for items, index, seen in row.steps(head, position, there, width):
                    pairs[b, head] += _vote(row, own, bounds[b], items, index, width, seen)
        for place, part in zip(places, (own.m, own.l, own.acc), strict=True):
            place.copy_(row.untiled(part))
    return state, Skipped(pairs, mask.tile_q, mask.tile_q, mask.tile_k)


def _attend(call: AttentionCall, mask: SparseMask, *, most: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[B, Hq, Nq, Dv]``, zero for rows that see nothing, LSE ``[B, Hq, Nq]``, and each row's largest logit.

    most: whether the last is wanted; -inf without.
    """
    dtype, shape = torch.promote_types(call.q.dtype, torch.float32), call.q.shape[:3]
    out = torch.zeros((*shape, call.value_dim), dtype=dtype, device=HOST)
    lse, largest = torch.full((2, *shape), -torch.inf, dtype=dtype, device=HOST)
    for b, row in _rows(call, mask, most):
        row.add(row.tile_entries(row.add_dense() if row.fused else row.tiles))
        for entries in row.stripe_entries():
            row.add(entries)
        if row.rows == slice(0, shape[2]) and shape[0] == 1:  # spares a copy
            return row.untiled(row.out)[None], row.untiled(row.lse)[None], row.untiled(row.most)[None]
        for whole, part in ((out, row.out), (lse, row.lse), (largest, row.most)):
            whole[b, :, row.rows] = row.untiled(part)
    return out, lse, largest


def _tile_mass(call: AttentionCall, mask: SparseMask, lse: Tensor, probe: Tensor) -> Tensor:
    """float32 ``[B, Hq, R, C]``: see `Result.probe`."""
    mass = torch.zeros(mask.tile_map().shape, dtype=torch.float32, device=HOST)
    for b, row in _rows(call, mask):
        rows, columns = row.tiles.shape[1:]
        mass[b, :, row.skipped : row.skipped + rows, :columns] = row.mass(lse[b, :, row.rows], probe[b])
    return mass


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

    batch: number of the row. rows: the tokens' place among the call's query rows. position: that of query row 0 on the
    row's grid, negative where it is padding. tiles: bool ``[Hq, R, C]``, the mask's tiles, for the R query tiles that
    the tokens touch. share: query heads of a KV head. wants_most: whether each row's largest logit is wanted.
    q: ``[Hq * R, Tq, D]``; where the first or the last tile reaches beyond the tokens, zeros. k, v: ``[Hkv * C * Tk,
    D]``, the last key tile filled up with zeros. out: ``[Hq * R, Tq, Dv]``. lse, most: ``[Hq * R, Tq]``.
    """

    call: AttentionCall
    mask: SparseMask
    batch: int
    rows: slice
    position: int
    tiles: Tensor
    share: int
    wants_most: bool
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    most: Tensor
    _rooms: dict[str, Tensor] = field(factory=dict, init=False)

    @classmethod
    def of(cls, call: AttentionCall, mask: SparseMask, batch: int, most: bool = False) -> _Row | None:
        """Nothing attended to yet; None where no row is a token."""
        g, (tile_q, tile_k) = call.geometry, (mask.tile_q, mask.tile_k)
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        position, first, last = (int(x[batch]) for x in g.token_range())
        if first >= last:
            return None
        begin = 0 if g.starts is None else int(g.starts[batch])
        start, end, columns = first // tile_q, (last - 1) // tile_q + 1, -(-last // tile_k)
        skipped, rows = start - position // tile_q, slice(first - position, last - position)
        k, v = (_padded(x[batch, :, begin : begin + last].to(dtype), 0, columns * tile_k) for x in (call.k, call.v))
        q = _padded(call.q[batch, :, rows].to(dtype), first - start * tile_q, (end - start) * tile_q)
        q = q.reshape(-1, tile_q, q.shape[-1])
        return cls(
            call,
            mask,
            batch,
            rows,
            position,
            mask.tile_map()[batch, :, skipped : skipped + end - start, :columns],
            call.q.shape[1] // k.shape[0],
            most,
            q,
            k.flatten(0, 1).contiguous(),
            v.flatten(0, 1).contiguous(),
            q.new_zeros(*q.shape[:2], v.shape[-1]),
            *(q.new_full(q.shape[:2], -torch.inf) for _ in range(2)),
        )

    @property
    def fused(self) -> bool:
        """True if PyTorch's fused kernel gives all that is wanted."""
        return self.call.softcap is None and not self.wants_most and self.v.shape[-1] == self.q.shape[-1]

    @property
    def start(self) -> int:
        """The first query tile on the row's grid."""
        return int(self.position + self.rows.start) // self.mask.tile_q

    @property
    def skipped(self) -> int:
        """The call's query tiles before the first one."""
        return self.start - self.position // self.mask.tile_q

    @property
    def before(self) -> int:
        """Rows of the first query tile that come before the tokens."""
        return int(self.position + self.rows.start) % self.mask.tile_q

    def tile_starts(self) -> Tensor:
        """int64 [R]: position of the first row of each query tile."""
        return (self.start + torch.arange(self.tiles.shape[1], device=HOST)) * self.mask.tile_q

    def tiled(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Query tiles ``[Hq * R, Tq, *]`` of rows ``[Hq, n, *]``; `value` where a tile reaches beyond the rows."""
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

    def seen_of(self, apart: Tensor, width: int, rows: int, there: Tensor | None) -> Tensor:
        """bool ``[n, rows, w * width]``: which keys of w blocks ``[n, w]`` each row sees; of those that are there."""
        keys = (apart[..., None] - torch.arange(width, device=HOST)).flatten(1)[:, None]
        seen = self.seen(keys + torch.arange(rows, device=HOST)[:, None])
        return seen if there is None else seen & there.repeat_interleave(width, 1)[:, None]

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
        reach = torch.arange(columns, device=HOST) * self.mask.tile_k < self.tile_starts()[:, None] + tile_q
        dense, least = (self.tiles | ~reach).all(-1), RUN
        edges = functional.pad(dense, (1, 1)).to(torch.int8).diff(dim=-1)
        begins, ends = ((edges == sign).nonzero().tolist() for sign in (1, -1))
        runs = [(slice(head, head + 1), begin, end) for (head, begin), (_, end) in zip(begins, ends, strict=True)]
        if bool(dense.all()):  # all heads at once, however short: dense attention to the bit
            runs, least = [(slice(0, heads), 0, rows)], 0
        first, behind = self.position + self.rows.start, self.position + self.rows.stop
        q, out, lse = (x.view(heads, -1, x.shape[-1]) for x in (self.q, self.out, self.lse[..., None]))
        left, scale = self.tiles.clone() if runs else self.tiles, self.call.softmax_scale
        for some, begin, end in runs:
            n, last = max((self.start + begin) * tile_q, first), min((self.start + end) * tile_q, behind)
            if (last - n) * last < least:
                continue
            at = slice(n - self.start * tile_q, last - self.start * tile_q)
            kv_heads = slice(some.start // self.share, -(-some.stop // self.share))
            k, v = (x.view(heads // self.share, -1, x.shape[-1])[None, kv_heads] for x in (self.k, self.v))
            found, more = _fused(q[None, some, at], k[:, :, n:last], v[:, :, n:last], scale, causal=True)
            if n:
                found, more = _merge(found, more, *_fused(q[None, some, at], k[:, :, :n], v[:, :, :n], scale))
            out[some, at], lse[some, at] = found[0], more[0, ..., None]
            left[some, begin:end] = False
        return left

    def entries(self, item: Tensor, position: Tensor, width: int, run: int = 1) -> _Entries:
        """Blocks of `width` keys for query tiles. item, position: number of each one's query tile, and first key."""
        _, rows, columns = self.tiles.shape
        index = (item // rows // self.share * (columns * self.mask.tile_k) + position) // width
        return _Entries(item, index, self.tile_starts()[item % rows] - position, width, run)

    def tile_entries(self, tiles: Tensor) -> _Entries:
        """Tiles, bool ``[Hq, R, C]``, of each query tile."""
        head, tile, column = tiles.nonzero(as_tuple=True)
        return self.entries(head * tiles.shape[1] + tile, column * self.mask.tile_k, self.mask.tile_k)

    def stripe_entries(self) -> Iterator[_Entries]:
        """Stripes that no tile holds, some heads at a time; query tiles that share a list go together."""
        stripes, width, (heads, rows, _) = self.mask.stripes, self.mask.stripe_width, self.tiles.shape
        if stripes is None:
            return
        counts, offsets = self._stripe_lists(stripes)
        step = max(1, COLUMNS // max(1, int(counts.sum(1).max())))
        for first in range(0, heads, step):
            count, offset = counts[first : first + step], offsets[first : first + step]
            for run, some in self._runs(count, offset):
                many = count.flatten()[some]
                which = torch.arange(some.numel(), device=HOST).repeat_interleave(many)
                at = torch.arange(which.numel(), device=HOST) + (offset.flatten()[some] - many.cumsum(0) + many)[which]
                item, position = (first * rows + some)[which], stripes.indices[at].to(torch.int64) * width
                keep = self._beside(item, position)
                if not bool(keep.all()):
                    item, position = item[keep], position[keep]
                yield self.entries(item, position, width, run)

    def _stripe_lists(self, stripes: IndexLists) -> tuple[Tensor, Tensor]:
        """int64 ``[Hq, R]`` each: how many stripes a query tile has, and where its list begins."""
        tile = self.start + torch.arange(self.tiles.shape[1], device=HOST)
        group = tile // self.mask.group - self.position // (self.mask.tile_q * self.mask.group)
        return stripes.counts[self.batch][:, group].to(torch.int64), stripes.offsets[self.batch][:, group]

    def _beside(self, item: Tensor, position: Tensor) -> Tensor:
        """bool: which stripes lie among the keys, and in no tile of their query tile."""
        columns, tile_k = self.tiles.shape[2], self.mask.tile_k
        keep = (position >= 0) & (position < columns * tile_k)
        if self.mask.disjoint:
            return keep
        column = (position // tile_k).clamp(0, columns - 1)
        return keep & ~self.tiles.flatten(0, 1)[item, column]

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
        lists = torch.stack([functional.pad(x, edges) for x in (counts, offsets)]).unflatten(2, (-1, run))
        alike = (lists == lists[..., :1]).all(-1).all(0)  # [h, runs of the grid]; of 0 beyond the rows
        head, number = (alike & lists[0, ..., 0].bool()).nonzero(as_tuple=True)
        yield run, head * rows + number * run - ahead
        alone = ~alike.repeat_interleave(run, 1)[:, ahead : ahead + rows] & counts.bool()
        yield 1, alone.flatten().nonzero()[:, 0]

    def in_order(self, head: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """A head's tiles, then its stripes, as `steps` takes them, in the order of `SkipSoftmax`."""
        mask, tiles, (_, rows, columns) = self.mask, self.tiles[head], self.tiles.shape
        column = torch.arange(columns, device=HOST)
        beyond = (column + 1) * mask.tile_k - 1 > self.tile_starts()[:, None]
        place = torch.where(beyond, columns - column, 2 * columns - column)  # those behind the first row lead
        first = (tiles.cumsum(1) == 1) & tiles & ~beyond
        place = torch.where(first, columns, place).masked_fill_(~tiles, torch.iinfo(place.dtype).max)
        counts = tiles.sum(1, keepdim=True)
        order = place.argsort(1)[:, : int(counts.max())]
        yield order * mask.tile_k, torch.arange(order.shape[1], device=HOST) < counts, mask.tile_k
        if mask.stripes is not None:
            count, offset = (x[None, None, head] for x in self._stripe_lists(mask.stripes))
            lists = IndexLists(count.to(torch.int32), offset, mask.stripes.indices)
            there, index = (x[0, 0] for x in lists.padded(int(count.max())))
            there &= self._beside((head * rows + torch.arange(rows, device=HOST))[:, None], index * mask.stripe_width)
            yield torch.where(there, index * mask.stripe_width, 0), there, mask.stripe_width

    def steps(
        self, head: int, position: Tensor, there: Tensor, width: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """A head's key blocks one after the other, as many keys at a time as a tile has.

        position: int64 ``[R, m]``, of each query tile's blocks the first key. there: bool like it, which of them count.
        Returns query tiles ``[n]``, numbers of their blocks ``[n, w]`` as `gather` takes them, and bool ``[n, Tq, w *
        width]``, which keys each row sees; None where all rows are tokens and see all.
        """
        rows, tile_q, per = self.tiles.shape[1], self.mask.tile_q, self.mask.tile_k // width
        items = head * rows + torch.arange(rows, device=HOST)
        real = self.real()[items]
        entries = self.entries(items[:, None], position, width)
        whole = self.full(entries.apart, width, tile_q) & there & real.all(1)[:, None]
        for first in range(0, position.shape[1], per):
            here = slice(first, first + per)
            asked, clear = there[:, here].any(1), whole[:, here].all(1)
            for chosen in (asked & clear, asked & ~clear):
                some = chosen.nonzero().flatten()
                for cut in _cut(some.numel(), self.mask.tile_k * self.k.shape[-1] * self.k.element_size()):
                    at, seen = some[cut], None
                    if not bool(clear[at[0]]):
                        seen = self.seen_of(entries.apart[at, here], width, tile_q, there[at, here])
                        seen &= real[at][..., None]
                    yield items[at], entries.index[at, here], seen

    def real(self) -> Tensor:
        """bool ``[Hq * R, Tq]``: rows that are tokens."""
        shape = self.tiles.shape[0], self.rows.stop - self.rows.start
        return self.tiled(torch.ones(shape, dtype=torch.bool, device=HOST), False)

    def mass(self, lse: Tensor, heads: Tensor) -> Tensor:
        """float32 ``[Hq, R, C]``: the share of its rows' softmax that each of the tiles of some heads has.

        lse: ``[Hq, n]`` of the rows. heads: bool ``[Hq]``.
        """
        base, real = self.tiled(base_of(lse)), self.real().sum(-1)
        found = torch.zeros(self.tiles.shape, dtype=torch.float32, device=HOST)
        for head in heads.nonzero().flatten().tolist():
            position, there, width = next(self.in_order(head))
            for items, index, seen in self.steps(head, position, there, width):
                p = _logits(self.q.index_select(0, items), self.gather("k", index, width), self, seen)
                p.sub_(base.index_select(0, items)[..., None]).exp_()
                column = index[:, 0] % found.shape[2]
                found.flatten(0, 1)[items, column] = (p.sum(1).sum(-1) / real[items]).float()
        return found

    def add(self, entries: _Entries) -> None:
        """Attend to key blocks of query tiles, in pieces whose keys are gathered at once: of what all rows of a query
        tile see, then of the rest."""
        width, rows = entries.width, entries.run * self.mask.tile_q
        held = 0 if self.fused else rows  # logits beside each key
        size = width * max(self.k.shape[-1], held) * self.k.element_size()
        full, near = self.full(entries.apart, width, rows), self.near(entries.apart, width, rows)
        square = width == rows == self.mask.tile_k and self.mask.geometry.window is None
        if square:
            short = near & self._short(entries, near)
            place = short.nonzero()[:, 0].flip(0)  # the diagonal tile is then the first of its list
            for items, at, _ in entries.lists(place, size):  # of one length: see `JOINED`
                below = torch.ones(rows, at.shape[1] * width, dtype=torch.bool, device=HOST)
                below[:, :width].tril_()
                self._add(entries, items, at, below)
            full, near = full & ~short, near & ~short
        for items, at, real in entries.lists(full.nonzero()[:, 0], size):
            self._add(entries, items, at, None if real is None else real.repeat_interleave(width, 1)[:, None])
        edge = near & ~full
        if width == self.mask.tile_k:  # of one distance from the diagonal at a time, which are seen alike
            for apart in torch.unique(entries.apart[edge]).tolist():
                place = (edge & (entries.apart == apart)).nonzero()[:, 0]
                seen = self.seen(apart + torch.arange(rows, device=HOST)[:, None] - torch.arange(width, device=HOST))
                for cut in _cut(place.numel(), size):
                    at = place[cut]
                    self._add(entries, entries.item[at], at[:, None], seen, causal=square and apart == 0)
            return
        for items, at, real in entries.lists(edge.nonzero()[:, 0], size):
            self._add(entries, items, at, self.seen_of(entries.apart[at], width, rows, real))

    def _short(self, entries: _Entries, near: Tensor) -> Tensor:
        """bool: blocks of query tiles that have their diagonal tile and a few others, of square tiles."""
        item, number = entries.item, self.q.shape[0]
        count, own = (torch.bincount(item[some], minlength=number) for some in (near, entries.apart == 0))
        return ((own > 0) & (count > 1) & (count <= JOINED))[item]

    def _add(self, entries: _Entries, items: Tensor, at: Tensor, seen: Tensor | None, *, causal: bool = False) -> None:
        """Attend to as many key blocks of each of some query tiles ``[n]``: the entries ``at``, ``[n, w]``.

        seen: bool that broadcasts to ``[n, rows, keys]``, None where all is seen. causal: it says no more than that row
        i sees keys 0 to i.
        """
        k, v = (self.gather(name, entries.index[at], entries.width) for name in ("k", "v"))
        if entries.run > 1:
            items = (items[:, None] + torch.arange(entries.run, device=HOST)).flatten()
        q = self.q.index_select(0, items).view(k.shape[0], -1, self.q.shape[-1])
        if self.fused:
            found = _fused(q[:, None], k[:, None], v[:, None], self.call.softmax_scale, seen=seen, causal=causal)
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

    def lists(self, place: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """The blocks at some places ``[m]`` by query tile, those with about as many together: see `_batches`.

        Query tiles ``[n]``, where their blocks are ``[n, w]``, and which of these are real.
        """
        items, counts = torch.unique_consecutive(self.item[place], return_counts=True)
        for chosen, at, real in _batches(counts, size):
            yield items[chosen], place[at], real


def _vote(
    row: _Row, state: SoftmaxState, bound: float, items: Tensor, index: Tensor, width: int, seen: Tensor | None
) -> int:
    """One step of `_Row.steps` with skip-softmax: query tiles of which a row wants it go on; the pairs left out.

    state: of query tiles, m and l ``[Hq * R, Tq]``, acc ``[Hq * R, Tq, Dv]``. bound: the threshold's logarithm.
    """
    logits = _logits(row.q.index_select(0, items), row.gather("k", index, width), row, seen)
    most, m = logits.amax(-1), state.m.index_select(0, items)
    wanted = ~(most < m + bound)
    if seen is not None:
        wanted &= row.real()[items]
    wanted = wanted.any(1)
    lost = ~wanted
    gone = int(lost.sum()) * logits[0].numel() if seen is None else int(seen[lost].sum())
    if bool(lost.any()):
        items, logits, most, m, index = (x[wanted] for x in (items, logits, most, m, index))
    if items.numel() == 0:
        return gone
    highest = torch.maximum(m, most)
    base = base_of(highest)
    p, alpha = logits.sub_(base[..., None]).exp_(), (m - base).exp_()
    state.m.index_copy_(0, items, highest)
    state.l.index_copy_(0, items, state.l.index_select(0, items) * alpha + p.sum(-1))
    acc = torch.baddbmm(state.acc.index_select(0, items) * alpha[..., None], p, row.gather("v", index, width))
    state.acc.index_copy_(0, items, acc)
    return gone


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
        slot = torch.arange(width, device=HOST)
        where = offsets[items, None] + slot
        real = None if sizes[stop - 1] == width else slot < counts[items, None]
        yield items, where if real is None else where.clamp_(max=total - 1), real
        begin = stop


def _cut(count: int, size: int) -> Iterator[slice]:
    """Runs of items, each of so many bytes."""
    step = max(1, GATHERED // size)
    return (slice(first, first + step) for first in range(0, count, step))


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, seen: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, N, D]`` and LSE ``[B, H, N]`` by PyTorch's fused kernel.

    seen: bool ``[N, m]``, or ``[B, N, m]`` or what broadcasts to it; needless where `causal` says the same.
    """
    bias = None
    if seen is not None and not causal:
        bias = _bias(seen, q.dtype).reshape(-1, 1, *seen.shape[-2:])
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = run(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    return out, lse


def _logits(q: Tensor, k: Tensor, row: _Row, seen: Tensor | None) -> Tensor:
    """``[n, Tq, w]`` of queries ``[n, Tq, D]`` and keys ``[n, w, D]``; -inf where a key is not seen."""
    logits = torch.bmm(q * row.call.softmax_scale, k.transpose(1, 2))
    if (cap := row.call.softcap) is not None:
        logits.div_(cap).tanh_().mul_(cap)
    return logits if seen is None else logits.add_(_bias(seen, q.dtype))


def _bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Addend of the logits: -inf where a key is not seen. One mask for many is added far faster than filled in."""
    return torch.where(seen, 0.0, -torch.inf).to(dtype)


def _plain(logits: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[n, Tq, Dv]``, LSE and largest logit ``[n, Tq]`` of logits, which are overwritten, over values."""
    most = logits.amax(-1)
    logits.sub_(torch.where(most.isneginf(), 0.0, most)[..., None]).exp_()
    total = logits.sum(-1)
    out = torch.bmm(logits, v).div_(torch.where(total == 0, 1.0, total)[..., None])
    return out, most + total.log(), most


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
