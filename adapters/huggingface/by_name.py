"""The name ``sparseprefill`` among transformers' implementations: a model that runs under it is attached when its
first forward asks for a mask or for attention.

Transformers tells its registries of no model, so the model is found on the stack: it is the outermost one there that
holds what asks. From then on it is attached as by `attach`, under a name of its own. Only the forward in which it was
found had no hook before it; it is opened by hand (`hooks.open_late`).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from sparseprefill.errors import AttachError

from .attention import Outputs, layer_of
from .compiling import eagerly, refuse_one_graph
from .handle import Handle
from .hooks import open_late
from .inspection import HOME, find_decoder
from .state import Original, current
from .switch import DOOR, is_ours, settle

LOST = (
    f"attn_implementation is {DOOR!r}, but what runs under it is no part of a transformers model that is called as a "
    "whole: load it with 'sdpa' and call sparseprefill.adapters.huggingface.attach(model, 'rowmax')"
)
NOT_NAMED = (
    f"attn_implementation is {DOOR!r} for {{config}}, but the decoder of {{model}}, {{decoder}}, runs {{other!r}}: "
    "give the decoder that name, since it alone can be attached"
)
Wish = Callable[[PreTrainedModel], Handle]
"""A function that attaches a model."""
log = logging.getLogger(__name__)
_lock = threading.RLock()  # held while a model is attached: another thread's forward of it waits
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # decoder -> (wish, handle)
_wish: Wish | None = None
TOLD: list[Callable[[Handle], object]] = []
"""Called with each handle that is new."""


def serve(wish: Wish) -> None:
    """Register the name; models whose first forward under it comes later are attached by `wish`."""
    global _wish
    _wish = wish
    AttentionInterface.register(DOOR, attention)
    AttentionMaskInterface.register(DOOR, mask)


def handle_by_name(decoder: PreTrainedModel) -> Handle | None:
    """The handle that a decoder got by the name, attached or not; None for none."""
    found = _known[decoder] if decoder in _known else None  # noqa: SIM401 - `get` makes no weak reference of the key
    return None if found is None else found[1]


def mask(**given: Any) -> Any:
    """The mask function under the name."""
    if torch.compiler.is_dynamo_compiling():
        refuse_one_graph()
    return _mask(given)


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> Outputs:
    """The attention function under the name."""
    if torch.compiler.is_dynamo_compiling():
        refuse_one_graph()
    return _attention(module, query, key, value, attention_mask, kwargs)


@eagerly
def _mask(given: dict[str, Any]) -> Any:
    make = Original(_attached(given["config"])).mask()
    return None if make is None else make(**given)


@eagerly
def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, kwargs: dict[str, Any]
) -> Outputs:
    config = getattr(module, "config", None)
    if config is None:
        raise AttachError(f"{LOST} (layer {layer_of(module)} has no configuration)")
    found: Outputs = Original(_attached(config)).attention(module)(module, query, key, value, attention_mask, **kwargs)
    return found


def _attached(config: Any) -> str:
    """The implementation that a configuration names after the model that runs with it was attached, by this call or
    by another thread's."""
    outer = _outermost(config)
    if outer is None or _wish is None:
        raise AttachError(LOST)
    with _lock:
        with _by_the_name():
            decoder = find_decoder(outer)
            if config._attn_implementation == DOOR:
                if _is_named(decoder):
                    _attach(outer, decoder, _wish)
                else:
                    _pass_by(outer, decoder, config)
        handle = handle_by_name(decoder)
        if handle is not None and handle.active and current(handle) is None:
            open_late(handle, decoder)
    return str(config._attn_implementation)


@contextmanager
def _by_the_name() -> Iterator[None]:
    """Let an AttachError in the block say what to choose in place of the name."""
    try:
        yield
    except AttachError as error:
        raise AttachError(
            f"{error} (by the name {DOOR!r}: choose another attn_implementation, such as 'sdpa')"
        ) from error


def _is_named(decoder: PreTrainedModel) -> bool:
    """True if a part of the decoder runs with a configuration that has the name."""
    configs = (getattr(part, "config", None) for part in decoder.modules())
    return any(getattr(config, "_attn_implementation", None) == DOOR for config in configs)


def _pass_by(outer: PreTrainedModel, decoder: PreTrainedModel, config: Any) -> None:
    """Settle what has the name beside a decoder without it. AttachError where that decoder is not attached either."""
    if not is_ours(decoder.config._attn_implementation):
        names = {"model": type(outer).__name__, "decoder": type(decoder).__name__, "config": type(config).__name__}
        raise AttachError(NOT_NAMED.format(**names, other=decoder.config._attn_implementation))
    settle(outer)


def _attach(outer: PreTrainedModel, decoder: PreTrainedModel, wish: Wish) -> None:
    """Attach, or attach again by the handle that it had. A model that cannot be attached keeps the name."""
    named = settle(outer)
    before, handle = _known[decoder] if decoder in _known else (None, None)  # noqa: SIM401 - as above
    try:
        if handle is not None and before is wish:
            handle.detach()
            handle.bind()
        else:
            if handle is not None:
                handle.detach()
            # In a context of its own: what records a forward's outputs must not see the dry run's.
            handle = Context().run(wish, outer)
            for told in TOLD:
                told(handle)
    except BaseException:
        for config in named:
            config._attn_implementation_internal = DOOR
        raise
    handle.named = True
    _known[decoder] = wish, handle
    log.info(
        "%s: %s is attached, by the name of its attention implementation",
        handle.session.route.name,
        type(outer).__name__,
    )


def _outermost(config: Any) -> PreTrainedModel | None:
    """The model on this thread's stack that runs with a configuration, or the outermost that holds it.

    Looks at frames of models and of transformers alone: what is looked at keeps its variables alive until it ends.
    """
    found: PreTrainedModel | None = None
    for frame, _ in walk_stack(sys._getframe()):
        theirs = str(frame.f_globals.get("__name__", "")).startswith(HOME)
        if not theirs and frame.f_code.co_name not in ("forward", "_call_impl"):
            continue
        owner = frame.f_locals.get("self")
        if not isinstance(owner, PreTrainedModel) or owner is found:
            continue
        if found is None:
            found = owner if any(getattr(part, "config", None) is config for part in owner.modules()) else None
        elif any(part is found for part in owner.modules()):
            found = owner
    return found
