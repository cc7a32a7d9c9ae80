"""The two functions that stand for an implementation: attention, and the mask that goes with it."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from sparseprefill.call import AttentionCall
from sparseprefill.errors import InvalidCallError

from ..session.repeat import LEFT, Repeat
from ..session.session import Fallback
from .compiling import eagerly, refuse_one_graph, surroundings, unusual
from .inspection import foreign
from .masks import CUSTOM, Compact, LazyMask, Order, classify, stock
from .rows import settle
from .state import Attachment, Forward, Original, adopt, is_stock, owner_of, past_length, serving, sharing
from .switch import LOCK, name_of

OUTSIDE = (
    "called outside the attached decoder's forward (a forward that began before attaching, recomputed activations, "
    "or a layer run on its own)"
)
NOT_CAUSAL = "the layer is not causal"
GRADIENT = "gradients are recorded: wrap inference in torch.no_grad() or torch.inference_mode()"
TRAINING = "the model is in training mode: call model.eval()"
WEIGHTS = "attention weights are requested"
REPLACED = "is another module than at attaching: it runs like the one before, but no dry run has seen it"
SHARED = (
    "a module that shares the attached model's configuration, but is no part of its decoder, ran stock: another model, "
    "or a decoder that was put in the place of the attached one"
)
OWN = (
    "{name} stands in the model's {what} function, and is not transformers' own: it may differ from plain attention at "
    "any length; call model.set_attn_implementation('sdpa'), or 'eager', before attaching"
)
SEQUENCES = (tuple, list)  # a union of both would be made anew at every look
PACKED = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"))
"""Tensors that tell of sequences packed into a row."""
HARMLESS = frozenset(
    (
        *("position_ids", "cache_position", "s_aux", "input_ids", "inputs_embeds", "labels", "logits_to_keep"),
        *("token_type_ids", "mm_token_type_ids", "num_items_in_batch", "shift_labels", "start_positions"),
        *("end_positions", "class_labels"),
    )
)
"""Tensors that a layer may be given and that change nothing about who attends to whom."""
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
        if attached is not None and not (forward is not None and forward.stock):
            draft = 0 if forward is None else forward.draft
            if draft and isinstance(mask, LazyMask) and mask.order.tells(query):
                # A prompt and a draft behind it: the prompt comes out as it does alone, and the draft is decoding.
                first, last = mask.order.cut(draft)
                found = _output(attached, forward, module, query[:, :, :-draft], key, value, first, kwargs)
                if found is not None:
                    dense = original.attention(module)
                    behind, _ = dense(module, query[:, :, -draft:], key, value, last.stock(), **kwargs)
                    found = torch.cat([found, behind], 1)
            else:
                found = _output(attached, forward, module, query, key, value, mask, kwargs)
            if forward is not None and forward.late:
                _tell_late(attached, forward)
            if found is not None:
                return found, None
        return original.attention(module)(module, query, key, value, stock(mask), **kwargs)

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
        if torch.compiler.is_dynamo_compiling():
            refuse_one_graph()
        return prefill(module, query, key, value, attention_mask, kwargs)

    return attention


def _tell_late(attached: Attachment, forward: Forward) -> None:
    """Tell of a forward that no hook closes, after each of its layers."""
    cache = forward.cache
    if forward.dense is None and cache is not None:
        attached.requests.keep(cache, forward.prefill, past_length(cache) if forward.end is None else forward.end)
    if not attached.session.missing(forward.seen):
        settle(attached, forward, cache)


def _met(module: torch.nn.Module) -> Forward | None:
    """The forward of a module that was not there when its model was attached. Such modules are noted."""
    forward = adopt(module)
    if forward is not None and not forward.stock:
        forward.owner.tell(f"the attention of layer {layer_of(module)} {REPLACED}")
    if forward is None and (other := sharing(module)) is not None:
        other.session.note(SHARED)
        if other.has_another_decoder(module):
            other.session.forbid([layer_of(module)], SHARED)
    return forward


def make_mask(original: Original, min_query: int) -> Callable[..., Any]:
    """The mask function: lazy for a prefill that is causal or sliding, the host's own for everything else."""

    def mask(q_length: int, **given: Any) -> Any:
        usual = {"q_offset": 0, "kv_offset": 0, "mask_function": causal_mask_function, "attention_mask": None}
        asked = {"q_length": q_length, **usual, **given}
        if q_length >= min_query and torch.compiler.is_dynamo_compiling():
            refuse_one_graph()
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
    if surroundings() or foreign(make) or foreign(asked["mask_function"]):
        return None
    pattern = classify(asked["mask_function"], asked.get("local_size"), asked.get("allow_is_causal_skip", True))
    return None if pattern is None else LazyMask.of(Order.of(pattern, make, asked))


def _output(
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
    layer, session = layer_of(module), attached.session
    shape = (query.shape[0], query.shape[2], key.shape[2])
    if forward is None:
        if session.strict and attached.runs:  # it began before attaching: `strict` does not speak of it
            session.note(f"layer {layer} {OUTSIDE}")
        else:
            session.decline(layer, OUTSIDE, shape)
        return None
    forward.seen.add(layer)
    reason = forward.dense or _objection(attached.original, forward, module, query, key, value, mask, kwargs)
    if reason is not None:
        if reason != NOT_CAUSAL or not session.cross(layer):
            session.decline(layer, reason, shape)
        return None
    compact = mask.order.told(query, key)
    if not isinstance(compact, Compact):
        session.decline(layer, compact, shape)
        return None
    q, k, v = lowered(query, key, value)
    read = forward.read if layer == attached.last else None
    logits = tuple(map(kwargs.get, ("scaling", "softcap"))), kwargs.get("s_aux") is None
    kind = (id(mask.order), q.shape, k.shape, v.shape, q.dtype, q.device, logits, read, session.kind(layer))
    known = forward.known.get(kind)
    if isinstance(known, Fallback):
        session.again(layer, known, (q.shape[0], q.shape[2], compact.used))
        return None
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    slots = (q, k, v, out, *(x for x in (compact.starts, compact.lengths, kwargs.get("s_aux")) if x is not None))
    if known is not None and known.fits(slots):
        try:
            known.run(layer, slots)
        except Exception as error:  # which the plain way tells of, if it meets it, too
            session.note(LEFT.format(error=type(error).__name__))
            del forward.known[kind]
        else:
            return out
    call = _call(attached, module, q, k, v, compact, kwargs)
    if not isinstance(call, AttentionCall):
        session.decline(layer, call, shape)
        return None
    repeats: list[Repeat] = []
    (outcome,) = session.run_many([(call, forward.prefill, read)], [out.transpose(1, 2)], slots, repeats)
    if isinstance(outcome, Exception):
        raise outcome
    if not isinstance(outcome, Fallback):
        forward.known.update((kind, one) for one in repeats)
        forward.sparse |= call.window is None
        return out
    if outcome.small:
        forward.known[kind] = outcome
    return None


def layer_of(module: torch.nn.Module) -> int:
    """The layer's index among the decoder's; -1 where it has none."""
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else -1


def _objection(
    original: Original,
    forward: Forward,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> str | None:
    """A wish of the host that no pipeline meets; None if there is none. Reads no value on the device."""
    if odd := unusual(query, key, value):
        return odd
    kind = type(module)
    if kind not in forward.foreign:  # else told as the forward began
        forward.foreign[kind] = original.foreign(module)
    if name := forward.foreign[kind]:
        return OWN.format(what="attention", name=name)
    if module.training:
        return TRAINING
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return GRADIENT
    if reason := not_plain(module, kwargs):
        return reason
    if kwargs.get("cache") is not None:
        return "the cache is paged"
    if isinstance(mask, LazyMask):
        return further_tensors(original, module, kwargs)
    name = foreign(original.mask())
    return OWN.format(what="mask", name=name) if name else CUSTOM


def not_plain(module: torch.nn.Module, kwargs: dict[str, Any]) -> str | None:
    """Reason for which a layer's call is no causal attention of which only the output counts; None if it is."""
    if kwargs.get("dropout"):
        return "attention dropout is on"
    if kwargs.get("output_attentions"):
        return WEIGHTS
    causal = kwargs.get("is_causal")
    return None if (getattr(module, "is_causal", True) if causal is None else causal) else NOT_CAUSAL


def further_tensors(original: Original, module: torch.nn.Module, kwargs: dict[str, Any]) -> str | None:
    """Tensors of a layer's call that may change who attends to whom; None if there are none.

    Where the host's own function is known to read what it names and nothing else, tensors that it does
    not name change nothing: those that somebody passed to the model for a loss, say.
    """
    odd = [name for name, value in kwargs.items() if name not in HARMLESS and _holds_tensor(value)]
    read = _names_read(original.attention(module)) if odd else None
    if read is not None:
        odd = [name for name in odd if name in read or name in PACKED]
    return f"the layer passes {', '.join(sorted(odd))}" if odd else None


def _names_read(attention: Callable[..., Any]) -> frozenset[str] | None:
    """The arguments that a function of the host can read; None where it may read others, or hands them on."""
    code = getattr(attention, "__code__", None)
    return _named_in(code, attention is sdpa_attention_forward) if isinstance(code, CodeType) else None


@cache
def _named_in(code: CodeType, drops: bool) -> frozenset[str] | None:
    """drops: whether it is known to ignore what it takes by `**`."""
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if not drops and code.co_flags & inspect.CO_VARKEYWORDS:
        others = code.co_varnames[len(named) + bool(code.co_flags & inspect.CO_VARARGS)]
        if others in code.co_cellvars or any(others == step.argval for step in dis.get_instructions(code)):
            return None
    return frozenset(named)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    return isinstance(value, SEQUENCES) and any(_holds_tensor(part) for part in value)


def _call(
    attached: Attachment,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compact: Compact,
    kwargs: dict[str, Any],
) -> AttentionCall | str:
    """The call, over views of the slots in use; the reason where it cannot be expressed."""
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if (softcap is not None or sinks is not None) and not attached.original.applies_extras(module):
        attached.session.note(
            f"{attached.original.name} ignores this model's softcap or sinks, and so does prefill here"
        )
        softcap = sinks = None
    used = compact.used
    if used != key.shape[2]:
        key, value = key[:, :, :used], value[:, :, :used]
    try:
        return AttentionCall(
            query,
            key,
            value,
            scale=kwargs.get("scaling"),
            q_offset=used - query.shape[2],
            layer=layer_of(module),
            starts=compact.starts,
            lengths=compact.lengths,
            window=None if compact.window is None or attached.sees_all(compact) else compact.window,
            softcap=softcap,
            sinks=sinks,
        )
    except InvalidCallError as error:
        return str(error)


def autocast_type(device: torch.device) -> torch.dtype | None:
    """The type in which autocast lets attention run on a device; None where it is off."""
    if not torch.amp.is_autocast_available(device.type):  # the meta device, say, which has none
        return None
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def lowered(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as autocast casts them; themselves where it is off."""
    dtype = autocast_type(q.device)
    if dtype is None:
        return q, k, v
    q, k, v = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k, v))
    return q, k, v
