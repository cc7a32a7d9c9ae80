"""Sources of K and V for a launch: two tensors, or a request's pages."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from attrs import frozen
from torch import Tensor

from sparseprefill.call import AttentionCall

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
"""Types to compute in, as device code names them."""


@frozen(eq=False)
class Source:
    """Keys and values of a call as kernels take them.

    k, v: ``[B, Hkv, N, D]``, or of pages ``[pages, page, Hkv, D]``. table, k_scale, v_scale: of `Pages`, else None.
    page: tokens of a page, 0 where K and V are tensors.
    """

    k: Tensor
    v: Tensor
    table: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    page: int = 0

    @classmethod
    def of(cls, call: AttentionCall) -> Source:
        """The call's; nothing is copied."""
        pages = call.pages
        if pages is None:
            return cls(call.k, call.v)
        return cls(pages.k, pages.v, pages.table, pages.k_scale, pages.v_scale, pages.page)


PASSES = 2
"""Times that an estimate goes over keys that have to be converted, up to which they stay in their pages; if it does more
often, they are copied first. Kernels of sampled rows go over them twice, all others once."""


@frozen(eq=False)
class Keys:
    """Keys of a call as kernels take them that look at no values, as estimators do.

    k: ``[B, Hkv, N, D]``, or of pages ``[pages, page, Hkv, D]``, whose last stride is 1. table, scale: of `Pages`, else
    None. page: tokens of a page, 0 where k is a tensor. dtype: what kernels convert each key to as they read it, times
    `scale`; None where k holds what it should.
    """

    k: Tensor
    table: Tensor | None = None
    page: int = 0
    scale: Tensor | None = None
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, call: AttentionCall, passes: int = 1) -> Keys:
        """The call's, where they stand. passes: how often the caller's kernels go over all of them.

        Keys in pages stay there, of an fp8 cache too, which kernels convert as they read: a pass then reads half the
        bytes of a copy, and none is written. There are three exceptions: a copy that somebody has asked for is read;
        keys to be converted are copied for more than `PASSES`; and so are those that take fewer bytes as a copy, such as
        float32 of which bfloat16 is asked. Kernels over token groups have reasons of their own to copy (`group_keys`).
        """
        pages = call.pages
        if pages is not None and "k" not in pages.gathered:
            x, scale = pages.k, pages.k_scale
            dtype = None if scale is None and x.dtype == pages.dtype else pages.dtype
            if dtype is None or (passes <= PASSES and x.element_size() <= dtype.itemsize):
                return cls(x, pages.table, pages.page, scale, dtype)
        return cls(packed(call.k))

    @property
    def flags(self) -> dict[str, Any]:
        """PAGE and TYPE of a kernel: see `steps.stored_rows`."""
        return {"PAGE": self.page, "TYPE": None if self.dtype is None else TYPES[self.dtype]}

    @property
    def strides(self) -> tuple[int, int, int]:
        """Strides of k: batch (or page), head and row."""
        return strides(self.k, self.page)


def strides(x: Tensor, page: int = 0) -> tuple[int, int, int]:
    """Strides of ``[B, H, N, D]``, or, with `page`, of ``[pages, page, H, D]``: batch row or page, head and row.

    The first of a single batch row is never used and would only force a new compilation: it is 0.
    """
    if page:
        return x.stride(0), x.stride(2), x.stride(1)
    return (0 if x.shape[0] == 1 else x.stride(0)), x.stride(1), x.stride(2)


def packed(x: Tensor) -> Tensor:
    """The tensor, or a copy of one whose last stride is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned(x: Tensor) -> bool:
    """True if all rows of ``[B, H, N, D]`` begin at multiples of 16 bytes, as tensor descriptors need."""
    batch, head, row, _ = x.stride()
    return not (x.data_ptr() | (batch | head | row) * x.element_size()) % 16  # asked often: every launch does
