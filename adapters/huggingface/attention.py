"""The two functions that a handle registers: attention, and the mask that goes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from sparseprefill.call import AttentionCall
from sparseprefill.errors import InvalidCallError

from ..session.session import Fallback
from . import reasons
from .eager import eagerly
from .masks import Compact, classify, encode, is_compact, plain
from .original import Original, first_keys
from .state import Attachment, Forward, current

Ref = Callable[[], "Attachment | None"]  # a weak reference
Outputs = tuple[Tensor, Tensor | None]


def make_attention(ref: Ref, original: Original, min_query: int) -> Callable[..., Outputs]:
    """The attention function. It decides on the query length alone, so that decoding can be compiled."""

    @eagerly
    def prefill(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> Any:
        attached = ref()
        if attached is None or not attached.active or not attached.owns(module):
            return _dense(original, None, module, query, key, value, mask, kwargs)
        return _attend(attached, module, query, key, value, mask, kwargs)

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        if query.shape[2] < min_query:
            return original.attention(module)(module, query, key, value, attention_mask, **kwargs)
        return prefill(module, query, key, value, attention_mask, kwargs)

    return attention


def make_mask(ref: Ref, original: Original, min_query: int) -> Callable[..., Any]:
    """The mask function: compact for a prefill that is causal or sliding, the host's own for everything else."""

    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] = causal_mask_function,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        asked = {
            "batch_size": batch_size,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": mask_function,
            "attention_mask": attention_mask,
            **kwargs,
        }
        found = _compact(ref, asked) if q_length >= min_query else None
        if found is not None:
            return found
        make = original.mask()
        return None if make is None else make(**asked)

    return mask


@eagerly
def _compact(ref: Ref, asked: dict[str, Any]) -> Tensor | None:
    attached, padding = ref(), asked["attention_mask"]
    if attached is None or not attached.active or (padding is not None and padding.dim() != 2):
        return None
    pattern = classify(asked["mask_function"], asked.get("local_size"), asked.get("allow_is_causal_skip", True))
    if pattern is None:
        return None
    sizes = (asked["batch_size"], asked["q_length"], asked["kv_length"], asked["q_offset"], asked["kv_offset"])
    mask = encode(pattern, *sizes, padding, asked.get("device", "cpu"))
    forward = current(attached)
    if forward is not None and padding is None and (compact := plain(pattern, *sizes, mask.device)) is not None:
        forward.masks[id(mask)] = (mask, compact)
    return mask


def _attend(
    attached: Attachment,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> Any:
    layer, forward = reasons.layer_of(module), current(attached)
    reason = reasons.of_host(module, query, key, value, mask, kwargs, inside=forward is not None)
    if reason is None and forward is not None:
        compact = forward.decoded(mask)
        reason = reasons.of_mask(compact, query, key, mask)
        if reason is None:
            # A gate judges by sizes: what it said of one layer holds for the next.
            rows = query.shape
            sizes = (id(mask), rows, key.shape, value.shape, query.dtype, query.device)
            if (small := forward.small.get(sizes)) is not None:
                attached.session.again(layer, small, (rows[0], rows[2], compact.used))
                return _dense(attached.original, forward, module, query, key, value, mask, kwargs)
            call = _call(attached, layer, query, key, value, compact, kwargs)
            if isinstance(call, AttentionCall):
                outcome = attached.session.run(call, forward.progress.prefill)
                if not isinstance(outcome, Fallback):
                    return outcome.out.transpose(1, 2).contiguous(), None
                if outcome.small:
                    forward.small[sizes] = outcome
                return _dense(attached.original, forward, module, query, key, value, mask, kwargs)
            reason = call
    if reason == reasons.NOT_CAUSAL and attached.session.cross(layer):
        return _dense(attached.original, forward, module, query, key, value, mask, kwargs)
    attached.session.decline(layer, reason or reasons.OUTSIDE, (query.shape[0], query.shape[2], key.shape[2]))
    return _dense(attached.original, forward, module, query, key, value, mask, kwargs)


def _call(
    attached: Attachment,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compact: Compact,
    kwargs: dict[str, Any],
) -> AttentionCall | str:
    """The call, over views of the slots in use; the reason where it cannot be expressed."""
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if not attached.original.applies_extras and (softcap is not None or sinks is not None):
        attached.session.note(
            f"{attached.original.name} ignores this model's softcap or sinks, and so does prefill here"
        )
        softcap = sinks = None
    used = compact.used
    try:
        return AttentionCall(
            query,
            *first_keys(used, key, value),
            scale=kwargs.get("scaling"),
            q_offset=used - query.shape[2],
            layer=layer,
            starts=compact.starts,
            lengths=compact.lengths,
            window=compact.window,
            softcap=softcap,
            sinks=sinks,
        )
    except InvalidCallError as error:
        return str(error)


def _dense(
    original: Original,
    forward: Forward | None,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> Any:
    """The host's own attention, with a mask rebuilt for it where ours is compact; once per forward and mask."""
    if not is_compact(mask):
        return original.attention(module)(module, query, key, value, mask, **kwargs)
    if forward is None:
        return original.dense(module, query, key, value, mask, kwargs)
    compact = forward.decoded(mask)
    if id(mask) not in forward.rebuilt:
        forward.rebuilt[id(mask)] = original.expand(module, query, compact)
    return original.dense_with(module, query, key, value, forward.rebuilt[id(mask)], compact.used, kwargs)
