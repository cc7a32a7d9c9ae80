"""What a metadata builder knows at start about the layers it serves."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from .layer import Layer, unsupported
from .runtime import Runtime
from .warm import Sizes, warm_engine


def announce(runtime: Runtime, builder: Any) -> list[tuple[Layer, Any]]:
    """Tell the runtime of a builder's layers, and why some will stay dense. Returns the others, with their modules."""
    config, route = builder.vllm_config, runtime.session.route
    model, chosen = config.model_config, runtime.options.layers
    sizes = {"keys": int(model.max_model_len), "first_head": runtime.model.first_head}
    reasons: dict[int, str | None] = {}
    able: list[tuple[Layer, Any]] = []
    for name, module in get_layers_from_vllm_config(config, Attention, builder.layer_names).items():
        one = Layer.of(name, module.impl)
        reasons[one.index] = one.reason or unsupported(route, one, module.impl, model.dtype, builder.device, **sizes)
        if reasons[one.index] is None and (chosen is None or one.index in chosen):
            able.append((one, module))
    runtime.expect(reasons)
    return able


def warm_up(runtime: Runtime, builder: Any, layers: Sequence[tuple[Layer, Any]]) -> None:
    """Compile the kernels that a builder's layers need, if vLLM does so with its own or the options ask for it."""
    config = builder.vllm_config
    kernels = getattr(config, "kernel_config", None)
    wanted = runtime.options.warm_up
    if not layers or not (getattr(kernels, "enable_jit_warmup", True) if wanted is None else wanted):
        return
    impl, spec = layers[0][1].impl, builder.kv_cache_spec
    layout = str(getattr(config.cache_config, "kv_cache_layout", None) or "LBNHC")
    longest = int(config.model_config.max_model_len)
    sizes = Sizes(
        query_heads=int(impl.num_heads),
        kv_heads=int(impl.num_kv_heads),
        head_dim=int(impl.head_size),
        page=int(builder.block_size),
        stored=spec.dtype,
        dtype=config.model_config.dtype,
        outside=layout.index("H") < layout.index("N"),
        step=min(int(config.scheduler_config.max_num_batched_tokens), longest),
        longest=longest,
        small=runtime.options.min_query if impl.slow and runtime.session.route.gate is not None else 0,
        device=builder.device,
    )
    warm_engine(runtime, layers, sizes)
