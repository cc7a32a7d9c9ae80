"""Writing rows of output, 16 bytes a lane, without shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def quad_layout(width, step):
    """Layouts of ``[64, width]`` from what the matrix instruction leaves (0) to 8 values a lane side by side (2).

    Rows stay where they are, and each step exchanges one bit between the four lanes of a quad and their registers, which
    the compiler does by shuffles.
    """
    lanes = [[[0, 2], [0, 4]], [[0, 8], [0, 4]], [[0, 8], [0, 16]]][step]
    columns = [[0, c] for c in (1, 2, 4, 8, 16, 32, 64, 128) if c < width and [0, c] not in lanes]
    return gl.DistributedLinearLayout(
        reg_bases=[*columns, [8, 0]],
        lane_bases=[*lanes, [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, width],
    )


@gluon.jit
def store_rows(ptr, stride, first, q_len, x, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Rows x [ROWS, WIDTH], 16-bit, to row `first` and on of the head at `ptr`; those within [0, q_len)."""
    layout: gl.constexpr = quad_layout(WIDTH, 2)
    x = gl.convert_layout(gl.convert_layout(x, quad_layout(WIDTH, 1)), layout)
    index = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    inside = (index >= 0) & (index < q_len)
    gl.store(ptr + index.to(gl.int64)[:, None] * stride + dims[None, :], x, mask=inside[:, None])
