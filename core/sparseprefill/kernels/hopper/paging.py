"""Of the producer: a step of keys or values, from a tensor or from the pages of a cache."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseprefill.kernels.hopper.gluon import load_block, reinterpret

PANEL = gl.constexpr(64)
"""Columns that lie together in shared memory: 128 bytes, the width of its swizzle."""


@gluon.constexpr_function
def pages_of(BLOCK_N, PAGE):
    """Pages of a step; one where a page holds more than that."""
    return max(BLOCK_N // PAGE, 1)


@gluon.jit
def boxes(smem, shape):
    """The stages of K or V as what one load fills: a stage, or the rows of one page in one panel of columns."""
    if shape.PAGE == 0 or shape.PAGE >= shape.BLOCK_N:
        return smem
    else:  # noqa: RET505 - what stands behind a branch that returns is compiled, too
        count: gl.constexpr = shape.STAGES * (shape.D // PANEL) * (shape.BLOCK_N // shape.PAGE)
        return reinterpret(smem, smem.dtype, [count, 1, 1, shape.PAGE, PANEL], smem.layout)


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
def row_in_cache(table_ptr, at, page_rows, PAGE: gl.constexpr):
    """Where keys `at` stand, in rows of one head, of which a page is `page_rows` from the next."""
    return gl.load(table_ptr + at // PAGE) * page_rows + at % PAGE
