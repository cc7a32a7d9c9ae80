"""Shared parts of the backends of all platforms: mixed into vLLM's own classes, ahead of them."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention

from sparseprefill.pages import Pages

from ..serving.attend import Read, Stock, run
from ..serving.layer import Layer
from ..serving.parts import Part
from .groups import announce, served, warm_up
from .layer import layer_of
from .plan import plan
from .runtime import Host, layer_runtime, runtime_of


class SparseBackend(Host):
    """Names vLLM's two classes of a backend: impl, the attention of one layer; builder, the metadata of one step."""

    impl: ClassVar[Any]
    builder: ClassVar[Any]

    @classmethod
    def get_impl_cls(cls) -> Any:
        """The attention of one layer."""
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> Any:
        """The metadata of one step."""
        return cls.builder


class SparseImpl(Host):
    """Attention of one layer: runs the parts of a batch; everything else is the host's.

    host_name: of the host's backend. slow: whether its dense attention is slower than the library's.
    """

    host_name: ClassVar[str]
    slow: ClassVar[bool] = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = layer_runtime(get_current_vllm_config(), self.host_name)
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
        """Do vLLM's AttentionImpl's work, in parts. This step's keys and values are in the cache when it is called."""
        parts = getattr(attn_metadata, "parts", None)
        runtime = self.runtime
        if parts is not None and runtime is not None:
            if self.facts is None:
                self.facts = layer_of(layer.layer_name, self)
            slots = self.slots(layer, query, kv_cache, attn_metadata, output)
            read, stock = self._hands(layer, kv_cache, attn_metadata, query.dtype)
            if run(runtime, self.facts, parts, query, output, slots, read, stock, slow=self.slow):
                return output
        scales = (output_scale, output_block_scale)
        self.stock(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        return output

    def _hands(self, layer: Any, cache: Tensor, metadata: Any, dtype: torch.dtype) -> tuple[Read, Stock]:
        """The reader of a part's keys, and the host's own way to compute it."""

        def read(part: Part) -> tuple[Tensor, Tensor] | Pages:
            length = 0 if part.row is None else part.row.end
            return self.read(layer, cache, metadata.block_table[part.first], length, dtype)

        def stock(part: Part, rows: Tensor, out: Tensor) -> None:
            self.stock(layer, rows, None, None, cache, part.metadata(), out)

        return read, stock

    def slots(self, layer: Any, query: Tensor, cache: Tensor, metadata: Any, output: Tensor) -> tuple[Tensor, ...]:
        """Tensors of the host in which the layers of a step differ; none where what they come to is not repeated."""
        return ()

    @abstractmethod
    def read(
        self, layer: Any, cache: Tensor, table: Tensor, length: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | Pages:
        """The first `length` keys and values of a request: see `attend.Read`. table: its row of the block table."""


class SparseBuilder(Host):
    """Metadata of one step: the host's, with the parts of a batch that has a request to run sparse.

    host_name: of the host's backend. metadata: the host's class with a field `parts`.
    """

    host_name: ClassVar[str]
    metadata: ClassVar[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = runtime_of(self.vllm_config, self.host_name)
        self._recorded, self._layers = False, 0
        if self.runtime is not None:
            self.reorder_batch_threshold = 1  # decoding rows first, so that they stay together
            warm_up(self.runtime, self, announce(self.runtime, self))
            self._layers = len(served(self.runtime, self.vllm_config, Attention, self.layer_names))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """vLLM's metadata of a step, with the parts of its batch."""
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.runtime is None or fast_build or self._recorded:
            return stock
        parts = plan(self.runtime, common_attn_metadata, self._stock, self._layers)
        return stock if parts is None else self.metadata(**vars(stock), parts=parts)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """The host's, without parts: a batch with prefill is planned on the host, which no graph may record."""
        self._recorded = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._recorded = False

    def _stock(self, common: Any) -> Any:
        return super().build(0, common, fast_build=True)  # FlashAttention's schedules made ahead share one buffer
