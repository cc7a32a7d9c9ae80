"""A layer's cache as vLLM lays it out, as `Pages`."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseprefill.pages import Pages


def pages_of(
    cache: Tensor,
    head_size: int,
    table: Tensor,
    length: int,
    *,
    dtype: torch.dtype,
    fp8: torch.dtype | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    copies: bool = True,
) -> Pages:
    """Views of a request's keys and values; nothing is copied.

    cache: ``[pages, Hkv, page, 2 * D]`` as vLLM hands it to a layer, K before V in the last dimension. Its strides tell
    the layouts apart: heads side by side within a token (LBNHC), or a head's tokens together (LBHNC).
    table: int32 ``[n]``. length: keys of the request. dtype: of the numbers to compute with.
    fp8: the type of the cache's numbers, where it is stored as bytes; scales, of K and V, then go with it.
    copies: see `Pages`.
    """
    k, v = cache.transpose(1, 2).split_with_sizes((head_size, head_size), dim=-1)
    if fp8 is None or scales is None:
        return Pages(k, v, table, length, dtype=dtype, copies=copies)
    k_scale, v_scale = scales
    k, v = k.view(fp8), v.view(fp8)
    return Pages(k, v, table, length, dtype=dtype, k_scale=k_scale, v_scale=v_scale, copies=copies)
