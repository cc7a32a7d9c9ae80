"""Places of rows: those of a batch, of requests in its place, and a step of keys or values in a tensor or in pages."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseprefill.kernels.attention.arguments import FIELDS, KV_LEN, Q_LEN, Q_OFFSET
from sparseprefill.kernels.roles.gluon import load_block, reinterpret

PANEL = gl.constexpr(64)
"""Columns that lie together in shared memory: 128 bytes, the width of its swizzle."""
BEYOND = gl.constexpr(0x3FFFFFFF)
"""A row behind the last of any tensor."""


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
    """First key and length of row `b` of the batch, and the position of the call's first query."""
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
    return own_size(sizes.q_len, sizes, b, Q_LEN)


@gluon.jit
def keys_of(sizes, b):
    """Keys of batch row `b`, padding included."""
    return own_size(sizes.kv_len, sizes, b, KV_LEN)


@gluon.jit
def head_of(sizes, bh):
    """The head of the mask's lists: requests have lists of their own."""
    head = bh
    if sizes.requests is not None:
        head = bh % sizes.heads
    return head


@gluon.jit
def own(pointer, sizes, b, field: gl.constexpr):
    """A pointer, or an offset, of batch row `b`: each request's lies behind the first one's."""
    if sizes.requests is not None:
        pointer += behind(sizes, b, field)
    return pointer


@gluon.jit
def own_size(size, sizes, b, field: gl.constexpr):
    """A size of batch row `b`: what all have, or a field of the request's."""
    if sizes.requests is not None:
        size = number(sizes, b, field)
    return size


@gluon.constexpr_function
def pages_of(BLOCK_N, PAGE):
    """Pages of a step; one where a page holds more than that."""
    return max(BLOCK_N // PAGE, 1)


@gluon.jit
def boxes(smem, ROWS: gl.constexpr, shape):
    """The stages of K or V as what one load fills: ROWS rows in one panel of columns, or, where a step has no more of
    them (and where ROWS is 0), a stage."""
    if ROWS == 0 or ROWS >= shape.BLOCK_N:
        return smem
    else:  # noqa: RET505 - what stands behind a branch that returns is compiled, too
        count: gl.constexpr = shape.STAGES * (shape.D // PANEL) * (shape.BLOCK_N // ROWS)
        return reinterpret(smem, smem.dtype, [count, 1, 1, ROWS, PANEL], smem.layout)


@gluon.jit
def entries_of(table_ptr, key, kv_len, shape):
    """The pages of a step's keys, -1 behind the request's last: outside of the cache, so that the copy engine fills
    zeros."""
    entries = ()
    for part in gl.static_range(pages_of(shape.BLOCK_N, shape.PAGE)):
        at = key + part * shape.PAGE
        entries += (gl.load(table_ptr + at // shape.PAGE, mask=at < kv_len, other=-1),)  # type: ignore[assignment]
    return entries


@gluon.jit
def load_pages(desc, entries, head, key, ready, smem, stage, shape):
    """Start copying a step's keys, by pages, into the `boxes` of a stage."""
    if shape.PAGE >= shape.BLOCK_N:
        load_block(desc, [entries[0], head, key % shape.PAGE, 0], ready, smem.index(stage))  # [BLOCK_N, D]
    else:
        parts: gl.constexpr = shape.BLOCK_N // shape.PAGE
        panels: gl.constexpr = shape.D // PANEL
        for part in gl.static_range(parts):
            for panel in gl.static_range(panels):
                box = smem.index(stage * (panels * parts) + panel * parts + part)
                load_block(desc, [entries[part], head, 0, panel * PANEL], ready, box)  # [PAGE, PANEL]


@gluon.jit
def load_step(desc, entries, b, head, key, start, ready, smem, stage, shape):
    """Start copying a step's keys, or values, from their pages or their tensor into the `boxes` of a stage.

    key: the first of the step. entries: of its pages. b, start: of the tensor, batch row and the row's first key.
    """
    mbarrier.expect(ready, shape.BLOCK_N * shape.D * 2)
    if shape.PAGE > 0:
        load_pages(desc, entries, head, key, ready, smem, stage, shape)
    else:
        load_block(desc, [b, head, key + start, 0], ready, smem.index(stage))  # [BLOCK_N, D]


@gluon.jit
def boxes_of_columns(list_ptr, table_ptr, first, seen, b, start, shape):
    """Places of the boxes of a step of columns, the first and the third coordinate of each: a page's or batch row `b`
    with its first key `start`, and the row there. first: number of the step's first key among the list's, of which
    `seen` count; boxes behind these lie outside, so that the copy engine fills zeros."""
    outer = ()
    inner = ()
    for part in gl.static_range(shape.BLOCK_N // shape.BOX):
        at = first + part * shape.BOX
        there = at < seen
        key = gl.load(list_ptr + at // shape.WIDTH, mask=there, other=0) * shape.WIDTH + at % shape.WIDTH
        if shape.PAGE > 0:
            outer += (gl.load(table_ptr + key // shape.PAGE, mask=there, other=-1),)  # type: ignore[assignment]
            inner += (key % shape.PAGE,)  # type: ignore[assignment]
        else:
            outer += (b,)  # type: ignore[assignment]
            inner += (gl.where(there, key + start, BEYOND),)  # type: ignore[assignment]
    return outer, inner


@gluon.jit
def load_boxes(desc, outer, inner, head, ready, smem, stage, shape):
    """Start copying a step of columns into the `boxes` of a stage."""
    mbarrier.expect(ready, shape.BLOCK_N * shape.D * 2)
    parts: gl.constexpr = shape.BLOCK_N // shape.BOX
    panels: gl.constexpr = shape.D // PANEL
    for part in gl.static_range(parts):
        for panel in gl.static_range(panels):
            box = smem.index(stage * (panels * parts) + panel * parts + part)
            load_block(desc, [outer[part], head, inner[part], panel * PANEL], ready, box)  # [BOX, PANEL]


@gluon.jit
def row_in_cache(table_ptr, at, page_rows, PAGE: gl.constexpr):
    """Place of keys `at`, in rows of one head, of which a page is `page_rows` from the next."""
    return gl.load(table_ptr + at // PAGE) * page_rows + at % PAGE
