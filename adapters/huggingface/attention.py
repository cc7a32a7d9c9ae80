"""The two functions that stand for an implementation: attention, and the mask that goes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from sparseprefill.call import AttentionCall
from sparseprefill.errors import InvalidCallError

from ..session.session import Fallback
from . import reasons
from .masks import Compact, LazyMask, Order, classify, stock
from .original import Original, autocast_off, eagerly, lowered
from .state import Attachment, Forward, adopt, is_stock, owner_of, serving, sharing
from .switch import LOCK, name_of

Outputs = tuple[Tensor, Tensor | None]


def register(original: Original, min_query: int) -> str:
    """The name under which transformers runs prefill through the attachment of a layer's decoder, if there is one.

    All attachments over one implementation share the name. Layers that nobody attached run the implementation itself:
    other models with the same config object, copies, and what is left of models that are gone.
    """
    with LOCK:
        name, new = name_of(original.name, min_query)
        if new:
            AttentionInterface.register(name, make_attention(original, min_query))
            AttentionMaskInterface.register(name, make_mask(original, min_query))
    return name


def make_attention(original: Original, min_query: int) -> Callable[..., Outputs]:
    """The attention function. It decides on the query length alone, so that decoding can be compiled."""

    @eagerly
    def prefill(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> Any:
        forward = serving(module)
        attached = owner_of(module) if forward is None else forward.owner
        if attached is None:
            forward = _met(module)
            attached = None if forward is None else forward.owner
        if attached is None or (forward is not None and forward.stock):
            return original.attention(module)(module, query, key, value, stock(mask), **kwargs)
        return _attend(attached, forward, original, module, query, key, value, mask, kwargs)

    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        if query.shape[2] < min_query:
            if isinstance(attention_mask, LazyMask):  # the layer dropped some of its queries
                attention_mask = stock(attention_mask)
            return original.attention(module)(module, query, key, value, attention_mask, **kwargs)
        return prefill(module, query, key, value, attention_mask, kwargs)

    return attention


def _met(module: torch.nn.Module) -> Forward | None:
    """The forward of a module that was not there when its model was attached. Such modules are noted."""
    forward = adopt(module)
    if forward is not None and not forward.stock:
        forward.owner.tell(f"the attention of layer {reasons.layer_of(module)} {reasons.REPLACED}")
    if forward is None and (other := sharing(module)) is not None:
        other.session.note(reasons.SHARED)
    return forward


def make_mask(original: Original, min_query: int) -> Callable[..., Any]:
    """The mask function: lazy for a prefill that is causal or sliding, the host's own for everything else."""

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
        found = _lazy(original, asked) if q_length >= min_query else None
        if found is not None:
            return found
        make = original.mask()
        return None if make is None else make(**asked)

    return mask


@eagerly
def _lazy(original: Original, asked: dict[str, Any]) -> LazyMask | None:
    make, padding = original.mask(), asked["attention_mask"]
    if make is None or is_stock() or (padding is not None and padding.dim() != 2):
        return None
    pattern = classify(asked["mask_function"], asked.get("local_size"), asked.get("allow_is_causal_skip", True))
    return None if pattern is None else LazyMask.of(Order.of(pattern, make, asked))


def _attend(
    attached: Attachment,
    forward: Forward | None,
    original: Original,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> Any:
    dense = original.attention(module)
    draft = 0 if forward is None else forward.draft
    if draft and isinstance(mask, LazyMask) and mask.order.shape[2] == query.shape[2] and not mask.order.changed:
        # A prompt and a draft behind it: the prompt comes out as it does alone, and the draft is decoding.
        first, last = mask.order.cut(draft)
        found = _result(attached, forward, module, query[:, :, :-draft], key, value, first, kwargs)
        if found is not None:
            behind, _ = dense(module, query[:, :, -draft:], key, value, last.stock(), **kwargs)
            return torch.cat([found, behind], 1), None
    else:
        found = _result(attached, forward, module, query, key, value, mask, kwargs)
        if found is not None:
            return found, None
    return dense(module, query, key, value, stock(mask), **kwargs)


def _result(
    attached: Attachment,
    forward: Forward | None,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """The layer's output ``[B, Nq, Hq, Dv]`` by the session; None, recorded with its reason, where the host shall."""
    layer, session = reasons.layer_of(module), attached.session
    if forward is not None:
        forward.seen.add(layer)
    shape = (query.shape[0], query.shape[2], key.shape[2])
    if forward is None:
        if session.strict:  # a forward that began before attaching is none that `strict` speaks of
            session.note(f"layer {layer} {reasons.OUTSIDE}")
        else:
            session.decline(layer, reasons.OUTSIDE, shape)
        return None
    reason = forward.dense or reasons.of_host(module, query, key, value, mask, kwargs)
    if reason == reasons.NOT_CAUSAL and session.cross(layer):
        return None
    if reason is not None:
        session.decline(layer, reason, shape)
        return None
    compact = mask.order.compact()
    # A gate judges by sizes: what it said of one layer holds for the next.
    sizes = (id(mask.order), query.shape, key.shape, value.shape, query.dtype, query.device)
    if (small := forward.small.get(sizes)) is not None:
        session.again(layer, small, (query.shape[0], query.shape[2], compact.used))
        return None
    cast = lowered(query, key, value)
    with autocast_off(query.device):
        call = _call(attached, layer, *cast, compact, kwargs)
        if not isinstance(call, AttentionCall):
            session.decline(layer, call, shape)
            return None
        read = forward.read if layer == attached.last else None
        outcome = session.run(call, forward.progress.prefill, read)
    if not isinstance(outcome, Fallback):
        return outcome.out.transpose(1, 2).contiguous()
    if outcome.small:
        forward.small[sizes] = outcome
    return None


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
    if reason := reasons.of_mask(compact, query):
        return reason
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


def first_keys(used: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The `used` first keys and values; the tensors themselves where all slots are in use."""
    return (key, value) if used == key.shape[2] else (key[:, :, :used], value[:, :, :used])
