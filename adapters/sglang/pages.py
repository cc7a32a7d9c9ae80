"""A layer's keys in SGLang's pool, as `Pages`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from sparseprefill.pages import FP8, Pages

ALIGNED = 4
"""Entries of a table that take 16 bytes, at whose multiples kernels read faster."""


def table_of(row: Tensor, length: int, page: int) -> Tensor:
    """int32 ``[n]``, the pages of a request's first `length` keys; a view where a page is one slot.

    row: int32 ``[context]``, the request's slots (``req_to_token``), which fill its pages in order. page: slots each.
    """
    return row[:length] if page == 1 else row[:length:page] // page


def in_one(tables: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tables in one tensor, each aligned as if alone, so that requests which share a launch tell by how far
    theirs lie apart, which is the same in every layer."""
    ends = list(accumulate((-(-len(one) // ALIGNED) * ALIGNED for one in tables), initial=0))
    whole = torch.empty(ends[-1], dtype=tables[0].dtype, device=tables[0].device)
    found = [whole[begin : begin + len(one)] for one, begin in zip(tables, ends, strict=False)]
    for mine, one in zip(found, tables, strict=True):
        mine.copy_(one)
    return found


def pages_of(
    k: Tensor,
    v: Tensor,
    table: Tensor,
    length: int,
    *,
    page: int,
    dtype: torch.dtype,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    copies: bool = True,
) -> Pages:
    """Views of a request's keys and values; nothing is copied.

    k, v: ``[slots, Hkv, D]``, a layer's buffers of the pool. table: see `table_of`. length: keys of the request.
    dtype: of the numbers to compute with. scales: of K and V in an fp8 pool, float32 of one element; None for 1.
    copies: see `Pages`.
    """
    whole = k.shape[0] // page * page
    k, v = (x[:whole].view(-1, page, *x.shape[1:]) for x in (k, v))
    k_scale, v_scale = scales if k.dtype in FP8 else (None, None)
    return Pages(k, v, table, length, dtype=dtype, k_scale=k_scale, v_scale=v_scale, copies=copies)


def scale_of(layer: Any, name: str, device: torch.device) -> Tensor | None:
    """A layer's `k_scale` or `v_scale`, float32 of one element on the device; None for 1."""
    found = getattr(layer, name, None)
    if found is None or getattr(layer, f"{name}_float", None) == 1.0:
        return None
    return torch.as_tensor(found, dtype=torch.float32, device=device).reshape(-1)[:1]
