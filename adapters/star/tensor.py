"""Weights shared by neighbouring ranks: transformers' tensor-parallel plan of a model, on a mesh of our choice.

transformers' own loader takes all processes for one model. Here they are several copies, one for each row of the mesh,
so the plan is applied by PyTorch to one row alone.
"""

from __future__ import annotations

import re
from typing import Any

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from sparseprefill.errors import AttachError

WHOLE = {"replicated_with_grad_allreduce", "replicate", "replicated", "identity"}
"""Styles that leave a weight whole."""


def shard(model: Any, mesh: Any) -> None:
    """Cut the model's weights by its plan (``config.base_model_tp_plan``) over a mesh of one dimension, in place.

    Every rank holds the whole weights before and its part after. Raises AttachError for a model without a plan, with
    styles other than columns and rows, or with heads that do not divide.
    """
    config, size = model.config.get_text_config(), mesh.size()
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count % size:
            raise AttachError(f"{type(model).__name__} has {name} {count}: pass a tensor_parallel that divides it")
    prefix = model.base_model_prefix
    plan = {f"{prefix}.{name}": style for name, style in (config.base_model_tp_plan or {}).items()}
    if not plan:
        raise AttachError(f"{type(model).__name__} has no tensor-parallel plan in transformers: pass tensor_parallel=1")
    tied = getattr(config, "tie_word_embeddings", False)
    if not tied:
        plan.update(getattr(model, "_tp_plan", None) or {})
    found: dict[str, ParallelStyle] = {}
    for name, _ in model.named_modules():
        style = _style(plan, name)
        if style is None or style in WHOLE:
            continue
        made = _made(style)
        if made is None:
            raise AttachError(f"{type(model).__name__}: the plan has {style!r} for {name}; only dense layers are cut")
        found[name] = made
    parallelize_module(model, mesh, found, src_data_rank=None)


def _style(plan: dict[str, str], name: str) -> str | None:
    for pattern, style in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            return style
    return None


def _made(style: str) -> ParallelStyle | None:
    if style == "colwise":
        return ColwiseParallel()
    if style in ("colwise_gather_output", "colwise_rep"):
        return ColwiseParallel(output_layouts=Replicate())
    return RowwiseParallel() if style in ("rowwise", "rowwise_rep") else None
