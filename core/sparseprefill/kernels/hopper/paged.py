"""When the Hopper kernel reads K and V from pages, and what it is given then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparseprefill.kernels.hopper.paging import PANEL

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.kernels.source import Source
    from sparseprefill.pages import Pages

LEAST = 16
"""Tokens of the smallest page: 8 rows make one period of shared memory's swizzle."""


def refusal(pages: Pages, call: AttentionCall) -> str | None:
    """Why the kernel cannot read these pages, or None; the call's other features are `launch.features`' matter."""
    if pages.converted:
        return f"pages of {pages.k.dtype}, to be read as {pages.dtype}"
    if pages.page < LEAST or pages.page & (pages.page - 1):
        return f"pages of {pages.page} tokens"
    if call.starts is not None:
        return "padding before the keys in pages"
    steps, size = pages.k.stride(), pages.k.element_size()
    if steps != pages.v.stride():
        return "pages of K and V that differ in strides"
    if steps[1] == 0 or steps[0] % steps[1] or pages.k.shape[0] * (steps[0] // steps[1]) >= 1 << 31:
        return f"pages of strides {steps}"
    if any(x.data_ptr() % 16 for x in (pages.k, pages.v)) or any(step * size % 16 for step in steps[:3]):
        return "rows of pages that are not aligned to 16 bytes"
    return None


def cache_descriptors(source: Source, block_n: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of K and V: blocks of a step's keys of one head in one page, or, of smaller pages, of one panel of columns."""
    return _descriptor(source.k, block_n), _descriptor(source.v, block_n)


def cache_strides(source: Source) -> tuple[int, int, int, int, int, int]:
    """Of K, then of V: rows from page to page, elements from head to head and from row to row."""
    k, v = source.k.stride(), source.v.stride()
    return k[0] // k[1], k[2], k[1], v[0] // v[1], v[2], v[1]


def _descriptor(x: Tensor, block_n: int) -> TensorDescriptor:
    heads_first = x.permute(0, 2, 1, 3)  # the copy engine takes strides in any order
    rows, columns = (block_n, x.shape[3]) if x.shape[1] >= block_n else (x.shape[1], PANEL.value)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    sizes, steps = list(heads_first.shape), list(heads_first.stride())
    return TensorDescriptor(heads_first, sizes, steps, [1, 1, rows, columns], layout)
