"""ReferenceExecutor: sparse attention in plain PyTorch. The truth for every test."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.mask.mask import SparseMask
from sparseprefill.plan import Kernel, Plan, Result, Skipped, SoftmaxState, base_of, check_plan

KERNELS = (Kernel("reference"),)


@frozen
class ReferenceExecutor:
    """One query tile of one head at a time: gathers the selected keys, exact softmax in float32.

    Where a plan skips (`Plan.skip_below`), a query tile goes through its key tiles one by one and votes as a whole.

    Runs on any device, dtype and head dimension, with every feature of AttentionCall. Memory is bounded by one query
    tile's logits; time is proportional to the pairs selected. float64 calls are computed in float64.
    """

    @uncast
    def accumulate(self, call: AttentionCall, plan: Plan) -> SoftmaxState:
        """The carry, if any, merged with attention over the plan's mask; unnormalised."""
        return _attend(call, plan)[0]

    def unsupported(self, call: AttentionCall) -> str | None:
        """Nothing: None for every call."""
        return None

    def workspace(self, call: AttentionCall) -> int:
        """The state in full precision, a few times over; logits are those of one query tile of one head."""
        rows, width = call.q.numel() // call.q.shape[-1], call.value_dim + 2
        return rows * width * 4 * max(4, call.q.element_size())

    @uncast
    def execute(self, call: AttentionCall, plan: Plan) -> Result:
        """Output, LSE, and the tile mass of probed heads."""
        state, skipped = _attend(call, plan)
        out, lse = state.finish(call.sinks)
        probe = None if plan.probe is None else _tile_mass(call, plan, lse)
        return Result(out.to(call.q.dtype), lse, plan, probe, kernels=KERNELS, skipped=skipped)

    def execute_into(self, call: AttentionCall, plan: Plan, out: Tensor, lse: Tensor) -> Result:
        """Run `execute`, and copy output and LSE into tensors of the caller."""
        return self.execute(call, plan).into(out, lse)


REFERENCE = ReferenceExecutor()


def _attend(call: AttentionCall, plan: Plan) -> tuple[SoftmaxState, Skipped | None]:
    """The carry, if any, resumed over the plan's mask, and what was left out, if anything may be."""
    check_plan(call, plan)
    if plan.skip_below is not None:
        return _skipping(call, plan, plan.skip_below)
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    shape = (call.q.shape[0], call.q.shape[1], call.q.shape[2])
    state = SoftmaxState.empty(shape, call.value_dim, dtype, call.q.device)
    for (b, h, rows), keys, logits, keep in _tiles(call, plan, dtype):
        m = logits.amax(-1)
        p = torch.exp(logits - base_of(m)[:, None])
        state.m[b, h, rows], state.l[b, h, rows] = m, p.sum(-1)
        state.acc[b, h, rows] = weigh(p, call.v[b, h // call.group][keys].to(dtype), keep)
    return state if plan.carry is None else plan.carry.state.merge(state), None


def _tiles(
    call: AttentionCall, plan: Plan, dtype: torch.dtype, heads: Tensor | None = None
) -> Iterator[tuple[tuple[int, int, slice], Tensor | slice, Tensor, Tensor]]:
    """Every non-empty (batch row, head, query rows), its keys, its logits (-inf where not allowed) and who may see."""
    selection = _TileKeys(plan.mask)
    for b in range(call.q.shape[0]):
        for h in range(call.q.shape[1]):
            if heads is not None and not bool(heads[b, h]):
                continue
            k = call.k[b, h // call.group]
            for row in range(selection.rows):
                picked = selection.pick(b, h, row)
                if picked is None:
                    continue
                rows, keys, keep = picked
                yield (b, h, rows), keys, _logits(call, call.q[b, h, rows].to(dtype), k[keys].to(dtype), keep), keep


def _logits(call: AttentionCall, q: Tensor, k: Tensor, keep: Tensor) -> Tensor:
    """Logits ``[n, w]`` of rows q ``[n, D]`` and keys k ``[w, D]``, -inf where not allowed."""
    logits = q @ k.T * call.softmax_scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    return logits.masked_fill_(~keep, -torch.inf)


def _skipping(call: AttentionCall, plan: Plan, below: Tensor) -> tuple[SoftmaxState, Skipped]:
    """The carry, if any, resumed tile by tile over the plan's mask, and what was left out: see `SkipSoftmax`."""
    state, (batch, heads) = plan.begun(call), call.q.shape[:2]
    pairs = torch.zeros(batch, heads, dtype=torch.int64, device=call.q.device)
    selection = _TileKeys(plan.mask)
    bounds = below.to(state.m.dtype).log().tolist()
    for b in range(batch):
        for h in range(heads):
            for row in range(selection.rows):
                steps = selection.steps(b, h, row)
                if steps is not None:
                    pairs[b, h] += _vote(call, state, (b, h), steps, bounds[b])
    return state, Skipped(pairs, plan.mask.tile_q, plan.mask.tile_q, plan.mask.tile_k)


def _vote(
    call: AttentionCall, state: SoftmaxState, at: tuple[int, int], tile: tuple[slice, int, list[Tensor]], bound: float
) -> int:
    """Online softmax of one query tile over its steps, into the state; the pairs left out."""
    (b, h), (rows, start, steps), gone = at, tile, 0
    k, v, dtype = call.k[b, h // call.group], call.v[b, h // call.group], state.m.dtype
    q, query = call.q[b, h, rows].to(dtype), call.geometry.query_positions()[b, rows]
    # Copies, in new tensors at each step: of what gradients are recorded, nothing may be overwritten.
    m, l, acc = (x[b, h, rows].clone() for x in (state.m, state.l, state.acc))  # noqa: E741
    for position in steps:
        keep = query[:, None] >= position
        if call.geometry.window is not None:
            keep &= query[:, None] - position < call.geometry.window
        logits = _logits(call, q, k[position + start].to(dtype), keep)
        most = torch.where(logits.isnan(), -torch.inf, logits).amax(-1)
        if bool((most < m + bound).all()):
            gone += int(keep.sum())
            continue
        highest = torch.maximum(m, most)
        base = base_of(highest)
        p, alpha = torch.exp(logits - base[:, None]), torch.exp(m - base)
        l = l * alpha + p.sum(-1)  # noqa: E741
        acc = acc * alpha[:, None] + weigh(p, v[position + start].to(dtype), keep)
        m = highest
    state.m[b, h, rows], state.l[b, h, rows], state.acc[b, h, rows] = m, l, acc
    return gone


def weigh(p: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """``p @ v`` in which a NaN or infinity of `v` reaches only the rows that may see its key."""
    finite = torch.isfinite(v)
    if bool(finite.all()):
        return p @ v
    out = p @ torch.where(finite, v, 0.0)
    for j in torch.nonzero(~finite.all(-1))[:, 0].tolist():
        nonfinite = keep[:, j, None] & ~finite[j]
        out = torch.where(nonfinite, out + p[:, j, None] * v[j], out)
    return out


def _tile_mass(call: AttentionCall, plan: Plan, lse: Tensor) -> Tensor:
    """float32 [B, Hq, R, C]: see `Result.probe`."""
    mask = plan.mask
    selected = mask.tile_map()
    mass = torch.zeros(selected.shape, dtype=torch.float32, device=call.q.device)
    first = mask.geometry.first_tile(mask.tile_q).tolist()
    query, position = mask.geometry.query_positions(), mask.geometry.key_positions()
    for (b, h, rows), keys, logits, _ in _tiles(call, plan, lse.dtype, plan.probe):
        row = int(query[b, rows.start]) // mask.tile_q - first[b]
        column = position[b][keys] // mask.tile_k
        p = torch.exp(logits - base_of(lse[b, h, rows, None])).mean(0)
        mass[b, h, row].index_add_(0, column, p.to(torch.float32))
    return mass * selected


class _TileKeys:
    """Keys that each query tile needs: lists turned into tensor indices."""

    def __init__(self, mask: SparseMask) -> None:
        geometry = mask.geometry
        self.mask = mask
        self.rows = geometry.tile_rows(mask.tile_q)
        self._tiles, self._stripes = mask.tiles, mask.stripes
        self._first_position = geometry.first_position().tolist()
        self._first_tile = geometry.first_tile(mask.tile_q).tolist()
        self._first_group = geometry.first_tile(mask.group_rows).tolist()
        self._length = geometry.key_counts().tolist()
        starts = geometry.starts
        self._start = [0] * geometry.batch if starts is None else starts.tolist()

    def _real(self, batch: int, tile: int) -> tuple[int, int]:
        """Positions of a query tile's first real row, and behind its last."""
        first, size = self._first_position[batch], self.mask.tile_q
        behind = min((tile + 1) * size, first + self.mask.geometry.q_len, self._length[batch])
        return max(tile * size, first, 0), behind

    def steps(self, batch: int, head: int, row: int) -> tuple[slice, int, list[Tensor]] | None:
        """Query rows of one query tile, where the row's keys begin, and key positions (int64) step by step.

        In the order of `SkipSoftmax`, a step being a tile, or as many stripes; None where no row is real.
        """
        mask, tile, first = self.mask, self._first_tile[batch] + row, self._first_position[batch]
        low, high = self._real(batch, tile)
        if low >= high:
            return None
        size, tiles, stripes = mask.tile_k, list[int](), list[Tensor]()
        if self._tiles is not None:
            tiles = self._tiles.row(batch, head, row).tolist()
        beyond = [j for j in tiles if (j + 1) * size - 1 > tile * mask.tile_q]
        before = tiles[: len(tiles) - len(beyond)]
        if self._stripes is not None:
            group = tile // mask.group - self._first_group[batch]
            columns = _keys(self._stripes.row(batch, head, group), mask.stripe_width)
            listed = torch.tensor(tiles, dtype=columns.dtype, device=columns.device)
            inside = torch.isin(columns // size, listed)
            chunks = zip(columns[columns < high].split(size), inside[columns < high].split(size), strict=True)
            stripes = [column[~taken] for column, taken in chunks]
        order = [*reversed(beyond), *before[:1], *reversed(before[1:])]
        device, order = mask.geometry.device, [j for j in order if j * size < high]
        own = [torch.arange(j * size, min((j + 1) * size, high), device=device) for j in order]
        return slice(low - first, high - first), self._start[batch], [one for one in own + stripes if one.numel()]

    def pick(self, batch: int, head: int, row: int) -> tuple[slice, Tensor | slice, Tensor] | None:
        """Query rows, key indices and who may see whom (bool [rows, keys]) of one query tile; None if empty."""
        mask, geometry = self.mask, self.mask.geometry
        tile = self._first_tile[batch] + row
        first = self._first_position[batch]
        low, high = self._real(batch, tile)
        if low >= high:
            return None
        positions = self._positions(batch, head, row, tile // mask.group - self._first_group[batch])
        positions = positions[positions < high]
        if positions.numel() == 0:
            return None
        query = torch.arange(low, high, device=geometry.device)[:, None]
        keep = query >= positions
        if geometry.window is not None:
            keep &= query - positions < geometry.window
        begin, end = int(positions[0]), int(positions[-1]) + 1
        start = self._start[batch]
        run = end - begin == positions.numel()
        keys: Tensor | slice = slice(begin + start, end + start) if run else positions + start
        return slice(low - first, high - first), keys, keep

    def _positions(self, batch: int, head: int, row: int, group: int) -> Tensor:
        """int64, ascending and distinct: key positions that the lists name."""
        parts = [torch.zeros(0, dtype=torch.int64, device=self.mask.geometry.device)]
        if self._tiles is not None:
            parts.append(_keys(self._tiles.row(batch, head, row), self.mask.tile_k))
        if self._stripes is not None:
            parts.append(_keys(self._stripes.row(batch, head, group), self.mask.stripe_width))
        union: Tensor = torch.unique(torch.cat(parts))
        return union


def _keys(blocks: Tensor, width: int) -> Tensor:
    """int64: positions of the keys in blocks of `width` tokens."""
    first = blocks[:, None].to(torch.int64) * width
    return (first + torch.arange(width, device=first.device)).flatten()
