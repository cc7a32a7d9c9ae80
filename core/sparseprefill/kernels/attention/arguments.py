"""The arguments of the attention kernels by name: tuples that a launcher fills, and a kernel builds again.

Kernels keep flat signatures, since `do_not_specialize` does not reach into a tuple: `flat` takes a launcher's tuples
apart, and a parameter is called as the way to its field, such as `mask_tiles_counts`. A field may be None, which device
code asks for as it does of a pointer (``mask.bitmap is not None``); the branch is then decided when it is compiled.

Requests of a launch share a cache, its pages' strides, heads, tile sizes and everything else that is one argument. What
is each one's own stands in a table, int64 ``[requests, FIELDS]``. Tensors of its own are told by how many elements they
begin behind those of the first request, which are the kernel's arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

import triton
import triton.language as tl

from sparseprefill.kernels.steps import stored_rows

Q_BEGIN = tl.constexpr(0)  # its first row in q
OUT_BEGIN = tl.constexpr(1)  # and in out and lse
Q_LEN = tl.constexpr(2)
KV_LEN = tl.constexpr(3)
Q_OFFSET = tl.constexpr(4)
TILE_ROWS = tl.constexpr(5)  # query tiles
GROUP_ROWS = tl.constexpr(6)  # lists of stripes a head
COLUMNS = tl.constexpr(7)  # key tiles
TABLE = tl.constexpr(8)  # from here on elements behind the first request's: its pages
TILE_LISTS = tl.constexpr(9)  # counts, offsets and indices
STRIPE_LISTS = tl.constexpr(12)  # the same
BITMAP = tl.constexpr(15)
FIELDS = tl.constexpr(16)


class Queries(NamedTuple):
    """``[B, Hq, Nq, D]``."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any


class Matrix(NamedTuple):
    """K or V, ``[B, Hkv, Nkv, D or V]``, or pages of them, whose `stride_b` is that from page to page.

    desc: tensor descriptor, or None. scale: factor on what pages hold, or None.
    """

    ptr: Any
    desc: Any
    scale: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any


class Cache(NamedTuple):
    """Keys and values. table: pages of the request, or None."""

    k: Matrix
    v: Matrix
    table: Any


class Head(NamedTuple):
    """One KV head of K or V, ``[Nkv, D or V]``. ptr: its first row; stride_page: used with a table alone. scale: the factor
    on what pages hold, itself and no pointer, or None."""

    ptr: Any
    stride: Any
    table: Any
    stride_page: Any
    scale: Any


class Lists(NamedTuple):
    """`IndexLists` of tiles or stripes; all None where the mask has none."""

    counts: Any
    offsets: Any
    indices: Any


class Mask(NamedTuple):
    """tile_rows, columns: size of the grid of tiles. group_rows: lists of stripes a head.

    bitmap: uint8 ``[B, Hq, tile_rows, columns]``, where stripes may lie in selected tiles, which count once; or None.
    """

    tiles: Lists
    stripes: Lists
    bitmap: Any
    tile_rows: Any
    group_rows: Any
    columns: Any


class Sizes(NamedTuple):
    """Lengths of the call, and where its batch rows begin and end (see `batch_row`).

    kv_group: query heads a KV head. requests: where batch rows are requests, the table of what is their own (see
    `attend_request`), else None.
    """

    starts: Any
    lengths: Any
    q_offset: Any
    q_len: Any
    kv_len: Any
    heads: Any
    kv_group: Any
    requests: Any


class Logits(NamedTuple):
    """scale: factor on q.k, log2(e) included. softcap, window: of the call, or None.

    below: float32 ``[B]``, thresholds of steps that are left out, or None (see `block`).
    """

    scale: Any
    softcap: Any
    window: Any
    below: Any


class State(NamedTuple):
    """A softmax in progress: m, l ``[B, Hq, Nq]`` and acc ``[B, Hq, Nq, V]``, float32 and contiguous; or all None."""

    m: Any
    l: Any  # noqa: E741
    acc: Any


class Outputs(NamedTuple):
    """Places of the results: either out and lse, or a state. sinks: logits that join the denominator of out, or None.

    nonfinite: int8 ``[B * Hq * query blocks]``, 1 where a block met a NaN. skipped: int32 ``[B * Hq * query blocks, 2]``,
    pairs that were left out, in the second column those of a half that votes by itself; or None.
    """

    out: Any
    lse: Any
    state: State
    nonfinite: Any
    sinks: Any
    skipped: Any
    stride_ob: Any
    stride_oh: Any
    stride_on: Any
    stride_lb: Any
    stride_lh: Any


class Arguments(NamedTuple):
    """Everything that one launch of the portable kernel is given, but what it is compiled for. flags: query blocks of
    all heads of all batch rows or requests, of which `Outputs.nonfinite` has one each."""

    queries: Queries
    cache: Cache
    mask: Mask
    carry: State
    outputs: Outputs
    sizes: Sizes
    logits: Logits
    flags: Any


def flat(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The fields of named tuples of named tuples, in order: what a kernel's flat signature takes."""
    found: tuple[Any, ...] = _fields(type(arguments))(arguments)
    return found


@cache
def _fields(kind: type[tuple[Any, ...]]) -> attrgetter[Any]:
    """The getter that takes a launcher's tuples apart, by the types of their fields: every launch asks."""
    return attrgetter(*_ways(kind))


def _ways(kind: type[tuple[Any, ...]]) -> Iterator[str]:
    """The way to each field, such as ``mask.tiles.counts``."""
    for name, of in get_type_hints(kind).items():
        inner = isinstance(of, type) and issubclass(of, tuple)
        yield from (f"{name}.{way}" for way in _ways(of)) if inner else (name,)


class Shape(NamedTuple):
    """Sizes known when the kernel is compiled: the mask's tiles, the blocks of a step, head dimensions, tokens a page.

    GROUP: query tiles that share a list of stripes. WIDTH: keys of a stripe. D: dimension of queries and keys, V: of
    values and the output. BLOCK_D, BLOCK_V: these rounded up to a power of two. PAGE: 0 without pages.
    """

    TILE_Q: tl.constexpr
    TILE_K: tl.constexpr
    GROUP: tl.constexpr
    WIDTH: tl.constexpr
    BLOCK_M: tl.constexpr
    BLOCK_N: tl.constexpr
    D: tl.constexpr
    BLOCK_D: tl.constexpr
    V: tl.constexpr
    BLOCK_V: tl.constexpr
    PAGE: tl.constexpr


class Rows(NamedTuple):
    """The query rows of one block, on the grid of their batch row.

    b, h, kv_head: batch row, query head, KV head. start, kv_len: first real key, and end of K and V. first: position
    of query row 0. tile: query tile. low, last: positions of the first row, and of the last real one. live: any is
    real. position, row ``[BLOCK_M]``: on the grid, and among the query rows of the call. real: rows that are tokens of the call.
    """

    b: Any
    h: Any
    kv_head: Any
    start: Any
    kv_len: Any
    first: Any
    tile: Any
    low: Any
    last: Any
    live: Any
    position: Any
    row: Any
    real: Any


@triton.jit
def load_keys(x, rows, keep, TYPE: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[len(rows), BLOCK_D]: rows of a `Head`, 0 where not kept, scaled and converted to TYPE."""
    return stored_rows(x.ptr, rows, keep, x.stride, x.table, x.stride_page, x.scale, TYPE, PAGE, D, BLOCK_D)
