"""Exact attention of a few sampled query rows, summed by key column and by diagonal; streamed over keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill import kernels
from sparseprefill.call import AttentionCall, uncast
from sparseprefill.mask.geometry import Geometry, kept_by_sizes

PAIRS, PAIRS_ON_CPU = 1 << 24, 1 << 19
"""(row, key) pairs over batch and heads at once, 4 bytes each, a few times over; on a CPU what its cache can hold."""


@frozen(eq=False)
class SampledMass:
    """Attention mass of the sampled rows, summed over them; float32 (float64 for float64 calls).

    columns: ``[B, Hq, ceil(Nkv / column)]`` by key position on the row's grid. slashes: ``[B, Hq, ceil(Nkv / slash)]``
    by ``(row position - key position) // slash``. lse: ``[B, Hq, n]`` of each sampled row over all keys it may see,
    natural log, -inf where there is no such row. With several samples S comes before the last dimension of each.
    """

    columns: Tensor
    slashes: Tensor
    lse: Tensor


def last_rows(call: AttentionCall, count: int) -> tuple[Tensor, Tensor]:
    """The last `count` real query rows of each batch row: int64 index ``[B, n]`` and bool ``[B, n]``, which exist.

    Not to be written to: without padding the same tensors serve every layer.
    """
    return _last(call.geometry, count)


@kept_by_sizes(lengths=True)
def _last(geometry: Geometry, count: int) -> tuple[Tensor, Tensor]:
    behind = (geometry.key_counts() - geometry.first_position()).clamp(0, geometry.q_len)
    count = min(count, geometry.q_len)
    index = behind[:, None] - count + torch.arange(count, device=geometry.device)
    safe = index.clamp(min=0)
    return safe, (index >= 0) & torch.gather(geometry.real_queries(), 1, safe)


def seen_blocks(geometry: Geometry, rows: Tensor, real: Tensor, block: int) -> Tensor:
    """bool ``[B, C]``: blocks with a key that one of the call's last rows may see. rows, real: see `last_rows`."""
    column = torch.arange(geometry.tile_columns(block), device=geometry.device)
    if geometry.starts is None and geometry.lengths is None:
        end = geometry.q_offset + geometry.q_len
        seen = column < -(-end // block)
        if geometry.window is not None:
            seen = seen & (column >= max(end - rows.shape[1] - geometry.window + 1, 0) // block)
        return seen.expand(geometry.batch, -1)
    query = torch.gather(geometry.query_positions(), 1, rows)
    last = torch.where(real, query, -1).amax(1)
    first = torch.zeros_like(last)
    if geometry.window is not None:
        near = torch.where(real, query, geometry.kv_len).amin(1)
        first = (near - geometry.window + 1).clamp(min=0)
    low, high = ((x // block)[:, None] for x in (first, last))
    return (column >= low) & (column <= high)


def spread_rows(call: AttentionCall, count: int) -> tuple[Tensor, Tensor]:
    """The last real query row of each of `count` stretches that are equally long: int64 ``[B, count]``, bool alike.

    Each batch row's own real rows are dealt, and the last of them is always among these; of fewer rows than stretches
    each is. Not to be written to, as of `last_rows`. Nothing is read on the host.
    """
    return _spread(call.geometry, count)


@kept_by_sizes(lengths=True)
def _spread(geometry: Geometry, count: int) -> tuple[Tensor, Tensor]:
    begin = (-geometry.first_position()).clamp(0, geometry.q_len)
    behind = (geometry.key_counts() - geometry.first_position()).clamp(0, geometry.q_len)
    total = (behind - begin).clamp(min=0)
    edges = torch.arange(count + 1, device=total.device) * total[:, None] // count
    rows = begin[:, None] + (edges[:, 1:] - 1).clamp(min=0)
    return rows.clamp(max=geometry.q_len - 1), edges[:, 1:] > edges[:, :-1]


def last_mass(call: AttentionCall, count: int) -> tuple[SampledMass, Tensor, Tensor]:
    """The mass of the last `count` real query rows of each batch row, in diagonal bins of `count`; their index, and
    which exist: see `sampled_mass` and `last_rows`.
    """
    rows, real = last_rows(call, count)
    return sampled_mass(call, rows, real, count), rows, real


@uncast
@torch.no_grad()
def sampled_mass(
    call: AttentionCall,
    rows: Tensor,
    real: Tensor,
    slash: int,
    chunk: int | None = None,
    *,
    column: int = 1,
    until: int | Sequence[int] | None = None,
) -> SampledMass:
    """Softmax rows of the queries `rows` (index ``[B, n]``, where `real`) over all keys they may see.

    rows: neighbours in ascending order, as `last_rows` gives them; before the first real one any index may stand.
    ``[B, S, n]`` for several samples apart. slash, column: tokens per diagonal bin and per column bin. until: no
    sampled row sees a key from this index on, a promise that spares work; or one for each sample. Two passes over the
    keys, `chunk` at a time where PyTorch makes them: no matrix of rows and all keys is made.
    """
    if kernels.serve_rows(call.q):
        from sparseprefill.kernels.sampled.mass import sampled_mass as by_kernels

        if rows.dim() == 3:
            return SampledMass(*by_kernels(call, rows, real, slash, column))
        found = by_kernels(call, rows[:, None], real[:, None], slash, column)
        return SampledMass(*(x[:, :, 0] for x in found))
    if rows.dim() == 2:
        end = until if until is None or isinstance(until, int) else until[0]
        return _one_sample(call, rows, real, slash, chunk, column, end)
    ends = [until] * rows.shape[1] if until is None or isinstance(until, int) else until
    each = [_one_sample(call, rows[:, i], real[:, i], slash, chunk, column, end) for i, end in enumerate(ends)]
    return SampledMass(*(torch.stack([getattr(x, name) for x in each], 2) for name in ("columns", "slashes", "lse")))


def _one_sample(
    call: AttentionCall, rows: Tensor, real: Tensor, slash: int, chunk: int | None, column: int, until: int | None
) -> SampledMass:
    geometry, count = call.geometry, rows.shape[1]
    if chunk is None:
        pairs = PAIRS_ON_CPU if call.q.device.type == "cpu" else PAIRS
        chunk = max(256, pairs // (geometry.batch * geometry.heads * count))
    behind = geometry.kv_len if until is None else min(until, geometry.kv_len)
    chunks = [slice(first, min(first + chunk, behind)) for first in range(0, behind, chunk)]
    logits = Logits(call, rows, real)
    lse = logits.lse(chunks)
    base = torch.where(lse.isneginf(), 0.0, lse)[..., None]
    by_key = lse.new_zeros(geometry.batch, geometry.heads, geometry.kv_len)
    by_lag = lse.new_zeros(geometry.batch, geometry.heads, geometry.kv_len + count - 1)
    for keys in chunks:
        mass = logits.of(keys).sub_(base).exp_()
        by_key[..., keys] = mass.sum(2)
        by_lag[..., keys.start : keys.stop + count - 1] += _diagonals(mass)
    # Entry e of by_lag holds the pairs at distance `last - e`, last being the index among the keys of the last row.
    last = geometry.q_offset + rows[:, -1:]
    slashes = _binned(by_lag, last - torch.arange(-(-geometry.kv_len // slash) * slash, device=lse.device), slash)
    if column == 1 and geometry.starts is None:
        return SampledMass(by_key, slashes, lse)
    first = 0 if geometry.starts is None else geometry.starts[:, None]
    at = (torch.arange(-(-geometry.kv_len // column) * column, device=lse.device) + first).expand(geometry.batch, -1)
    return SampledMass(_binned(by_key, at, column), slashes, lse)


class Logits:
    """Logits of the sampled rows, -inf where a row may not look."""

    def __init__(self, call: AttentionCall, rows: Tensor, real: Tensor) -> None:
        self.call, self.real = call, real
        self.dtype = torch.promote_types(call.q.dtype, torch.float32)
        q = torch.take_along_dim(call.q, rows[:, None, :, None], 2).to(self.dtype)
        self.q = q.reshape(q.shape[0], -1, call.group * rows.shape[1], q.shape[-1]) * call.softmax_scale
        self.query = torch.gather(call.geometry.query_positions(), 1, rows)
        self.key = call.geometry.key_positions()
        self._open = self._seen_by_all()

    def _seen_by_all(self) -> int:
        """So many first keys are seen by every sampled row, as far as the host can tell without waiting: 0 on a GPU."""
        geometry = self.call.geometry
        if self.query.device.type != "cpu" or geometry.starts is not None or geometry.window is not None:
            return 0
        return int(self.query.min()) + 1 if self.query.numel() and bool(self.real.all()) else 0

    def of(self, keys: slice) -> Tensor:
        """Fresh ``[B, Hq, n, keys]``, of keys by their index."""
        found = self._all(self.call.k[:, :, keys])
        return found if keys.stop <= self._open else self._hide(found, self.key[:, keys])

    def lse(self, chunks: Iterable[slice]) -> Tensor:
        """``[B, Hq, n]``: LSE of each row over keys by their index, some at a time; -inf where it sees none."""
        lse = self.q.new_full((*self.call.q.shape[:2], self.real.shape[1]), -torch.inf)
        for keys in chunks:
            lse = torch.logaddexp(lse, torch.logsumexp(self.of(keys), -1))
        return lse

    def at(self, positions: slice) -> Tensor:
        """Scores of keys by their position on each batch row's grid; a position without a key has -inf."""
        call, geometry = self.call, self.call.geometry
        if geometry.starts is None and call.pages is None:
            behind = min(positions.stop, geometry.kv_len)
            return functional.pad(
                self.of(slice(positions.start, behind)), (0, positions.stop - behind), value=-torch.inf
            )
        position = torch.arange(positions.start, positions.stop, device=call.q.device).expand(geometry.batch, -1)
        index = position if geometry.starts is None else position + geometry.starts[:, None]
        key = torch.where(index < geometry.kv_len, position, -1)
        return self._hide(self._all(call.keys_at(index.clamp(max=geometry.kv_len - 1))), key)

    def _hide(self, s: Tensor, position: Tensor) -> Tensor:
        """-inf for keys at these positions where a row may not look."""
        geometry, key = self.call.geometry, position[:, None]
        distance = self.query[:, :, None] - key
        hidden = (distance < 0) | (key < 0) | ~self.real[:, :, None]
        if geometry.window is not None:
            hidden |= distance >= geometry.window
        return s.masked_fill_(hidden[:, None], -torch.inf)

    def _all(self, keys: Tensor) -> Tensor:
        call = self.call
        s = self.q @ keys.to(self.dtype).transpose(-1, -2)
        if call.softcap is not None:
            s = call.softcap * torch.tanh(s / call.softcap)
        return s.reshape(s.shape[0], call.geometry.heads, self.real.shape[1], -1)


def _diagonals(mass: Tensor) -> Tensor:
    """``[B, H, n, w]`` to ``[B, H, w + n - 1]``: entry ``key - row + n - 1`` sums one diagonal.

    Rows are laid out so that stepping by one row and one key is one stride: no scatter, and the same sum every time.
    """
    rows, keys = mass.shape[2:]
    width = keys + rows - 1
    padded = functional.pad(functional.pad(mass, (rows - 1, 0)).flatten(2), (0, rows - 1))
    skewed = padded.as_strided((*mass.shape[:2], rows, width), (*padded.stride()[:2], width + 1, 1))
    total: Tensor = skewed.sum(2)
    return total


def _binned(x: Tensor, at: Tensor, size: int) -> Tensor:
    """Sums ``[B, H, m // size]`` of the entries ``x[..., at]``, `size` at a time; at: int64 ``[B, m]``."""
    inside = (at >= 0) & (at < x.shape[2])
    picked = torch.where(inside[:, None], torch.take_along_dim(x, at.clamp(0, x.shape[2] - 1)[:, None], 2), 0.0)
    total: Tensor = picked.unflatten(2, (-1, size)).sum(3)
    return total
