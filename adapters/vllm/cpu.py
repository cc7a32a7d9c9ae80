"""The CPU backend: vLLM's own, whose prefill requests run sparse while ``CUSTOM`` is selected."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from . import packing
from .attend import run
from .groups import announce
from .layer import Layer
from .plan import plan
from .runtime import runtime_of
from .split import Part

STOCK = "CPU_ATTN"


class SparseCPUBackend(CPUAttentionBackend):
    """Takes the place of ``CPU_ATTN``, whose name it keeps: vLLM asks for no other backend on a CPU."""

    @staticmethod
    def get_impl_cls() -> type[SparseCPUImpl]:
        """The attention of one layer."""
        return SparseCPUImpl

    @staticmethod
    def get_builder_cls() -> type[SparseCPUBuilder]:
        """The metadata of one step."""
        return SparseCPUBuilder


@dataclass
class SparseCPUMetadata(CPUAttentionMetadata):
    """parts: of a batch with requests that run sparse."""

    parts: list[Part] | None = None


class SparseCPUBuilder(CPUAttentionMetadataBuilder):
    """Adds the parts of a batch to the metadata, if there is a request to run sparse."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = runtime_of(self.vllm_config, STOCK)
        if self.runtime is not None:
            self.reorder_batch_threshold = 1  # decoding rows first, so that they stay together
            announce(self.runtime, self)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """See AttentionMetadataBuilder."""
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.runtime is None or fast_build:
            return stock
        parts = plan(self.runtime, common_attn_metadata, self.block_size, self._stock)
        return stock if parts is None else SparseCPUMetadata(**vars(stock), parts=parts)

    def _stock(self, common: Any) -> Any:
        return super().build(0, common)


class SparseCPUImpl(CPUAttentionBackendImpl):
    """Runs the parts of a batch; everything else is its parent's."""

    slow = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = runtime_of(get_current_vllm_config(), STOCK)
        self.facts: Layer | None = None
        self.stock = super().forward

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """See AttentionImpl. This step's keys and values are in the cache when it is called."""

        def read(part: Part) -> tuple[Tensor, Tensor]:
            return self._read(layer, kv_cache, attn_metadata.block_table[part.first], part, query)

        if run(self, layer, query, kv_cache, attn_metadata, output, read):
            return output
        scales = (output_scale, output_block_scale)
        super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        return output

    def _read(self, layer: Any, cache: Tensor, table: Tensor, part: Part, query: Tensor) -> tuple[Tensor, Tensor]:
        pages, heads, block, double = cache.shape
        size, length = double // 2, 0 if part.row is None else part.row.end
        orders = packing.order(layer.dtype, size, block, layer.isa, self.kv_cache_dtype)
        halves = cache.view(pages, heads, 2 * block, size).chunk(2, dim=2)
        scales = (layer._k_scale_float, layer._v_scale_float)
        k, v = (
            packing.read(half, at, table, length, kind=self.kv_cache_dtype, scale=scale, dtype=query.dtype)
            for half, at, scale in zip(halves, orders, scales, strict=True)
        )
        return k, v
