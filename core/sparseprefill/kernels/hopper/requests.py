"""Batch rows of a call, and requests in their place: where each begins and ends, and which lists are its own."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseprefill.kernels.attention.arguments import Lists, Mask
from sparseprefill.kernels.attention.requests import (
    BITMAP,
    COLUMNS,
    FIELDS,
    GROUP_ROWS,
    KV_LEN,
    Q_LEN,
    Q_OFFSET,
    STRIPE_LISTS,
    TILE_LISTS,
    TILE_ROWS,
)


@gluon.jit
def behind(sizes, b, field: gl.constexpr):
    """A field of request `b`, int64."""
    return gl.load(sizes.requests + b * FIELDS + field)


@gluon.jit
def number(sizes, b, field: gl.constexpr):
    """A field of request `b` that is a size, int32."""
    return behind(sizes, b, field).to(gl.int32)


@gluon.jit
def batch_row(sizes, b):
    """Of row `b` of the batch: its first key, its length, and the position of the call's first query."""
    start = 0
    if sizes.starts is not None:
        start = gl.load(sizes.starts + b)
    length = sizes.kv_len - start
    if sizes.lengths is not None:
        length = gl.load(sizes.lengths + b)
    first = sizes.q_offset - start
    if sizes.requests is not None:
        length = number(sizes, b, KV_LEN)
        first = number(sizes, b, Q_OFFSET)
    return start, length, first


@gluon.jit
def rows_of(sizes, b):
    """Query rows of batch row `b`."""
    rows = sizes.q_len
    if sizes.requests is not None:
        rows = number(sizes, b, Q_LEN)
    return rows


@gluon.jit
def keys_of(sizes, b):
    """Keys of batch row `b`, padding included."""
    keys = sizes.kv_len
    if sizes.requests is not None:
        keys = number(sizes, b, KV_LEN)
    return keys


@gluon.jit
def head_of(sizes, bh):
    """Which head of the mask's lists: requests have lists of their own."""
    head = bh
    if sizes.requests is not None:
        head = bh % sizes.heads
    return head


@gluon.jit
def mask_of(mask, sizes, b):
    """The mask of batch row `b`; indices of lists begin where the first request's do."""
    if sizes.requests is None:
        return mask
    else:  # noqa: RET505 - what stands behind a branch that returns is compiled, too
        tiles = mask.tiles
        if mask.tiles.indices is not None:
            tiles = Lists(
                mask.tiles.counts + behind(sizes, b, TILE_LISTS),
                mask.tiles.offsets + behind(sizes, b, TILE_LISTS + 1),
                mask.tiles.indices,
            )
        stripes = mask.stripes
        if mask.stripes.indices is not None:
            stripes = Lists(
                mask.stripes.counts + behind(sizes, b, STRIPE_LISTS),
                mask.stripes.offsets + behind(sizes, b, STRIPE_LISTS + 1),
                mask.stripes.indices,
            )
        bitmap = mask.bitmap
        if mask.bitmap is not None:
            bitmap = mask.bitmap + behind(sizes, b, BITMAP)
        rows = number(sizes, b, TILE_ROWS), number(sizes, b, GROUP_ROWS)
        return Mask(tiles, stripes, bitmap, rows[0], rows[1], number(sizes, b, COLUMNS))
