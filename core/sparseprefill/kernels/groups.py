"""Dot products of token groups, as estimators take them: a causal matrix product without a copy of q and k.

A token group is `SIZE` consecutive tokens of the row's grid, one vector of ``SIZE * D`` entries: BFLA's flattened groups
(its equation 3), and XAttention's strided groups, whose antidiagonal sums are products against reversed keys (its
Algorithm 1). Device functions: which tile a program has, and its products; what becomes of them is each kernel's own.
For their launches: tiles of groups, tensor descriptors, and who may use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparseprefill.call import AttentionCall
from sparseprefill.kernels.family.chips import Chip, chip
from sparseprefill.kernels.settings import Settings
from sparseprefill.kernels.source import Keys, aligned, packed, strides
from sparseprefill.kernels.steps import batch_row, converted, floor_div

RUNTIME = ("q_shift", "q_offset", "q_len", "kv_len", "tiles", "skipped", "base", "heads", "kv_group", "rows", "columns")
"""Arguments that change with the length: kernels must not be specialised on their values."""


class Operands(NamedTuple):
    """Sources of queries and keys for a launch.

    Pointers, and the table of pages, None for keys in a tensor; the factor on what pages hold, or None; tensor
    descriptors ``[B, H, SIZE, groups, D]``, or None. Strides of batch row (of k, in pages, that of pages), head and
    row. q_shift: the query group that descriptors begin with.
    """

    q_ptr: Any
    k_ptr: Any
    table_ptr: Any
    k_scale: Any
    q_desc: Any
    k_desc: Any
    stride_qb: Any
    stride_qh: Any
    stride_qn: Any
    stride_kb: Any
    stride_kh: Any
    stride_kn: Any
    q_shift: Any


class TokenRow(NamedTuple):
    """A batch row: index of position 0 among the keys, position of query row 0, and the positions that hold queries.

    Queries stand at `low` to `high` - 1, and keys that count before `high`.
    """

    start: Any
    first: Any
    low: Any
    high: Any


class Tile(NamedTuple):
    """A tile of group pairs: batch row, query head, its KV head, first query group and first key group."""

    b: Any
    h: Any
    hk: Any
    first_q: Any
    first_k: Any


@triton.jit
def _tiles_before(n, RATIO: tl.constexpr):
    """Tiles of the rows 0 to n - 1, where row r has ``r // RATIO + 1`` of them."""
    whole = n // RATIO
    return RATIO * (whole * (whole - 1) // 2) + (n - whole * RATIO) * whole + n


@triton.jit
def tile_of(number, skipped, RATIO: tl.constexpr):
    """Row and column of the tile `number` of a causal map of tiles RATIO times as wide as high; rows from `skipped`.

    Row r reaches to column ``r // RATIO``. Holds for up to 2^24 tiles.
    """
    place = number + _tiles_before(skipped, RATIO)
    root = tl.sqrt(0.25 + 2.0 * place.to(tl.float32) / RATIO) - 0.5
    row = (root * RATIO).to(tl.int32)
    for _ in tl.static_range(3):
        row = tl.where(_tiles_before(row, RATIO) > place, row - 1, row)
    for _ in tl.static_range(3):
        row = tl.where(_tiles_before(row + 1, RATIO) <= place, row + 1, row)
    return row, place - _tiles_before(row, RATIO)


@triton.jit
def token_row(b, starts_ptr, lengths_ptr, q_offset, q_len, kv_len):
    """The `TokenRow` of a batch row."""
    start, length, first = batch_row(b, starts_ptr, lengths_ptr, q_offset, kv_len)
    return TokenRow(start, first, tl.maximum(first, 0), tl.minimum(first + q_len, length))


@triton.jit
def places(group, low, high, SIZE: tl.constexpr):
    """Half-open range of the places in each group that hold a token at positions `low` to `high` - 1."""
    return tl.minimum(tl.maximum(low - group * SIZE, 0), SIZE), tl.minimum(tl.maximum(high - group * SIZE, 0), SIZE)


@triton.jit
def _operands(
    j, x, tile, q_row, k_row, q_low, q_high, k_low, k_high,
    SIZE: tl.constexpr, REVERSED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    D: tl.constexpr, TMA: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """q [BLOCK_M, BLOCK_K] and k [BLOCK_N, BLOCK_K] of one step: BLOCK_K entries of one place of every group."""
    chunks: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    place, entry = j // chunks, (j % chunks) * BLOCK_K
    other = SIZE - 1 - place if REVERSED else place
    q_group, k_group = tile.first_q - x.q_shift, tile.first_k
    if TMA and PAGE == 0:
        q = x.q_desc.load([tile.b, tile.h, place, q_group, entry]).reshape([BLOCK_M, BLOCK_K])
        k = x.k_desc.load([tile.b, tile.hk, other, k_group, entry]).reshape([BLOCK_N, BLOCK_K])
    else:
        q_real, k_real = ((place >= q_low) & (place < q_high))[:, None], ((other >= k_low) & (other < k_high))[:, None]
        if D % BLOCK_K != 0:
            inside = (entry + tl.arange(0, BLOCK_K) < D)[None, :]
            q_real, k_real = q_real & inside, k_real & inside
        if TMA:
            q = x.q_desc.load([tile.b, tile.h, place, q_group, entry]).reshape([BLOCK_M, BLOCK_K])
        else:
            q = tl.load(q_row + (place * x.stride_qn + entry), mask=q_real, other=0.0)  # [BLOCK_M, BLOCK_K]
        if PAGE > 0 and PAGE < SIZE:
            group = k_group + tl.arange(0, BLOCK_N)
            there = (other >= k_low) & (other < k_high)
            page = tl.load(x.table_ptr + group * (SIZE // PAGE) + other // PAGE, mask=there, other=0).to(tl.int64)
            in_page = other % PAGE * x.stride_kn + entry
            k = tl.load(k_row + page[:, None] * x.stride_kb + in_page, mask=k_real, other=0.0)
        else:
            k = tl.load(k_row + (other * x.stride_kn + entry), mask=k_real, other=0.0)  # [BLOCK_N, BLOCK_K]
        k = converted(k, x.k_scale, q.dtype)
    return q, k


@triton.jit
def group_products(
    x, tile, row, drop,
    SIZE: tl.constexpr, REVERSED: tl.constexpr, HALF: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr,
    TMA: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_M, BLOCK_N]: products of a `Tile`'s query groups and key groups. x: `Operands`. row: `TokenRow`.

    Tokens outside row.low to row.high - 1 count as zeros. TMA: by tensor descriptors; no group of the tile may hold
    such tokens and others too.
    PAGE: 0, or tokens of a page, a multiple of SIZE or one of its parts; k then goes by pointers, its one row begins
    with its first key, and stride_kb is that of pages. Entries of the table behind `high` are not read.
    REVERSED: place a of a query group meets place SIZE - 1 - a of a key group. HALF: for a group and itself, the places
    before HALF do not count; `drop` says whether the tile holds such pairs.
    """
    chunks: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    steps: tl.constexpr = SIZE * chunks
    q_group, k_group = tile.first_q + tl.arange(0, BLOCK_M), tile.first_k + tl.arange(0, BLOCK_N)
    entries = tl.arange(0, BLOCK_K)[None, :]
    q_low, q_high = places(q_group, row.low, row.high, SIZE)
    k_low, k_high = places(k_group, 0, row.high, SIZE)
    # Of what goes by descriptors, these stay unused, and vanish.
    q_base = x.q_ptr + tile.b.to(tl.int64) * x.stride_qb + tile.h.to(tl.int64) * x.stride_qh
    k_base = x.k_ptr + tile.b.to(tl.int64) * x.stride_kb + tile.hk.to(tl.int64) * x.stride_kh
    q_row = q_base + (q_group * SIZE - row.first).to(tl.int64)[:, None] * x.stride_qn + entries  # [BLOCK_M, BLOCK_K]
    if PAGE > 0 and PAGE < SIZE:
        k_row = k_base + entries
    elif PAGE > 0:
        # A group lies in one page: one look-up before the loop, which is then that of a tensor.
        in_page: tl.constexpr = PAGE // SIZE
        page = tl.load(x.table_ptr + k_group // in_page, mask=k_high > 0, other=0).to(tl.int64)  # [BLOCK_N]
        slot = (k_group % in_page * SIZE).to(tl.int64)
        k_row = k_base + (page * x.stride_kb + slot * x.stride_kn)[:, None] + entries
    else:
        # [BLOCK_N, BLOCK_K]
        k_row = k_base + (k_group * SIZE + row.start).to(tl.int64)[:, None] * x.stride_kn + entries
    middle = steps
    if HALF > 0:
        middle = tl.where(drop, HALF * chunks, steps)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for j in tl.range(0, middle):
        q, k = _operands(
            j, x, tile, q_row, k_row, q_low, q_high, k_low, k_high,
            SIZE, REVERSED, BLOCK_M, BLOCK_N, BLOCK_K, D, TMA, PAGE,
        )  # fmt: skip
        acc = tl.dot(q, tl.trans(k), acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if HALF > 0:
        if drop:
            acc = tl.where(q_group[:, None] == k_group[None, :], 0.0, acc)
        for j in tl.range(middle, steps):
            q, k = _operands(
                j, x, tile, q_row, k_row, q_low, q_high, k_low, k_high,
                SIZE, REVERSED, BLOCK_M, BLOCK_N, BLOCK_K, D, TMA, PAGE,
            )  # fmt: skip
            acc = tl.dot(q, tl.trans(k), acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    return acc


@triton.jit
def program_tile(
    pid, tiles, skipped, base, heads, kv_group, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """b, h, hk, row of tiles in the call, column: of a program. Heads that share keys lie side by side, then columns.

    tiles: of one head in this launch. base: height of row 0 above the corner of the causal map, in tiles, rounded up;
    skipped: rows of tiles before this launch's first.
    """
    member, rest = pid % kv_group, pid // kv_group
    pair = rest // tiles
    kv_heads = heads // kv_group
    b, hk = pair // kv_heads, pair % kv_heads
    row, column = tile_of(rest % tiles, base + skipped, BLOCK_N // BLOCK_M)
    return b, hk * kv_group + member, hk, row - base, column


@triton.jit
def first_query_group(first, row, BLOCK: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr):
    """First query group of a row of tiles; tiles begin with the block of the call's first query."""
    return floor_div(first, BLOCK) * (BLOCK // SIZE) + row * BLOCK_M


LONG = 32
"""Tokens of a group from which its products take long beside the rest of a tile."""
READS = 8
"""Of tensor descriptors: keys for each query row up to which a copy costs less than pointers into pages do."""
COPY = 1 << 30
"""Bytes of such a copy, at most."""


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

    q: of the call, its last stride 1. keys: see `group_keys`.
    """

    call: AttentionCall
    block: int
    size: int
    q: Tensor
    keys: Keys
    settings: Settings

    @classmethod
    def of(cls, call: AttentionCall, block: int, size: int) -> GroupTiles:
        """With the keys and settings for the call and its device."""
        device = chip(call.q.device)
        itemsize = call.q.element_size()
        plain = group_settings(device, itemsize)
        keys = group_keys(call, size, tma=plain.tma)
        chosen = paged_settings(device, itemsize, size) if keys.page else plain
        return cls(call, block, size, packed(call.q), keys, chosen)

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
        if not aligned(self.q) or not (self.keys.page or aligned(self.keys.k)):
            return nothing  # of a page with few groups descriptors would take a load each: its keys go by pointers
        end = geometry.q_offset + geometry.q_len
        first = max(rows.start, 1 if geometry.q_offset % self.size else 0)
        last = min(rows.stop, self.count - 1 if end % self.size else self.count)
        return range(first, last) if first < last else nothing

    def _descriptors(self) -> tuple[TensorDescriptor, TensorDescriptor | None]:
        geometry, chosen = self.call.geometry, self.settings
        q = self._descriptor(self.q[:, :, -geometry.q_offset % self.size :], chosen.block_m)
        if self.keys.page:
            return q, None
        return q, self._descriptor(self.keys.k[:, :, : geometry.q_offset + geometry.q_len], chosen.block_n)

    def _descriptor(self, x: Tensor, groups: int) -> TensorDescriptor:
        """Descriptor of x's whole groups, a view ``[B, H, size, n, D]``. Places lead, so a load has two dimensions."""
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
def group_settings(chip: Chip, itemsize: int) -> Settings:
    """Settings by a chip's facts and bytes per element of q and k: a pure table.

    block_m and block_n are the query and key groups of a tile.
    """
    large = chip.large
    if itemsize == 4:
        return Settings(64, 64, 8, 3, tma=large, block_k=16)
    if large:
        # Bytes from L2 per product decide: two warp groups of 64 x 256, one program per multiprocessor.
        return Settings(128, 256, 8, 4, tma=True, block_k=64)
    return Settings(128, 128, 8, 3, block_k=32)


@cache
def paged_settings(chip: Chip, itemsize: int, size: int) -> Settings:
    """Launch settings for keys in pages: they are read by pointers on any device, q as elsewhere. size: of a group.

    By measurement: pointers take registers and a thread's time, so that long sums do better with small tiles.
    """
    if not chip.large or itemsize == 4:
        return group_settings(chip, itemsize)
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
        held = call.kv_heads * call.kv_len * call.q.shape[3] * call.q.element_size()
        often = call.q.shape[2] * READS >= call.kv_len and held <= COPY
        if cut or (tma and pages.copies and often):
            pages.keys()  # the pages keep the copy, which `Keys.of` then takes
    return Keys.of(call)
