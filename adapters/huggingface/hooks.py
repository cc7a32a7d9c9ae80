"""The hooks around an attached decoder's forward: they tell a layer's call which request it serves."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .eager import eagerly
from .state import Attachment, Forward, Requests, enter, leave, past_length


def install(attached: Attachment, decoder: torch.nn.Module) -> list[Any]:
    """Hook the decoder; returns what removes the hooks.

    The hooks are functions, not methods, so that a deep copy of the model does not copy the attachment. Short forwards
    return before anything that cannot be compiled.
    """
    names, requests = tuple(inspect.signature(decoder.forward).parameters), Requests()
    min_query = attached.session.min_query

    def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = _rows(names, args, kwargs)
        if rows is None or rows >= min_query:
            _open(attached, requests, module, _named(names, args, kwargs))
        elif not torch.compiler.is_compiling():
            _short(attached, requests, module, _named(names, args, kwargs))

    def after(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        rows = _rows(names, args, kwargs)
        if rows is None or rows >= min_query:
            _close(attached, requests, module, output)

    return [
        decoder.register_forward_pre_hook(before, with_kwargs=True),
        decoder.register_forward_hook(after, with_kwargs=True, always_call=True),
    ]


def _rows(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    shape = _shape(_named(names, args, kwargs))
    return None if shape is None else shape[1]


def _shape(named: dict[str, Any]) -> tuple[int, int] | None:
    """Batch rows and tokens of a forward."""
    for name in ("input_ids", "inputs_embeds"):
        x = named.get(name)
        if x is not None and x.dim() >= 2:
            return x.shape[0], x.shape[1]
    return None


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs} if args else kwargs


@eagerly
def _open(attached: Attachment, requests: Requests, module: torch.nn.Module, named: dict[str, Any]) -> None:
    if not attached.is_decoder(module):
        return
    cache, shape = named.get("past_key_values"), _shape(named)
    batch, rows = (0, 0) if shape is None else shape
    past = past_length(cache)
    progress, goes_on = requests.advance(cache, past, rows, batch)
    if goes_on and ((grain := attached.session.route.method_grain) is None or past % grain):
        why = "the method has no grain" if grain is None else f"its grain is {grain} tokens"
        attached.session.note(f"prefill was cut at token {past}; {why}, so the cut may change what is selected")
    enter(Forward(attached, progress, cache))


@eagerly
def _close(attached: Attachment, requests: Requests, module: torch.nn.Module, output: Any) -> None:
    if not attached.is_decoder(module):
        return
    forward = leave(attached)
    if forward is None or output is None:
        return
    cache = forward.cache
    if cache is None:
        cache = getattr(output, "past_key_values", None)
    if cache is not None:
        requests.keep(cache, forward.progress)


@eagerly
def _short(attached: Attachment, requests: Requests, module: torch.nn.Module, named: dict[str, Any]) -> None:
    if not attached.is_decoder(module):
        return
    attached.session.count_short()
    cache = named.get("past_key_values")
    if cache is not None:
        requests.drop(cache)
