"""What FlashAttention-4 does inside partial blocks: causality, as a function of CuTe.

CuTe reads the source of that function and its annotations: so it has none, and nothing here is postponed.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


@cache
def causal() -> Callable[..., Any]:
    """A ``mask_mod`` for calls whose query 0 is key 0. ImportError without flash-attn-4."""
    cute = import_module("cutlass.cute")

    @cute.jit
    def seen(b, h, m, n, seqlen_info, aux):  # type: ignore[no-untyped-def]
        return n <= m

    found: Callable[..., Any] = seen
    return found
