"""Shared parts of the CUDA backends, whatever vLLM's own attention they stand on.

Keys and values of a request's context stay in their pages, which the attention kernels read through the block table;
stages that need the keys as one tensor have them copied then (see `Pages`).
"""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseprefill.pages import Pages

from .pages import pages_of
from .runtime import LATENT_FLAG, NAME
from .shared import SparseBackend, SparseImpl


class PagedBackend(SparseBackend):
    """The backend that ``--attention-backend CUSTOM`` selects: mixed into the host's class, ahead of it."""

    @staticmethod
    def get_name() -> str:
        """A member of vLLM's list of backends."""
        return NAME

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Not promised: whether a request's chunk runs sparse depends on its length, which the batch decides."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Batches are cut by the host's copy of the query lengths."""
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **config: Any) -> list[str]:
        """The host's reasons why a model cannot have it; for latent attention also the flag that can."""
        reasons: list[str] = super().validate_configuration(*args, **config)
        return [*reasons, f"for this model it is {LATENT_FLAG}"] if config.get("use_mla") else reasons


class PagedImpl(SparseImpl):
    """Attention of one layer, whose parts read their keys where they stand."""

    supports_dcp = supports_pcp = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False  # estimators take the query as it is

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Outputs are written in the model's dtype."""
        return False

    def slots(self, layer: Any, query: Tensor, cache: Tensor, metadata: Any, output: Tensor) -> tuple[Tensor, ...]:
        """With the cache's scales, and the layer's sinks, where it has some."""
        more = () if self.sinks is None else (self.sinks,)
        if self.kv_cache_dtype.startswith("fp8"):
            more = (layer._k_scale, layer._v_scale, *more)
        return query, output, cache, metadata.block_table, *more

    def read(self, layer: Any, cache: Tensor, table: Tensor, length: int, dtype: torch.dtype) -> Pages:
        """Pages of a request's keys and values."""
        fp8 = self.fp8_dtype if self.kv_cache_dtype.startswith("fp8") else None
        scales = (layer._k_scale, layer._v_scale)
        copies = self.runtime is None or self.runtime.options.copies
        return pages_of(cache, self.head_size, table, length, dtype=dtype, fp8=fp8, scales=scales, copies=copies)
