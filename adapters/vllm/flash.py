"""The CUDA backend on vLLM's FlashAttention 3: its default on an H100."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from ..serving.parts import Batch
from .paged import PagedBackend, PagedImpl
from .shared import SparseBuilder

STOCK = "FLASH_ATTN"


@dataclass
class SparseFlashMetadata(FlashAttentionMetadata):
    """parts: of a batch with requests that run sparse. A field, so that vLLM's copies of metadata keep it."""

    parts: Batch | None = None


class SparseFlashBuilder(SparseBuilder, FlashAttentionMetadataBuilder):
    """Adds the parts of a batch to the metadata, if there is a request to run sparse."""

    host_name, metadata = STOCK, SparseFlashMetadata
    # Full graphs for decoding alone: a batch with prefill is planned on the host, which no graph may record.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = False  # parts are made from the block table that a step begins with


class SparseFlashImpl(PagedImpl, FlashAttentionImpl):
    """Runs the parts of a batch; everything else is its parent's."""

    host_name = STOCK


class SparseFlashBackend(PagedBackend, FlashAttentionBackend):
    """On vLLM's FlashAttention 3."""

    impl, builder = SparseFlashImpl, SparseFlashBuilder
