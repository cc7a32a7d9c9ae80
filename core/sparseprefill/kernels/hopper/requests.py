"""Batch rows of a call, and requests in their place: where each begins and ends, and which lists are its own."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparseprefill.kernels.attention.requests import FIELDS, KV_LEN, Q_LEN, Q_OFFSET


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
    return own_size(sizes.q_len, sizes, b, Q_LEN)


@gluon.jit
def keys_of(sizes, b):
    """Keys of batch row `b`, padding included."""
    return own_size(sizes.kv_len, sizes, b, KV_LEN)


@gluon.jit
def head_of(sizes, bh):
    """Which head of the mask's lists: requests have lists of their own."""
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
