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
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from sparseprefill.pages import Pages

from ..serving.parts import Part
from .pages import pages_of
from .runtime import NAME
from .shared import SparseBuilder, SparseImpl

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


class SparseTritonBuilder(SparseBuilder, TritonAttentionMetadataBuilder):
    """Adds the parts of a batch to the metadata, if there is a request to run sparse."""

    host_name, metadata = STOCK, SparseTritonMetadata
    # Full graphs for decoding alone: a batch with prefill is planned on the host, which no graph may record.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH


class SparseTritonImpl(SparseImpl, TritonAttentionImpl):
    """Runs the parts of a batch; everything else is its parent's."""

    host_name = STOCK
    slow = True  # TRITON_ATTN has a seventh of cuDNN's speed on a long prompt
    supports_dcp = supports_pcp = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False  # estimators take the query as it is

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Outputs are written in the model's dtype."""
        return False

    def read(self, layer: Any, cache: Tensor, table: Tensor, length: int, dtype: torch.dtype) -> Pages:
        """Where a request's keys and values stand."""
        fp8 = self.fp8_dtype if self.kv_cache_dtype.startswith("fp8") else None
        scales = (layer._k_scale, layer._v_scale)
        copies = self.runtime is None or self.runtime.options.copies
        return pages_of(cache, self.head_size, table, length, dtype=dtype, fp8=fp8, scales=scales, copies=copies)
