"""Packing of a block of the KV cache by vLLM's CPU kernels: learnt from what they write, whatever the instruction set.

A block of one head holds as many numbers as its tokens' keys (or values) have, in an order that depends on dtype, head
size, block size and instruction set. The order is found by writing digits of each number's index, in a few tiny blocks.
"""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from vllm import _custom_ops as ops

from sparseprefill.mask.geometry import remembered

BASE = 8  # digits 0 to 7 are exact in every floating-point format of a cache
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@remembered(64)
def order(dtype: torch.dtype, head_size: int, block: int, isa: str, kind: str) -> tuple[Tensor, Tensor]:
    """int64 ``[block * head_size]`` each for K and V: where in a packed block the number of (token, dimension) stands.

    dtype: of the model. kind: vLLM's name for the cache's dtype.
    """
    count = block * head_size
    index = torch.arange(count, device="cpu").view(block, 1, head_size)
    found = torch.zeros(2, count, dtype=torch.int64, device="cpu")
    slots, step = torch.arange(block, device="cpu"), 1
    while step < count:
        stored = torch.zeros(1, 1, 2 * block, head_size, dtype=torch.uint8 if kind in FP8 else dtype, device="cpu")
        halves = stored.chunk(2, dim=2)
        digits = (index // step % BASE).to(dtype)
        ops.cpu_attn_reshape_and_cache(
            digits, digits, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=kind
        )
        found += torch.stack([plain(half, kind).reshape(-1).float().round().long() * step for half in halves])
        step *= BASE
    at = torch.arange(count, device="cpu")
    k, v = (torch.empty_like(at).scatter_(0, numbers, at) for numbers in found)
    return k, v


def plain(x: Tensor, kind: str) -> Tensor:
    """Packed numbers with their floating-point type."""
    return x.view(FP8[kind]) if kind in FP8 else x


def read(
    half: Tensor, at: Tensor, table: Tensor, length: int, *, kind: str, scale: float, dtype: torch.dtype
) -> Tensor:
    """``[1, H, length, D]``: keys, or values, of one request.

    half: K or V of the whole cache, ``[blocks, H, block, D]`` as stored. at: from `order`. table: int32, the request's
    blocks. scale: factor on what an fp8 cache holds.
    """
    heads, block, size = half.shape[1:]
    blocks = table[: -(-length // block)].long()
    x = plain(half[blocks], kind).to(dtype).reshape(-1, heads, block * size)[:, :, at]
    x = x.view(-1, heads, block, size).transpose(0, 1).reshape(1, heads, -1, size)[:, :, :length]
    return x * scale if kind in FP8 else x
