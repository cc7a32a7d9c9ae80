"""Prefill of multi-head latent attention (MLA), selected by ``mla_prefill_backend`` of vLLM's attention config.

It stands on the backend that vLLM would choose, whatever attention decodes: that computes what does not run sparse. Two
things vLLM does not tell such a backend: which layer asks, and which requests a batch has. So it goes around
`forward_mha` of each layer's attention, and around `build` of the metadata builder that it is made for.
"""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from attrs import evolve
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import MLAAttention, MLACommonBaseImpl
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.selector import MLADimensions, MLAPrefillSelectorConfig

from sparseprefill.errors import AttachError, UnsupportedCallError

from ..serving.attend import run
from ..serving.layer import WINDOW, Heads, Layer
from ..serving.parts import Batch, Part
from .blocks import watch
from .groups import reason_of, served, survey
from .layer import INDEXED, index_of
from .names import Names
from .options import drafted
from .plan import plan
from .runtime import LATENT_FLAG, Host, Runtime, layer_runtime

ITSELF = "{name} computes prefill without a prefill backend{remedy}"
REMEDIES = {"AMX_MLA": ": add --attention-backend CPU_MLA"}
ROUNDED = "queries are in {dtype}: leave use_prefill_query_quantization out"
CACHE = "the KV cache is {dtype}: a context is read from bf16, fp16 and fp32 alone"
STRANGE = "this vLLM makes its prefill backends elsewhere, so no batch would be known: use vLLM 0.32, or leave it out"
Asking = tuple[Layer, Any, Tensor]
"""A layer, its attention and its cache."""
RAISED = "min_query is {more} in place of {least}: vLLM computes up to {most} tokens of a request as decoding here"


class SparsePrefill(Host):
    """Mixed into a prefill backend of vLLM, ahead of it.

    host: the backend itself. runtime: of the engine; None where the backend is not selected, and for a draft model's
    layers: all is the host's then. parts: of the step's prefill rows; None where the host computes them all. asking:
    the layer that asks now, its attention, and its cache.
    """

    host: ClassVar[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.runtime = layer_runtime(self.vllm_config, self.get_name(), latent=True)
        self.parts: Batch | None = None
        self.asking: Asking | None = None
        self._step: Any = None
        self._sparse: set[int] = set()
        self._make = partial(self.host, *args, **kwargs)
        if self.runtime is not None:
            _watch(self.vllm_config, self.runtime)

    def clone(self) -> Any:
        """vLLM makes one for each metadata builder: that is the one at work."""
        made = super().clone()
        if made.runtime is not None:
            made._join(sys._getframe(1).f_locals)
        return made

    def supports_quant_output(self, quant_key: Any) -> bool:
        """Outputs are written in the model's dtype."""
        return self.runtime is None and bool(super().supports_quant_output(quant_key))

    def supports_out(self) -> bool:
        """Outputs are tensors of our own."""
        return self.runtime is None and bool(super().supports_out())

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Take a step's metadata, as the host does; the parts of its batch come behind."""
        super().prepare_metadata(prefill_metadata)
        self._step, self.parts = prefill_metadata, None

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:
        """Attention of a step's rows over the keys of their step.

        A request that runs sparse sees all its keys here at once; what vLLM adds of its context then weighs nothing.
        """
        self._sparse = set()
        runtime, parts, asking = self.runtime, self.parts, self.asking
        if runtime is None or parts is None or asking is None:
            return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)
        layer, left = asking[0], list[int]()
        found = v.new_empty(*q.shape[:2], self.v_head_dim)
        lse = torch.zeros(q.shape[1], len(q), dtype=torch.float32, device=q.device) if return_softmax_lse else None

        def stock(part: Part, rows: Tensor, into: Tensor) -> None:
            left.append(part.first)
            at = slice(part.begin, part.end)
            made = part.metadata().run_prefill_new_tokens(rows, k[at], v[at], return_softmax_lse)
            if lse is not None:
                made, lse[:, at] = made
            into.copy_(made[..., : self.v_head_dim])

        if q.dtype.itemsize == 1:
            layer = evolve(layer, reason=ROUNDED.format(dtype=q.dtype))
        if not run(runtime, layer, parts, q, found, (), partial(self._keys, asking, k, v), stock, slow=False):
            return super().run_prefill_new_tokens(q, k, v, return_softmax_lse, out, output_scale)
        self._sparse = {part.first for part in parts if part.row is not None}.difference(left)
        return found if lse is None else (found, lse)

    def run_prefill_context_chunk(
        self, chunk: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention over a piece of the context, which weighs nothing for requests that ran sparse."""
        ours = self._sparse.intersection(range(chunk.request_slice.start, chunk.request_slice.stop))
        if ours and len(ours) == chunk.request_slice.stop - chunk.request_slice.start:
            lse = torch.full((q.shape[1], len(q)), -torch.inf, dtype=torch.float32, device=q.device)
            return v.new_zeros(*q.shape[:2], self.v_head_dim), lse
        found, lse = super().run_prefill_context_chunk(chunk, q, k, v, out)
        if not self._sparse:
            return found, lse
        found = found[..., : self.v_head_dim].contiguous()  # as wide as where all ran sparse
        for part in self.parts or ():
            if part.first in ours:
                at = slice(part.begin - chunk.token_slice.start, part.end - chunk.token_slice.start)
                found[at], lse[:, at] = 0.0, -torch.inf
        return found, lse

    def _join(self, given: dict[str, Any]) -> None:
        """Plan the steps of the metadata builder among whose locals this is made."""
        builder: Any = given.get("self")
        names, runtime = given.get("layer_names"), self.runtime
        building = getattr(builder, "build", None)
        if runtime is None or building is None or names is None:
            raise AttachError(f"{LATENT_FLAG}: {STRANGE}")
        _announce(self, int(getattr(builder, "reorder_batch_threshold", None) or 1))
        layers = len(served(runtime, self.vllm_config, MLAAttention, names))

        @functools.wraps(building)
        def build(common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            self._step = self.parts = None  # vLLM prepares this for a step with prefills alone
            made = building(common_prefix_len, common_attn_metadata, fast_build)
            if not fast_build:  # that is a speculator's
                parts = plan(runtime, common_attn_metadata, _nothing, layers)
                if parts is not None and self._step is not None:
                    self.parts = self._of_prefills(parts, common_attn_metadata)
            return made

        builder.build = build

    def _of_prefills(self, parts: Batch, common: Any) -> Batch:
        """The parts of a batch without its decoding rows, which come first; counted from the first prefill."""
        decoding = int(common.num_reqs) - len(self._step.query_lens_cpu)
        rows = int(common.query_start_loc_cpu[decoding])
        found = Batch(part for part in parts if part.last > decoding)
        for part in found:
            part.first, part.last = max(part.first - decoding, 0), part.last - decoding
            part.begin, part.end = max(part.begin - rows, 0), part.end - rows
            part.make = partial(self._own, part.first, part.last)
        return found

    def _own(self, first: int, last: int) -> Any:
        """The host's own backend, ready for the new tokens of some prefills of the step."""
        made, step = self._make(), self._step
        loc, lengths = step.query_start_loc[first : last + 1], step.query_lens_cpu[first:last]
        some = {"query_start_loc": loc - loc[0], "query_lens_cpu": lengths, "block_table": step.block_table[first:last]}
        longest = int(lengths.max())
        made.prepare_metadata(replace(step, **some, max_query_len=longest, chunked_context=None, prefill_backend=made))
        return made

    def _keys(self, asking: Asking, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """``[1, H, N, D]``: keys and values of a request, those of its context made again from the cache."""
        k, v = k[part.begin : part.end], v[part.begin : part.end]
        if part.row is not None and part.row.start:
            past, values = self._context(asking, part.first, part.row.start)
            k, v = torch.cat((past, k)), torch.cat((values, v))
        return k.transpose(0, 1)[None], v.transpose(0, 1)[None]

    def _context(self, asking: Asking, i: int, length: int) -> tuple[Tensor, Tensor]:
        """``[length, H, D]`` each: what vLLM makes of the latents of the i-th prefill, piece by piece."""
        _, impl, cache = asking
        if cache.dtype.itemsize == 1:
            raise UnsupportedCallError([CACHE.format(dtype=cache.dtype)])
        blocks = self._step.block_table[i, : -(-length // cache.shape[1])].long()
        latent, rank = cache[blocks].flatten(0, 1)[:length], self.kv_lora_rank
        both = impl.kv_b_proj(latent[:, :rank].contiguous())[0]
        both = both.view(length, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        nope, values = both.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        rope = latent[:, None, rank:].expand(-1, self.num_heads, -1)
        return torch.cat((nope, rope), -1), values


@cache
def sparse(host: type) -> Any:
    """The backend on top of one of vLLM's."""
    return type(f"Sparse{host.__name__}", (SparsePrefill, host), {"host": host, "__module__": __name__})


SparseCPUPrefill = sparse(CPUSDPAMLAPrefillBackend)
"""Takes the place of ``CPU``: vLLM asks for no other on a CPU, whatever is selected."""


def __getattr__(name: str) -> Any:
    """`SparsePrefillBackend`, for which vLLM asks by its path: on top of the one that it would choose by itself."""
    if name != "SparsePrefillBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return sparse(current_platform.get_mla_prefill_backend_cls(_sizes(get_current_vllm_config_or_none())))


def _sizes(config: Any) -> MLAPrefillSelectorConfig:
    """Sizes by which vLLM chooses a prefill backend."""
    model = getattr(config, "model_config", None)
    if model is None:
        return MLAPrefillSelectorConfig(dtype=torch.get_default_dtype())
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    dims = MLADimensions(**{name: getattr(model.hf_text_config, name, 0) for name in names})
    return MLAPrefillSelectorConfig(dtype=model.dtype, mla_dimensions=dims)


def _watch(config: Any, runtime: Runtime) -> None:
    """Let the layer that is being made say so whenever it asks for prefill."""
    layer: Any = next(reversed(config.compilation_config.static_forward_context.values()), None)
    if not isinstance(layer, MLAAttention) or getattr(layer, "prefill_backend", None) is not None:
        return  # no layer is being made: it is a clone's
    impl, facts = layer.impl, layer_of(layer)
    impl.runtime, impl.forward_mha = runtime, _telling(impl, facts, impl.forward_mha)


def _telling(impl: Any, facts: Layer, computing: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(computing)
    def forward_mha(
        q: Tensor, latent: Tensor, rope: Tensor, cache: Tensor, metadata: Any, *args: Any, **kw: Any
    ) -> None:
        backend = metadata.prefill.prefill_backend
        backend.asking = None if impl.runtime is None else (facts, impl, cache)
        try:
            computing(q, latent, rope, cache, metadata, *args, **kw)
        finally:
            backend.asking = None

    return forward_mha


def layer_of(layer: Any) -> Layer:
    """Facts of one of vLLM's MLAAttention."""
    return Layer(index_of(layer.layer_name), float(layer.scale), None, None, _reason(layer))


def _reason(layer: Any) -> str | None:
    if type(layer.impl).forward_mha is not MLACommonBaseImpl.forward_mha:
        name = layer.attn_backend.get_name()
        return ITSELF.format(name=name, remedy=REMEDIES.get(name, ""))
    if layer.impl.is_sparse:
        return INDEXED
    if layer.sliding_window is not None:
        return WINDOW
    if layer.use_pcp:
        return "the prompt is spread over devices (context parallelism)"
    if index_of(layer.layer_name) < 0:
        return f"the layer's name {layer.layer_name!r} has no index"
    return None


def _announce(backend: Any, decoded: int) -> None:
    """Say, or refuse, before the engine serves anything, what will not run sparse. decoded: rows of a request that vLLM
    computes as decoding, at most."""
    runtime, config = backend.runtime, backend.vllm_config
    runtime.names = Names.of_caller()
    if not runtime.surveyed:
        size = backend.qk_nope_head_dim + backend.qk_rope_head_dim
        heads = Heads(backend.num_heads, backend.num_heads, size, runtime.model.first_head, backend.v_head_dim)
        device = torch.device(current_platform.device_type)
        _leave_decoding(runtime, max(1 + drafted(config), decoded))
        ours = served(runtime, config, MLAAttention)
        layers = [layer_of(one) for _, one in ours]
        reasons = [(one.index, reason_of(runtime, config, one, heads, device)) for one in layers]
        survey(runtime, config, reasons)
        watch(runtime, config, ours[0][0] if ours else "")
        runtime.inform()


def _leave_decoding(runtime: Runtime, most: int) -> None:
    """Run no request's rows sparse that vLLM computes as decoding, up to so many of each; the report notes it."""
    least = runtime.options.min_query
    if least <= most:
        runtime.options = evolve(runtime.options, min_query=most + 1)
        runtime.leave(RAISED.format(more=most + 1, least=least, most=most))


def _nothing(common: Any) -> None:
    """In place of metadata of the host's, which `_own` makes."""
