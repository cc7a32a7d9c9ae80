"""Why a prefill call of a layer has to stay with the host's own attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .masks import Compact, LazyMask

OUTSIDE = (
    "called outside the attached decoder's forward (a forward that began before attaching, recomputed activations, "
    "or a layer run on its own)"
)
NOT_CAUSAL = "the layer is not causal"
GRADIENT = "gradients are recorded: wrap inference in torch.no_grad() or torch.inference_mode()"
TRAINING = "the model is in training mode: call model.eval()"
WEIGHTS = "attention weights are requested"
EXPORT = "the model is exported or traced: what comes of that is the stock model"
REPLACED = "is another module than at attaching: it runs like the one before, but no dry run has seen it"
SHARED = (
    "a module that shares the attached model's configuration, but is no part of its decoder, ran stock: another model, "
    "or a decoder that was put in the place of the attached one"
)
UNREACHED = (
    "did not reach the method in a forward in which others did: its module was replaced by one with a configuration or "
    "an attention of its own, it was skipped, or another implementation was set meanwhile"
)
DRAFT = "a draft was checked: that is decoding, however many tokens it has"
SEQUENCES = (tuple, list)  # a union of both would be made anew at every look
# Tensors that a layer may be given and that change nothing about who attends to whom.
HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "s_aux",
        "input_ids",
        "inputs_embeds",
        "labels",
        "logits_to_keep",
        "token_type_ids",
        "mm_token_type_ids",
    }
)


def layer_of(module: torch.nn.Module) -> int:
    """The layer's index among the decoder's; -1 where it has none."""
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else -1


def of_forward(decoder: torch.nn.Module, named: dict[str, Any]) -> str | None:
    """Why no layer of a forward may run sparse; None if nothing. named: its arguments.

    Reentrant gradient checkpointing runs the layers without gradients first, and once more with them: what a layer sees
    by itself says nothing then, what the decoder saw does.
    """
    if torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None:
        return EXPORT
    if decoder.training:
        return TRAINING
    if torch.is_grad_enabled():
        embeds = named.get("inputs_embeds")
        if (embeds is not None and embeds.requires_grad) or any(x.requires_grad for x in decoder.parameters()):
            return GRADIENT
    weights = named.get("output_attentions")
    if weights is None:
        weights = getattr(getattr(decoder, "config", None), "output_attentions", False)
    return WEIGHTS if weights else None


def of_host(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
) -> str | None:
    """What the host asks for that no pipeline does; None if nothing. Reads no value on the device."""
    if module.training:
        return TRAINING
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return GRADIENT
    if kwargs.get("dropout"):
        return "attention dropout is on"
    if kwargs.get("output_attentions"):
        return WEIGHTS
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return NOT_CAUSAL
    if kwargs.get("cache") is not None:
        return "the cache is paged"
    if not isinstance(mask, LazyMask) or mask.order.changed:
        return "the attention mask is custom, or neither causal nor a sliding window"
    rows, _, queries, keys = mask.order.shape
    if (rows, queries, keys) != (query.shape[0], query.shape[2], key.shape[2]):
        made, given = f"{rows} x {queries} queries and {keys} keys", f"{query.shape[0]} x {query.shape[2]}"
        return f"the mask is for {made}, the layer has {given} and {key.shape[2]}"
    odd = [name for name, value in kwargs.items() if name not in HARMLESS and _holds_tensor(value)]
    return f"the layer passes {', '.join(sorted(odd))}" if odd else None


def of_mask(compact: Compact, query: Tensor) -> str | None:
    """What in the mask no AttentionCall can say."""
    if compact.holes:
        return "the attention mask has holes: padding must be a prefix or a suffix of each row"
    if compact.used < query.shape[2]:
        return f"{query.shape[2]} queries come after {compact.used} keys"
    return None


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    return isinstance(value, SEQUENCES) and any(_holds_tensor(part) for part in value)
