"""IndexLists: ragged lists of tile or key indices, one per row, in memory that grows with the work selected."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill import kernels
from sparseprefill.errors import MaskError, printed
from sparseprefill.mask.geometry import Geometry, in_a_mode, kept_by_sizes, span
from sparseprefill.pages import odd_layout
from sparseprefill.validate import LARGEST


class Blocks(NamedTuple):
    """Lists of key blocks as a mask holds them.

    name: the mask's field. lists: ``[B, Hq, R]``, one for each `rows` query tokens. width: tokens of a key block.
    """

    name: str
    lists: IndexLists
    rows: int
    width: int


@frozen(eq=False)
class IndexLists:
    """One ascending list of distinct indices per (batch row, head, row of tiles or groups).

    counts: int32 ``[B, H, R]``. offsets: int64 ``[B, H, R]``, where each list begins in `indices`, int32 ``[L]``.
    Rows may share storage (a full mask needs one `arange`); entries behind a count are never read. On a GPU with
    Triton no constructor reads a value on the host, so building lists does not synchronise with the device.
    same_heads: the maker's word that all heads of a batch row have the same lists. whole: that no tile in reach is left
    out, on which speed alone depends. sound: that lists are ascending and distinct, as those that the constructors here
    make; others are looked at on a CPU when a mask of them is counted or computed.
    """

    counts: Tensor
    offsets: Tensor
    indices: Tensor
    same_heads: bool = field(default=False, kw_only=True)
    whole: bool = field(default=False, kw_only=True)
    sound: bool = field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        wanted = (("counts", torch.int32), ("offsets", torch.int64), ("indices", torch.int32))
        for name, dtype in wanted:
            x = getattr(self, name)
            if not isinstance(x, Tensor) or x.dtype != dtype:
                raise MaskError(f"IndexLists.{name} is {getattr(x, 'dtype', type(x).__name__)}: pass {dtype}")
            if x.is_nested or x.layout != torch.strided:
                raise MaskError(f"IndexLists.{name} is {odd_layout(x)}: pass a plain tensor of {dtype}")
        if self.counts.dim() != 3 or self.counts.shape != self.offsets.shape or self.indices.dim() != 1:
            shapes = tuple(tuple(getattr(self, name).shape) for name, _ in wanted)
            raise MaskError(f"IndexLists shapes are {shapes}: pass counts and offsets [B, H, R] and indices [L]")
        device = self.counts.device
        for name, x in (("offsets", self.offsets), ("indices", self.indices)):
            if x.device != device:
                raise MaskError(f"IndexLists.{name} is on {x.device}: move it to the device of counts, {device}")

    @property
    def nbytes(self) -> int:
        """Memory that keeping the lists would hold, in bytes: of whole storages, which rows and heads may share."""
        return sum([x.untyped_storage().nbytes() for x in (self.counts, self.offsets, self.indices)])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch rows, heads, lists of each."""
        batch, heads, rows = self.counts.shape
        return batch, heads, rows

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        """counts, offsets and indices, as kernels read them."""
        return self.counts.contiguous(), self.offsets.contiguous(), self.indices

    @classmethod
    def from_map(cls, keep: Tensor) -> IndexLists:
        """Make lists from a bool map ``[B, H, R, C]`` of any strides; one launch on a GPU, with room for more."""
        if kernels.serve(keep):
            from sparseprefill.kernels.lists.maps import encode_map

            return cls(*encode_map(keep), same_heads=keep.stride(1) == 0, sound=True)
        counts = keep.sum(-1, dtype=torch.int32)
        indices = keep.flatten(0, 2).nonzero()[:, 1].to(torch.int32)
        ends = counts.flatten().cumsum(0)
        offsets = (ends - counts.flatten()).view(counts.shape)
        indices = indices if indices.numel() else indices.new_zeros(1)
        return cls(counts, offsets, indices, sound=True)

    @classmethod
    def from_ranges(cls, first: Tensor, last: Tensor, heads: int, width: int) -> IndexLists:
        """Make lists from half-open ranges, the same for all heads.

        first, last: int64 ``[B, R, P]``, P ascending, non-overlapping ranges per row (empty where last <= first).
        width: an upper bound on the length of a list, known on the host.
        """
        _check_ranges(first, last, width)
        if kernels.serve(first):
            from sparseprefill.kernels.lists.maps import encode_ranges

            return cls(*encode_ranges(first, last, heads, width), same_heads=True, sound=True)
        sizes = (last - first).clamp(min=0)
        ends = sizes.cumsum(-1)
        slot = torch.arange(width, device=first.device)
        part = (slot[None, None, :, None] >= ends[:, :, None, :]).sum(-1).clamp(max=sizes.shape[-1] - 1)
        begin = torch.gather(first, -1, part) - torch.gather(ends - sizes, -1, part)
        batch, rows = first.shape[:2]
        counts = ends[..., -1].to(torch.int32)[:, None].expand(-1, heads, -1).contiguous()
        offsets = (torch.arange(batch * rows, device=first.device) * width).view(batch, 1, rows)
        indices = (begin + slot).to(torch.int32)
        offsets = offsets.expand(-1, heads, -1).contiguous()
        return cls(counts, offsets, indices.reshape(-1), same_heads=True, sound=True)

    @classmethod
    def full(cls, geometry: Geometry, tile_q: int, tile_k: int) -> IndexLists:
        """All tiles in reach, the same for all heads; every row's list is a run of one shared `arange`.

        Without padding all calls of the same sizes, such as a model's layers, share one answer: nobody may write to it.
        """
        return cls(*_every(geometry, tile_q, tile_k), same_heads=True, whole=True, sound=True)

    @classmethod
    def empty(cls, batch: int, heads: int, rows: int, device: torch.device) -> IndexLists:
        """Lists that select nothing."""
        zeros = torch.zeros(batch, heads, rows, dtype=torch.int32, device=device)
        return cls(zeros, zeros.to(torch.int64), zeros.new_zeros(1), sound=True)

    @classmethod
    def joined(cls, parts: Sequence[IndexLists], dim: int) -> IndexLists:
        """Lists side by side: of batch rows (`dim` 0), of heads (1) or of query tiles (2)."""
        ends = accumulate((part.indices.numel() for part in parts), initial=0)
        offsets = [part.offsets + end for part, end in zip(parts, ends, strict=False)]
        counts = [part.counts for part in parts]
        indices, sound = torch.cat([part.indices for part in parts]), all(part.sound for part in parts)
        return cls(torch.cat(counts, dim), torch.cat(offsets, dim), indices, sound=sound)

    def to_map(self, columns: int, ratio: int = 1) -> Tensor:
        """bool ``[B, H, R, columns]``. ratio: columns that an entry stands for, side by side."""
        if ratio > 1:
            return self.to_map(-(-columns // ratio)).repeat_interleave(ratio, dim=-1)[..., :columns]
        if kernels.serve(self.counts):
            from sparseprefill.kernels.lists.maps import decode

            return decode((self.counts, self.offsets, self.indices), columns)
        width = int(self.counts.max()) if self.counts.is_cpu and self.counts.numel() else columns
        entry, index = self.padded(min(width, columns))
        keep = torch.zeros(*self.counts.shape, columns + 1, dtype=torch.bool, device=self.counts.device)
        inside = entry & (index >= 0) & (index < columns)
        keep.scatter_(-1, torch.where(inside, index, columns), True)
        return keep[..., :columns]

    def own_map(self, columns: int) -> Tensor:
        """bool ``[B, h, R, columns]``: that of one head where all have the same lists."""
        return self.distinct.to_map(columns)

    def padded(self, width: int) -> tuple[Tensor, Tensor]:
        """The first `width` entries of each list: (bool is an entry, int64 index), both ``[B, H, R, width]``."""
        slot = torch.arange(width, device=self.counts.device)
        entry = slot < self.counts[..., None]
        where = (self.offsets[..., None] + slot).clamp(max=self.indices.numel() - 1)
        return entry, self.indices[where].to(torch.int64)

    def row(self, batch: int, head: int, row: int) -> Tensor:
        """int32 [count]: one list (reads its count on the host)."""
        offset, count = int(self.offsets[batch, head, row]), int(self.counts[batch, head, row])
        return self.indices[offset : offset + count]

    def disordered(self, bound: int) -> Tensor:
        """bool ``[B, H, R]``: lists that are not ascending and distinct, from 0 to less than `bound`.

        All of them must lie within the indices. Each index is looked at once, however many lists share it.
        """
        if self.indices.numel() == 0:
            return torch.zeros_like(self.counts, dtype=torch.bool)
        falls = functional.pad((self.indices[1:] <= self.indices[:-1]).cumsum(0), (1, 0))
        some = self.counts > 0
        first = torch.where(some, self.offsets, 0)
        last = torch.where(some, self.offsets + self.counts - 1, 0)
        outside = (self.indices[first] < 0) | (self.indices[last] >= bound)
        return some & ((falls[first] < falls[last]) | outside)

    def for_group(self, group: int) -> IndexLists:
        """Each head's lists for `group` neighbouring heads: ``[B, H * group, R]``, in the same storage."""
        counts, offsets = (x.repeat_interleave(group, dim=1) for x in (self.counts, self.offsets))
        return evolve(self, counts=counts, offsets=offsets)

    def filled(self, rows: Tensor, geometry: Geometry, tile_q: int, tile_k: int) -> IndexLists:
        """Lists of tiles with every tile in reach for some query tiles, bool ``[B, R]``; those share one `arange`."""
        first, seen, every = _reach(geometry, tile_q, tile_k)
        counts = torch.where(rows[:, None], seen, self.counts)
        offsets = torch.where(rows[:, None], first + self.indices.numel(), self.offsets)
        return evolve(self, counts=counts, offsets=offsets, indices=torch.cat([self.indices, every]))

    def split(self, ratio: int, columns: int) -> IndexLists:
        """Lists of key blocks that are `ratio` times narrower, of which the call has `columns`.

        Rows that share storage go on sharing it.
        """
        part = torch.arange(ratio, dtype=torch.int32, device=self.indices.device)
        last = self.indices[(self.offsets + self.counts - 1).clamp(min=0)]
        beyond = ((last + 1) * ratio - columns).clamp(min=0)  # of the call's last block, if that is not whole
        counts = self.counts * ratio - torch.where(self.counts > 0, beyond, 0)
        indices = (self.indices[:, None] * ratio + part).flatten()
        return evolve(self, counts=counts, offsets=self.offsets * ratio, indices=indices)

    def __getitem__(self, part: tuple[slice, ...]) -> IndexLists:
        """Some of the lists, by slices of batch rows, heads and rows; in the same storage."""
        return evolve(self, counts=self.counts[part], offsets=self.offsets[part])

    @property
    def distinct(self) -> IndexLists:
        """The lists of one head where all heads have the same, else all of them."""
        return self[:, :1] if self.same_heads else self

    def of_rows(self, index: Tensor | None, without: Tensor | None = None) -> IndexLists:
        """The lists of some rows, int64 ``[B, n]``, in the same storage: ``[B, H, n]``; None for all as they are.

        without: bool ``[B, n]``, which of them are to be empty.
        """
        counts, offsets = self.counts, self.offsets
        if index is not None:
            counts, offsets = (torch.take_along_dim(x, index[:, None], 2) for x in (counts, offsets))
        if without is not None and counts.is_cuda and kernels.serve(counts):
            from sparseprefill.kernels.lists.maps import emptied

            counts = emptied(counts, without)
        elif without is not None:
            counts = counts.masked_fill(without[:, None], 0)
        return evolve(self, counts=counts, offsets=offsets)


@kept_by_sizes()
def _reach(geometry: Geometry, tile_q: int, tile_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first key tile in reach of each query tile, int64 ``[B, 1, R]``, and how many are, int32; and all tiles."""
    first, last = span(geometry, tile_q, tile_k)
    every = torch.arange(geometry.tile_columns(tile_k), dtype=torch.int32, device=geometry.device)
    return first[:, None], (last - first).clamp(min=0).to(torch.int32)[:, None], every


@kept_by_sizes()
def _every(geometry: Geometry, tile_q: int, tile_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Counts, offsets and indices of `IndexLists.full`."""
    first, counts, every = _reach(geometry, tile_q, tile_k)
    shape = (-1, geometry.heads, -1)
    return counts.expand(shape).contiguous(), first.expand(shape).contiguous(), every


def pairs_by_kernel(
    geometry: Geometry,
    sizes: tuple[int, int, int, int],
    tiles: IndexLists | None,
    stripes: IndexLists | None,
    *,
    disjoint: bool,
) -> Tensor | None:
    """Count as `count.pairs` does, where a kernel may; None where plain PyTorch has to."""
    if not kernels.serve_device(geometry.device):
        return None
    from sparseprefill.kernels.lists.pair_counts import pair_counts

    plain = (None if one is None else (one.counts, one.offsets, one.indices) for one in (tiles, stripes))
    return pair_counts(geometry, sizes, *plain, disjoint=disjoint)


def readable(device: torch.device) -> bool:
    """True if values may be looked at: on a CPU, where nothing waits for it, and in no mode in which there are none."""
    return device.type == "cpu" and not kernels.serve_device(device) and not in_a_mode()


def _check_order(first: Tensor, last: Tensor) -> None:
    """MaskError for ranges of a row that overlap or descend; on a CPU alone."""
    if not readable(first.device):
        return
    some = first < last
    before = functional.pad(torch.where(some, last, 0).cummax(-1).values, (1, -1)) if last.shape[-1] else last
    wrong = (some & (first < before)).any(-1)
    if bool(wrong.any()):
        batch, row = wrong.nonzero()[0].tolist()
        shown = list(zip(first[batch, row].tolist(), last[batch, row].tolist(), strict=True))
        remedy = "pass ranges from 0 on that ascend and do not overlap, [begin, end)"
        raise MaskError(f"first and last of batch row {batch}, row {row} are {printed(shown)}: {remedy}")


def _check_ranges(first: object, last: object, width: object) -> None:
    for name, x in (("first", first), ("last", last)):
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64):
            raise MaskError(f"{name} is {getattr(x, 'dtype', type(x).__name__)}: pass an int64 tensor [B, R, P]")
        if x.dim() != 3:
            raise MaskError(f"{name} has shape {tuple(x.shape)}: pass [B, R, P], P ranges per row")
    if isinstance(first, Tensor) and isinstance(last, Tensor):
        if first.shape != last.shape:
            raise MaskError(f"last has shape {tuple(last.shape)}: pass first's, {tuple(first.shape)}")
        _check_order(first, last)
    if type(width) is not int or not 0 <= width <= LARGEST:
        remedy = "pass the number of entries of the longest list, an integer from 0, below 2^31"
        raise MaskError(f"width is {printed(width)}: {remedy}")
