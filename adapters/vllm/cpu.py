"""The CPU backend: vLLM's own, whose prefill requests run sparse while ``CUSTOM`` is selected."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from ..serving.parts import Batch
from . import packing
from .shared import SparseBackend, SparseBuilder, SparseImpl

STOCK = "CPU_ATTN"


@dataclass
class SparseCPUMetadata(CPUAttentionMetadata):
    """parts: of a batch with requests that run sparse."""

    parts: Batch | None = None


class SparseCPUBuilder(SparseBuilder, CPUAttentionMetadataBuilder):
    """Adds the parts of a batch to the metadata, if there is a request to run sparse."""

    host_name, metadata = STOCK, SparseCPUMetadata


class SparseCPUImpl(SparseImpl, CPUAttentionBackendImpl):
    """Runs the parts of a batch; everything else is its parent's."""

    host_name = STOCK

    def read(self, layer: Any, cache: Tensor, table: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Copies of a request's keys and values, in the order in which the platform packs them."""
        pages, heads, block, double = cache.shape
        size = double // 2
        orders = packing.order(layer.dtype, size, block, layer.isa, self.kv_cache_dtype)
        halves = cache.view(pages, heads, 2 * block, size).chunk(2, dim=2)
        scales = (layer._k_scale_float, layer._v_scale_float)
        k, v = (
            packing.read(half, at, table, length, kind=self.kv_cache_dtype, scale=scale, dtype=dtype)
            for half, at, scale in zip(halves, orders, scales, strict=True)
        )
        return k, v


class SparseCPUBackend(SparseBackend, CPUAttentionBackend):
    """Takes the place of ``CPU_ATTN``, whose name it keeps: vLLM asks for no other backend on a CPU."""

    impl, builder = SparseCPUImpl, SparseCPUBuilder
