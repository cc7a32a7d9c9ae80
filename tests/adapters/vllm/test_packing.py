"""What vLLM's CPU kernels store is read back, whatever they make of the order."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import engine

pytestmark = [engine.NEEDED, pytest.mark.filterwarnings("default")]
CASES = [
    (torch.float32, 64, 128, "auto"),
    (torch.bfloat16, 64, 32, "auto"),
    (torch.float16, 128, 64, "auto"),
    (torch.bfloat16, 80, 32, "auto"),
    (torch.bfloat16, 256, 128, "fp8"),
    (torch.bfloat16, 64, 32, "fp8_e5m2"),
]


@pytest.mark.parametrize(("dtype", "size", "block", "kind"), CASES)
def test_stored_keys_and_values_are_read(dtype: torch.dtype, size: int, block: int, kind: str) -> None:
    from sparseprefill.adapters.vllm import packing
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    heads, pages, length = 2, 7, 3 * block - 5
    try:
        isa = _get_attn_isa(dtype, block, size, kind)
    except NotImplementedError as refusal:
        if kind not in packing.FP8:
            raise
        pytest.skip(f"vLLM itself refuses this cache on this processor: {refusal}")
    # Small integers: exact in every format of a cache.
    k, v = torch.randint(-4, 5, (2, length, heads, size)).to(dtype)
    table = torch.randperm(pages)[:3].to(torch.int32)
    token = torch.arange(length)
    slots = table[token // block].long() * block + token % block
    cache = torch.zeros(pages, heads, 2 * block, size, dtype=torch.uint8 if kind in packing.FP8 else dtype)
    halves = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(k, v, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=kind)
    orders = packing.order(dtype, size, block, isa, kind)
    options: dict[str, Any] = {"kind": kind, "scale": 1.0, "dtype": dtype}
    for written, half, at in zip((k, v), halves, orders, strict=True):
        assert list(range(block * size)) == at.sort().values.tolist()
        assert torch.equal(written.transpose(0, 1)[None], packing.read(half, at, table, length, **options))
    straight = torch.arange(block * size)
    assert any(not torch.equal(straight, at) for at in orders), "the order matters"
