"""The CUDA backend: which of vLLM's own computes what does not run sparse, decoding above all."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none

from .triton import SparseTritonBackend

WIDEST = 256
"""Head dimensions that FlashAttention 3 has kernels for (vLLM's ``FlashAttentionBackend.supports_head_size``)."""


def __getattr__(name: str) -> Any:
    """`SparseBackend`, for which vLLM asks by its path when it makes a layer: the class for the engine at hand."""
    if name != "SparseBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not flash_suits(get_current_vllm_config_or_none()):
        return SparseTritonBackend
    from .flash import SparseFlashBackend

    return SparseFlashBackend


def flash_suits(config: Any) -> bool:
    """True if vLLM's FlashAttention 3, its default on an H100, takes the layers of an engine.

    config: the VllmConfig, or None. Over an fp8 cache it wants queries in fp8, which estimators do not take.
    """
    model = getattr(config, "model_config", None)
    if model is None or config.cache_config.cache_dtype not in ("auto", "float16", "bfloat16"):
        return False
    if model.dtype not in (torch.float16, torch.bfloat16) or int(model.get_head_size()) > WIDEST:
        return False
    if getattr(model, "is_mm_prefix_lm", False) or getattr(model, "rswa_window", None) is not None:
        return False
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    return bool(get_flash_attn_version() == 3)
