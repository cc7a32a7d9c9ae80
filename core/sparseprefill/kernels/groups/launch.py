"""Launching kernels over `group_products`: tiles of groups, tensor descriptors, and who may use them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparseprefill.kernels.settings import Settings
from sparseprefill.kernels.source import Keys, strides

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

HIGHEST = 128
"""Rows of the largest tile, and so groups of a block."""
LONG = 32
"""Tokens of a group from which its products take long beside the rest of a tile."""
READS = 8
"""Of tensor descriptors: keys for each query row up to which a copy costs less than pointers into pages do."""
COPY = 1 << 30
"""Bytes of such a copy, at most."""


def supported(call: AttentionCall, block: int, size: int) -> bool:
    """Whether the kernels can take groups of `size` tokens in blocks of `block`: a power of two of them, 1 to 64."""
    per = block // size
    return call.q.dtype != torch.float64 and per & (per - 1) == 0 and per <= HIGHEST // 2


@frozen(eq=False)
class Part:
    """One launch over some rows of tiles: its grid, the arguments of `Operands` and `program_tile`, and flags."""

    programs: int
    rows: range
    arguments: tuple[Any, ...]
    flags: dict[str, Any]


@frozen(eq=False)
class GroupTiles:
    """The causal map of groups of a call, in tiles. block: tokens per block of groups. size: tokens per group.

    keys: see `group_keys`.
    """

    call: AttentionCall
    block: int
    size: int
    keys: Keys
    settings: Settings
    q: Tensor = field(init=False)

    @q.default
    def _make_q(self) -> Tensor:
        return self.call.q if self.call.q.stride(-1) == 1 else self.call.q.contiguous()

    @classmethod
    def of(cls, call: AttentionCall, block: int, size: int) -> GroupTiles:
        """With the keys and settings for the call and its device."""
        capability = torch.cuda.get_device_capability(call.q.device) if call.q.is_cuda else (0, 0)
        itemsize = call.q.element_size()
        plain = group_settings(capability, itemsize)
        keys = group_keys(call, size, tma=plain.tma)
        return cls(call, block, size, keys, paged_settings(capability, itemsize, size) if keys.page else plain)

    @property
    def count(self) -> int:
        """Rows of tiles."""
        per = self.block // self.size
        return -(-self.call.geometry.tile_rows(self.block) * per // self.settings.block_m)

    def parts(self, rows: range) -> Iterator[Part]:
        """The launches for some rows of tiles: by tensor descriptors, and by pointers where groups are not whole."""
        smooth = self._smooth(rows)
        descriptors = self._descriptors() if smooth else (None, None)
        pieces = ((rows.start, smooth.start, False), (smooth.start, smooth.stop, True), (smooth.stop, rows.stop, False))
        for first, last, tma in pieces:
            if first < last:
                yield self._part(range(first, last), descriptors if tma else (None, None))

    def reach(self, row: int) -> int:
        """Columns of tiles in which the row of tiles `row` has causal pairs, at most."""
        return (self._base + row) // self._ratio + 1

    @property
    def _ratio(self) -> int:
        return self.settings.block_n // self.settings.block_m

    @property
    def _base(self) -> int:
        first = self.call.geometry.q_offset // self.block * (self.block // self.size)
        return -(-first // self.settings.block_m)

    def _smooth(self, rows: range) -> range:
        """Rows of tiles that hold only whole groups, which tensor descriptors can take."""
        geometry, nothing = self.call.geometry, range(rows.start, rows.start)
        if not self.settings.tma or geometry.starts is not None or geometry.lengths is not None:
            return nothing
        step = 16 // self.q.element_size()
        if any(x.data_ptr() % 16 or any(stride % step for stride in x.stride()[:3]) for x in self._described):
            return nothing
        end = geometry.q_offset + geometry.q_len
        first = max(rows.start, 1 if geometry.q_offset % self.size else 0)
        last = min(rows.stop, self.count - 1 if end % self.size else self.count)
        return range(first, last) if first < last else nothing

    @property
    def _described(self) -> tuple[Tensor, ...]:
        """What tensor descriptors take; of a page with few groups they would take a load each."""
        return (self.q,) if self.keys.page else (self.q, self.keys.k)

    def _descriptors(self) -> tuple[TensorDescriptor, TensorDescriptor | None]:
        geometry, chosen = self.call.geometry, self.settings
        q = self._descriptor(self.q[:, :, -geometry.q_offset % self.size :], chosen.block_m)
        if self.keys.page:
            return q, None
        return q, self._descriptor(self.keys.k[:, :, : geometry.q_offset + geometry.q_len], chosen.block_n)

    def _descriptor(self, x: Tensor, groups: int) -> TensorDescriptor:
        """Of the whole groups of x: ``[B, H, size, n, D]``, a view. Places lead, so that a load drops to two dimensions."""
        batch, heads, row, one = x.stride()
        whole = x.shape[2] // self.size
        shape, strides = [*x.shape[:2], self.size, whole, x.shape[3]], [batch, heads, row, row * self.size, one]
        return TensorDescriptor(x, shape, strides, [1, 1, 1, groups, self.settings.block_k])

    def _part(self, rows: range, descriptors: tuple[Any, Any]) -> Part:
        call, keys, chosen = self.call, self.keys, self.settings
        geometry, ratio, base = call.geometry, self._ratio, self._base
        tiles = sum((base + row) // ratio + 1 for row in rows)
        pairs = geometry.batch * geometry.heads
        arguments = (
            self.q, keys.k, keys.table, keys.scale, *descriptors, geometry.starts, geometry.lengths,
            *strides(self.q), *keys.strides, -(-geometry.q_offset // self.size),
            geometry.q_offset, geometry.q_len, geometry.kv_len, tiles, rows.start, base, geometry.heads, call.group,
        )  # fmt: skip
        flags = {
            "BLOCK": self.block, "SIZE": self.size, "BLOCK_M": chosen.block_m, "BLOCK_N": chosen.block_n,
            "BLOCK_K": chosen.block_k, "D": self.q.shape[3], "TMA": descriptors[0] is not None,
            "PAGE": keys.page, "PRECISION": "ieee",
        }  # fmt: skip
        return Part(tiles * pairs, rows, arguments, flags)


@cache
def group_settings(capability: tuple[int, int], itemsize: int) -> Settings:
    """Settings by compute capability, (0, 0) for the interpreter, and bytes per element of q and k: a pure table.

    block_m and block_n are the query and key groups of a tile.
    """
    hopper = capability[0] >= 9
    if itemsize == 4:
        return Settings(64, 64, 8, 3, tma=hopper, block_k=16)
    if hopper:
        # Bytes from L2 per product decide: two warp groups of 64 x 256, one program per multiprocessor.
        return Settings(128, 256, 8, 4, tma=True, block_k=64)
    return Settings(128, 128, 8, 3, block_k=32)


@cache
def paged_settings(capability: tuple[int, int], itemsize: int, size: int) -> Settings:
    """The same where keys are read from their pages: by pointers on any device, q as elsewhere. size: of a group.

    By measurement: pointers take registers and a thread's time, so that long sums do better with small tiles.
    """
    if capability[0] < 9 or itemsize == 4:
        return group_settings(capability, itemsize)
    if size >= LONG:
        return Settings(128, 128, 4, 5, tma=True, block_k=64)
    return Settings(128, 256, 8, 3, tma=True, block_k=64)


def group_keys(call: AttentionCall, size: int, *, tma: bool) -> Keys:
    """Keys as the kernels read them: from their pages, or, as if there were none, from a copy.

    Pages serve where groups of `size` tokens lie within one or fill several, so not where groups may begin or end
    inside a page, by its size or by `starts`; and not where `Keys.of` says so. tma: whether tensors are read by
    descriptors, which can neither follow a table nor convert: queries that read all keys often, as those of a whole
    prompt do, then gain more by them than a copy costs.
    """
    pages = call.pages
    if pages is not None:
        cut = (pages.page % size and size % pages.page) or call.starts is not None
        if cut or (tma and pages.copies and _often(call)):
            pages.keys()  # the pages keep the copy, which `Keys.of` then takes
    return Keys.of(call)


def _often(call: AttentionCall) -> bool:
    held = call.kv_heads * call.kv_len * call.q.shape[3] * call.q.element_size()
    return call.q.shape[2] * READS >= call.kv_len and held <= COPY
