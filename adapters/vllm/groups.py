"""A metadata builder's knowledge, at start, of the layers it serves."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.request import Request

from sparseprefill.pages import Pages

from ..serving.layer import Heads, Layer, dense_reason, example
from ..serving.warm import Sizes, warm_engine
from .admission import check_apart
from .blocks import watch
from .layer import heads_of, index_of, layer_of
from .names import Names
from .options import check_last
from .runtime import DRAFTS, KEYLESS, Runtime, step_of
from .split import check_fields

log = logging.getLogger(__name__)


def announce(runtime: Runtime, builder: Any) -> list[tuple[Layer, Any]]:
    """The layers of a builder that can run sparse, with their modules.

    The first builder of an engine surveys all layers of the process, so that what will not run sparse is said, or
    refused, before the engine serves anything; the first with such a layer has the gate's lengths said.
    """
    config, chosen = builder.vllm_config, runtime.options.layers
    runtime.names = Names.of_caller()
    if not runtime.surveyed:
        ours = served(runtime, config, Attention)
        survey(runtime, config, [(index_of(name), _reason(runtime, builder, name, one)) for name, one in ours])
    able = [
        (name, one)
        for name, one in served(runtime, config, Attention, builder.layer_names)
        if _reason(runtime, builder, name, one) is None
    ]
    layers = [(layer_of(name, module.impl), module) for name, module in able]
    asked = [(one, module) for one, module in layers if chosen is None or one.index in chosen]
    if asked:
        watch(runtime, config, able[0][0])
    if asked and not runtime.foretold:
        (layer, module), longest = asked[0], int(config.model_config.max_model_len)
        heads = heads_of(module.impl, runtime.model.first_head)
        call = example(layer, heads, config.model_config.dtype, builder.device, keys=longest)
        runtime.foretell(call, longest, "max_num_batched_tokens" if runtime.options.chunk is None else "chunk")
    return asked


def survey(runtime: Runtime, config: Any, reasons: Sequence[tuple[int, str | None]]) -> None:
    """Say, or refuse, before an engine serves anything, what will not run sparse; take in how long its steps are.

    reasons: of all layers of this process, by index, why they will stay dense, or None.
    """
    chosen = runtime.options.layers
    runtime.surveyed, runtime.requests.chunk = True, step_of(config, runtime.options)
    check_apart(config, Request)
    runtime.expect(reasons)
    check_last(
        config,
        runtime.options,
        runtime.model.identity.layers - 1,
        [index for index, why in reasons if why is None and (chosen is None or index in chosen)],
    )
    for kind, count in _keyless(config).items():
        runtime.leave(KEYLESS.format(kind=kind), count)
        log.info("sparseprefill: %d %s", count, KEYLESS.format(kind=kind))
    runtime.check_names()
    check_fields(CommonAttentionMetadata)


def served(runtime: Runtime, config: Any, kind: type, names: Sequence[str] | None = None) -> list[tuple[str, Any]]:
    """The layers of a kind that get metadata and look for parts in them, by name: no draft model's.

    names: of the layers to look among; None for all of this process.
    """
    found = get_layers_from_vllm_config(config, kind, names)
    if not runtime.surveyed:
        _leave_drafts(runtime, list(found.values()))
    return [(name, one) for name, one in found.items() if getattr(one.impl, "runtime", None) is runtime]


def _leave_drafts(runtime: Runtime, modules: Sequence[Any]) -> None:
    """Leave to vLLM the layers that it calls a draft model's, as runner V2 does once all are loaded."""
    for one in modules:
        if getattr(one, "is_draft_layer", False) and getattr(one.impl, "runtime", None) is runtime:
            one.impl.runtime = None
            runtime.leave(DRAFTS)


def _keyless(config: Any) -> Counter[str]:
    """Count the layers that keep a state in place of keys, by kind as vLLM calls it, such as gdn_attention."""
    try:
        from vllm.model_executor.layers.mamba.abstract import MambaBase
    except ImportError:  # a vLLM that keeps its base class elsewhere: such layers are not counted, and stay vLLM's own
        return Counter()
    kinds = [one.mamba_type for one in get_layers_from_vllm_config(config, MambaBase).values()]
    return Counter(str(getattr(kind, "name", kind)).lower() for kind in kinds)


def _reason(runtime: Runtime, builder: Any, name: str, module: Any) -> str | None:
    layer, heads = layer_of(name, module.impl), heads_of(module.impl, runtime.model.first_head)
    return reason_of(runtime, builder.vllm_config, layer, heads, builder.device)


def reason_of(runtime: Runtime, config: Any, layer: Layer, heads: Heads, device: torch.device) -> str | None:
    """Reason for which a layer will stay dense, or None. AttachError where a stage cannot be asked."""
    return dense_reason(
        runtime.session.route,
        layer,
        heads,
        config.model_config.dtype,
        device,
        keys=int(config.model_config.max_model_len),
        min_query=runtime.options.min_query,
        step=step_of(config, runtime.options),
        bound="max_num_batched_tokens" if runtime.options.chunk is None else "chunk",
    )


def warm_up(runtime: Runtime, builder: Any, layers: Sequence[tuple[Layer, Any]]) -> None:
    """Compile the kernels that a builder's layers need, if vLLM does so with its own or the options ask for it."""
    config = builder.vllm_config
    kernels = getattr(config, "kernel_config", None)
    wanted = runtime.options.warm_up
    if not layers or not (getattr(kernels, "enable_jit_warmup", True) if wanted is None else wanted):
        return
    module, dtype = layers[0][1], config.model_config.dtype
    impl, spec = module.impl, builder.kv_cache_spec
    layout = str(getattr(config.cache_config, "kv_cache_layout", None) or "LBNHC")
    longest = int(config.model_config.max_model_len)
    sizes = Sizes(
        query_heads=int(impl.num_heads),
        kv_heads=int(impl.num_kv_heads),
        head_dim=int(impl.head_size),
        page=int(builder.block_size),
        stored=spec.dtype,
        dtype=dtype,
        outside=layout.index("H") < layout.index("N"),
        step=step_of(config, runtime.options),
        longest=longest,
        small=runtime.options.min_query if impl.slow and runtime.session.route.gate is not None else 0,
        device=builder.device,
    )

    def pages(cache: Tensor, table: Tensor, keys: int) -> Pages:
        found: Pages = impl.read(module, cache, table, keys, dtype)
        return found

    warm_engine(runtime, [layer for layer, _ in layers], sizes, pages)
