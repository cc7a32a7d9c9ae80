"""The CUDA backend on vLLM's Triton attention, which takes whatever the adapter can."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from ..serving.parts import Batch
from .paged import PagedBackend, PagedImpl
from .shared import SparseBuilder

STOCK = "TRITON_ATTN"


@dataclass
class SparseTritonMetadata(TritonAttentionMetadata):
    """parts: of a batch with requests that run sparse. A field, so that vLLM's copies of metadata keep it."""

    parts: Batch | None = None


class SparseTritonBuilder(SparseBuilder, TritonAttentionMetadataBuilder):
    """Adds the parts of a batch to the metadata, if there is a request to run sparse."""

    host_name, metadata = STOCK, SparseTritonMetadata
    # Full graphs for decoding alone: a batch with prefill is planned on the host, which no graph may record.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH


class SparseTritonImpl(PagedImpl, TritonAttentionImpl):
    """Runs the parts of a batch; everything else is its parent's."""

    host_name = STOCK
    slow = True  # TRITON_ATTN has a seventh of cuDNN's speed on a long prompt


class SparseTritonBackend(PagedBackend, TritonAttentionBackend):
    """On vLLM's Triton attention."""

    impl, builder = SparseTritonImpl, SparseTritonBuilder
