"""The hooks around an attached decoder's forward: they tell a layer's call which request it serves."""

from __future__ import annotations

import inspect
import sys
from traceback import walk_stack
from typing import Any

import torch
from attrs import define
from transformers import Cache

from ..session.session import Prefill
from .attention import GRADIENT, TRAINING, WEIGHTS
from .compiling import EXPORT, eagerly, refuse_one_graph, surroundings
from .drafts import drafted
from .inspection import CACHE, asks, cache_of, prefilled
from .rows import forget, rows_of, settle, write, write_short
from .state import Attachment, Forward, current, is_steady, owner_of, past_length

UNREACHED = (
    "did not reach the method in a forward in which others did: its module was replaced by one with a configuration or "
    "an attention of its own, or another implementation was set meanwhile"
)
EARLY = "the forward ended behind layer {last}: layers {first} to {end} did not run (early exit, or layers taken out)"
SKIPPED = "layer {layer} did not run in a forward in which later ones did: it was skipped"
UNHEARD = "layers names {layers}, which called no attention so far: such a layer has none, or was skipped"
DRAFT = "a draft was checked: that is decoding, however many tokens it has"
NOWHERE = Prefill()
"""The prefill of a forward that does not go through the session."""


class Idle:
    """Stand-in for a hook in a copy or a pickle of the model: it does nothing. The copy is a stock model."""

    def __call__(self, *_: Any) -> None:
        """Nothing."""


@define(eq=False)
class Around:
    """Opens the forwards of one attachment, or counts them as short; the one behind closes them, errors included.

    Short forwards return before anything that cannot be compiled. Gone in a copy or a pickle of the model.
    names: of the forward's arguments. over: whether the hook comes after the forward.
    """

    names: tuple[str, ...]
    attached: Attachment
    over: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Idle:
        return Idle()

    def __reduce__(self) -> tuple[Any, ...]:
        return Idle, ()

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        """Open or close the forward."""
        named = _named(self.names, args, kwargs)
        most = _most_rows(named)
        if most is None or most >= self.attached.session.min_query:
            if torch.compiler.is_dynamo_compiling():
                refuse_one_graph()
            if self.over:
                _close(self.attached, module, *output)
            else:
                _open(self.attached, module, named)
        elif not self.over and not torch.compiler.is_compiling():
            _short(self.attached, module, named)


def install(attached: Attachment, decoder: torch.nn.Module) -> list[Any]:
    """Hook the decoder; returns what removes the hooks."""
    names = tuple(inspect.signature(decoder.forward).parameters)
    return [
        decoder.register_forward_pre_hook(Around(names, attached), with_kwargs=True),
        decoder.register_forward_hook(Around(names, attached, over=True), with_kwargs=True, always_call=True),
    ]


def open_late(attached: Attachment, decoder: torch.nn.Module) -> None:
    """Open the forward of a decoder that began before it was hooked, if one is on this thread's stack.

    No hook closes it, if it has none from before: so each layer's attention keeps what its chunks go on with.
    """
    made: dict[str, Any] = {}
    for frame, _ in walk_stack(sys._getframe()):
        name = frame.f_code.co_name
        if name not in ("forward", "_call_impl") or (known := frame.f_locals).get("self") is not decoder:
            continue
        if name == "forward" and not made:  # it has made a cache by now, where it was given none
            made = {key: cache for key in CACHE if (cache := known.get(key)) is not None}
        if name == "_call_impl":
            Around(tuple(inspect.signature(decoder.forward).parameters), attached)(
                decoder, known["args"], {**known["kwargs"], **made}
            )
            break
    forward = current(attached)
    if forward is not None:
        forward.late = True


def _sizes(named: dict[str, Any]) -> tuple[int, ...]:
    """Sizes of a forward's tokens, batch rows first; none where its arguments do not tell.

    Two, as a rule. Of three, ids of several choices end with the tokens, and ids of several codebooks do not.
    """
    for name, width in (("input_ids", 0), ("inputs_embeds", 1)):
        x = named.get(name)
        if x is not None and x.dim() >= 2 + width:
            return tuple(x.shape[: x.dim() - width])
    return ()


def _most_rows(named: dict[str, Any]) -> int | None:
    """Tokens that a forward has at most; None where its arguments do not tell."""
    return max(_sizes(named)[1:], default=None)


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs} if args else kwargs


@eagerly
def _open(attached: Attachment, module: torch.nn.Module, named: dict[str, Any]) -> None:
    if module is not attached.decoder:  # the hook of a shallow copy
        return
    if not attached.serves or _overruled(attached, module):
        _write_dense(named)
        attached.enter(Forward(attached, NOWHERE, stock=True, aside=owner_of(module) not in (None, attached)))
        return
    cache = cache_of(named)
    if around := surroundings():  # in which nothing is asked of tensors, and nothing kept of them
        attached.enter(Forward(attached, NOWHERE, cache, around))
        return
    past, sizes = past_length(cache), _sizes(named)
    rows = max(sizes[1:], default=0)
    draft = drafted(attached, past)
    if draft and rows - draft < attached.session.min_query:
        attached.session.note(DRAFT)
        write(cache, past, past + rows, "")
        attached.enter(Forward(attached, NOWHERE, stock=True))
        if cache is not None:
            attached.requests.drop(cache)
        return
    prefill, goes_on = attached.requests.advance(cache, past)
    if past and not goes_on:
        prefill.before = rows_of(cache).before(past)
    prefix = prefill.memory.prefix
    prefix.steady = is_steady(cache)
    if not prefix.steady:
        prefix.clear()
    if goes_on and ((grain := attached.session.route.method_grain) is None or past % grain):
        why = "the method has no grain" if grain is None else f"its grain is {grain} tokens"
        attached.session.note(f"prefill was cut at token {past}; {why}, so the cut may change what is selected")
    read = None if attached.reader is None or draft else attached.reader.rows()
    end = past + rows - draft if len(sizes) == 2 else None
    dense = _objection(attached, module, named)
    forward = Forward(attached, prefill, cache, dense, draft=draft, past=past, end=end, read=read)
    if dense is None:  # once for a forward: somebody may put a function there at any time
        forward.foreign = attached.foreign()
    attached.enter(forward)


@eagerly
def _close(attached: Attachment, module: torch.nn.Module, output: Any) -> None:
    if module is not attached.decoder:
        return
    forward = attached.leave()
    if forward is None or forward.stock:
        return
    if output is None:
        forget(forward.cache, forward.past)
        return
    if forward.seen and forward.dense is None:
        _tell_missing(attached, forward.seen)
    cache = forward.cache
    if cache is None:
        cache = _made(output)
    if forward.prefill is NOWHERE:  # nothing may be asked of tensors
        if cache is not None:
            forget(cache, 0)
            attached.requests.drop(cache)
        return
    end = settle(attached, forward, cache)
    if cache is None:
        return
    if forward.dense is None:
        attached.requests.keep(cache, forward.prefill, end)
    else:
        attached.requests.drop(cache)


def _write_dense(named: dict[str, Any]) -> None:
    """A forward with the host's own attention writes to its cache."""
    cache = cache_of(named)
    if cache is not None:
        write_short(cache, max(_sizes(named)[1:], default=0))


def _tell_missing(attached: Attachment, seen: set[int]) -> None:
    """Layers that did not call the attention function: they did not run, or something else ran in their place."""
    if unheard := attached.session.unheard():
        attached.session.note(UNHEARD.format(layers=", ".join(map(str, unheard))))
    missing, last = attached.session.missing(seen), max(seen)
    left = [layer for layer in missing if attached.left(layer)]
    behind = [layer for layer in left if layer > last]
    if behind:
        attached.session.note(EARLY.format(last=last, first=behind[0], end=behind[-1]))
    for layer in left:
        if layer < last:
            attached.session.note(SKIPPED.format(layer=layer))
    for layer in missing:
        if layer not in left:
            attached.refuse([layer], f"layer {layer} {UNREACHED}")


def _made(output: Any) -> Any:
    """The cache that a forward made; it is somewhere in a tuple where the configuration asks for no `return_dict`."""
    if isinstance(output, tuple):
        return prefilled(next((one for one in output if isinstance(one, Cache)), None))
    return cache_of(vars(output)) if hasattr(output, "__dict__") else None


@eagerly
def _short(attached: Attachment, module: torch.nn.Module, named: dict[str, Any]) -> None:
    if module is not attached.decoder:
        return
    _write_dense(named)
    if not attached.serves:
        return
    attached.session.count_short()
    if (before := current(attached)) is not None and before.late:
        attached.lose(before)  # it has ended, and would hold its cache
    cache = cache_of(named)
    if cache is not None:
        attached.requests.drop(cache)


def _overruled(attached: Attachment, decoder: Any) -> bool:
    """True if somebody set another implementation meanwhile. That choice stands, and is noted where the model was
    attached by `attach`; one that a name attached is detached by it."""
    name = decoder.config._attn_implementation
    if name == attached.name:
        return False
    if attached.overruled:
        attached.end()
        return True
    every = attached.session.missing(set())
    attached.refuse(every, f"the model was set to {name!r} after it was attached: such forwards run without the method")
    return True


def _objection(attached: Attachment, decoder: torch.nn.Module, named: dict[str, Any]) -> str | None:
    """Reason for which no layer of a forward may run sparse, or None. named: its arguments.

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
        weights = asks(attached.configs, "output_attentions")
    return WEIGHTS if weights else None
