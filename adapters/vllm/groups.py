"""What a metadata builder knows at start about the layers it serves."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from .layer import Layer, unsupported
from .runtime import Runtime


def announce(runtime: Runtime, builder: Any) -> None:
    """Tell the runtime of a builder's layers, and why some will stay dense."""
    config, pipeline = builder.vllm_config, runtime.session.pipeline
    model = config.model_config
    sizes = {"keys": int(model.max_model_len), "first_head": runtime.model.first_head}
    reasons: dict[int, str | None] = {}
    for name, module in get_layers_from_vllm_config(config, Attention, builder.layer_names).items():
        one = Layer.of(name, module.impl)
        reasons[one.index] = one.reason or unsupported(pipeline, one, module.impl, model.dtype, builder.device, **sizes)
    runtime.expect(reasons)
