"""Causality inside FlashAttention-4's partial blocks, as a function of CuTe.

CuTe reads the source of that function and its annotations: so it has none, and nothing here is postponed.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


@cache
def causal(behind: bool = False) -> Callable[..., Any]:
    """A ``mask_mod`` for calls whose last query row is at the last key. ImportError without flash-attn-4.

    behind: query 0 stands behind cached keys; else it is key 0.
    """
    cute = import_module("cutlass.cute")
    if not behind:

        @cute.jit
        def seen(b, h, m, n, seqlen_info, aux):  # type: ignore[no-untyped-def]
            return n <= m

    else:
        as_tensor = import_module("flash_attn.cute.utils").scalar_to_ssa
        integer = import_module("cutlass").Int32

        @cute.jit
        def seen(b, h, m, n, seqlen_info, aux):  # type: ignore[no-untyped-def]
            return n <= m + as_tensor(seqlen_info.seqlen_k - seqlen_info.seqlen_q, integer)

    found: Callable[..., Any] = seen
    return found
