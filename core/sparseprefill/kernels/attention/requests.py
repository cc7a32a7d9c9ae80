"""Several requests in one launch: the table of what differs between them, and the portable kernel's way through it.

Requests of a launch share a cache, its pages' strides, heads, tile sizes and everything else that is one argument. What
is each one's own stands in a table, int64 ``[requests, FIELDS]``. Tensors of its own are told by how many elements they
begin behind those of the first request, which are the kernel's arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparseprefill.kernels.attention.arguments import Cache, Lists, Mask, Outputs, Queries, Shape, Sizes
from sparseprefill.kernels.attention.block import attend

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


@triton.jit
def attend_request(
    block, bh, queries, cache, mask, carry, outputs, sizes, logits, S, CAREFUL: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """`attend` for head ``bh % heads`` of request ``bh // heads``, if that has so many query blocks.

    Flags of nonfinite blocks lie as if all requests had as many query tiles as the longest, `mask.tile_rows`.
    """
    request = sizes.requests + (bh // sizes.heads) * FIELDS
    h = bh % sizes.heads
    tile_rows = tl.load(request + TILE_ROWS).to(tl.int32)
    blocks: tl.constexpr = S.TILE_Q // S.BLOCK_M
    if block < tile_rows * blocks:
        q_ptr = queries.ptr + tl.load(request + Q_BEGIN) * queries.stride_n
        table = cache.table + tl.load(request + TABLE)
        tiles = mask.tiles
        if mask.tiles.counts is not None:
            tiles = Lists(
                mask.tiles.counts + tl.load(request + TILE_LISTS),
                mask.tiles.offsets + tl.load(request + TILE_LISTS + 1),
                mask.tiles.indices + tl.load(request + TILE_LISTS + 2),
            )
        stripes = mask.stripes
        if mask.stripes.counts is not None:
            stripes = Lists(
                mask.stripes.counts + tl.load(request + STRIPE_LISTS),
                mask.stripes.offsets + tl.load(request + STRIPE_LISTS + 1),
                mask.stripes.indices + tl.load(request + STRIPE_LISTS + 2),
            )
        bitmap = mask.bitmap
        if mask.bitmap is not None:
            bitmap = mask.bitmap + tl.load(request + BITMAP)
        group_rows = tl.load(request + GROUP_ROWS).to(tl.int32)
        columns = tl.load(request + COLUMNS).to(tl.int32)
        out_begin = tl.load(request + OUT_BEGIN)
        flags = bh.to(tl.int64) * mask.tile_rows - h.to(tl.int64) * tile_rows  # `attend` adds the head's own tiles
        attend(
            block, h,
            Queries(q_ptr, queries.stride_b, queries.stride_h, queries.stride_n),
            Cache(cache.k, cache.v, table),
            Mask(tiles, stripes, bitmap, tile_rows, group_rows, columns),
            carry,
            Outputs(
                outputs.out + out_begin * outputs.stride_on, outputs.lse + out_begin, outputs.state,
                outputs.nonfinite + flags * blocks, outputs.sinks, outputs.skipped,
                outputs.stride_ob, outputs.stride_oh, outputs.stride_on, outputs.stride_lb, outputs.stride_lh,
            ),
            Sizes(
                None, None, tl.load(request + Q_OFFSET).to(tl.int32), tl.load(request + Q_LEN).to(tl.int32),
                tl.load(request + KV_LEN).to(tl.int32), sizes.heads, sizes.kv_group, None,
            ),
            logits,
            Shape(S.TILE_Q, S.TILE_K, S.GROUP, S.WIDTH, S.BLOCK_M, S.BLOCK_N, S.D, S.BLOCK_D, S.PAGE), CAREFUL, PRECISION,
        )  # fmt: skip
