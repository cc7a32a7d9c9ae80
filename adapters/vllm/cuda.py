"""The CUDA backend: vLLM's Triton attention, whose prefill requests run sparse.

Keys and values of a request's context stay in their pages, which the attention kernels read through the block table;
stages that need the keys as one tensor have them copied then (see `Pages`).
"""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from sparseprefill.paged import Pages

from .attend import run
from .groups import announce
from .layer import Layer
from .pages import pages_of
from .plan import plan
from .runtime import NAME, runtime_of
from .split import Part

STOCK = "TRITON_ATTN"


class SparseTritonBackend(TritonAttentionBackend):
    """What ``--attention-backend CUSTOM`` selects."""

    @staticmethod
    def get_name() -> str:
        """A member of vLLM's list of backends."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[SparseTritonImpl]:
        """The attention of one layer."""
        return SparseTritonImpl

    @staticmethod
    def get_builder_cls() -> type[SparseTritonBuilder]:
        """The metadata of one step."""
        return SparseTritonBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Not promised: whether a request's chunk runs sparse depends on its length, which the batch decides."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Batches are cut by the host's copy of the query lengths."""
        return False


@dataclass
class SparseTritonMetadata(TritonAttentionMetadata):
    """parts: of a batch with requests that run sparse. A field, so that vLLM's copies of metadata keep it."""

    parts: list[Part] | None = None


class SparseTritonBuilder(TritonAttentionMetadataBuilder):
    """Adds the parts of a batch to the metadata, if there is a request to run sparse."""

    # Full graphs for decoding alone: a batch with prefill is planned on the host, which no graph may record.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = runtime_of(self.vllm_config, STOCK)
        self._recorded = False
        if self.runtime is not None:
            self.reorder_batch_threshold = 1  # decoding rows first, so that they stay together
            announce(self.runtime, self)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """See AttentionMetadataBuilder."""
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.runtime is None or fast_build or self._recorded:
            return stock
        parts = plan(self.runtime, common_attn_metadata, self.block_size, self._stock)
        return stock if parts is None else SparseTritonMetadata(**vars(stock), parts=parts)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """The parent's, without parts."""
        self._recorded = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._recorded = False

    def _stock(self, common: Any) -> Any:
        return super().build(0, common)


class SparseTritonImpl(TritonAttentionImpl):
    """Runs the parts of a batch; everything else is its parent's."""

    slow = True  # TRITON_ATTN has a seventh of cuDNN's speed on a long prompt
    supports_dcp = supports_pcp = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = runtime_of(get_current_vllm_config(), STOCK)
        self.facts: Layer | None = None
        self.stock = super().forward
        self.supports_quant_query_input = False  # estimators take the query as it is

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Outputs are written in the model's dtype."""
        return False

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

        def read(part: Part) -> Pages:
            return self.pages(layer, kv_cache, attn_metadata.block_table[part.first], part, query.dtype)

        if run(self, layer, query, kv_cache, attn_metadata, output, read):
            return output
        scales = (output_scale, output_block_scale)
        super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        return output

    def pages(self, layer: Any, cache: Tensor, table: Tensor, part: Part, dtype: torch.dtype) -> Pages:
        """Where a part's keys and values stand."""
        fp8 = self.fp8_dtype if self.kv_cache_dtype.startswith("fp8") else None
        length = 0 if part.row is None else part.row.end
        scales = (layer._k_scale, layer._v_scale)
        return pages_of(cache, self.head_size, table, length, dtype=dtype, fp8=fp8, scales=scales)
