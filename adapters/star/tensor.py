"""Weights shared by neighbouring ranks: transformers' tensor-parallel plan of a model, on a mesh of our choice.

transformers' own loader takes all processes for one model. Here they are several copies, one for each row of the mesh,
so the plan is applied by PyTorch to one row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from sparseprefill.errors import AttachError

WHOLE = {"replicated_with_grad_allreduce", "replicate", "replicated", "identity", "embedding_rowwise"}
"""Styles that leave a weight whole, here: a table of embeddings, which the head may share, is not cut."""
GATHERED = partial(ColwiseParallel, output_layouts=Replicate())
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": GATHERED,
    "colwise_rep": GATHERED,
    "rowwise": RowwiseParallel,
    "rowwise_rep": RowwiseParallel,
}
"""PyTorch's names for transformers' styles of dense layers."""


def shard(model: Any, mesh: Any) -> None:
    """Cut the model's weights by its plan (``config.base_model_tp_plan``) over a mesh of one dimension, in place.

    Every rank holds the whole weights before and its part after, with all of the embeddings. Raises AttachError for a
    model without a plan, with styles other than columns and rows, or with heads that do not divide.
    """
    config, size = model.config.get_text_config(), mesh.size()
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count % size:
            raise AttachError(f"{type(model).__name__} has {name} {count}: use a mesh whose size divides it")
    prefix = model.base_model_prefix
    plan = {f"{prefix}.{name}": style for name, style in (config.base_model_tp_plan or {}).items()}
    if not plan:
        raise AttachError(f"{type(model).__name__} has no tensor-parallel plan in transformers: leave it whole")
    if not getattr(config, "tie_word_embeddings", False):
        plan.update(getattr(model, "_tp_plan", None) or {})
    cut = {name: style for name, style in plan.items() if style not in WHOLE}
    for name, style in cut.items():
        if style not in STYLES:
            raise AttachError(f"{type(model).__name__}: the plan has {style!r} for {name}; only dense layers are cut")
    parallelize_module(model, mesh, {name: STYLES[style]() for name, style in cut.items()}, src_data_rank=None)
