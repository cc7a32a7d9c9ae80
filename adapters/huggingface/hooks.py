"""The hooks around an attached decoder's forward: they tell a layer's call which request it serves.

Tokens that somebody guessed and a forward only checks, a draft, are decoding, however many they are. A draft and a
prompt are the same to a model: token ids behind a cache. What tells them apart is who calls. Assisted decoding in
transformers (prompt lookup, an assistant, early exit) is one function, which is looked up on the stack with two numbers
of its; whoever decodes with drafts in a loop of their own says so (`Handle.decoding`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from attrs import define

from ..session.session import Prefill
from .attention import GRADIENT, TRAINING, WEIGHTS
from .state import Attachment, Forward, Progress, Requests, eagerly, is_steady, owner_of, past_length

EXPORT = "the model is exported or traced: what comes of that is the stock model"
UNREACHED = (
    "did not reach the method in a forward in which others did: its module was replaced by one with a configuration or "
    "an attention of its own, it was skipped, or another implementation was set meanwhile"
)
DRAFT = "a draft was checked: that is decoding, however many tokens it has"
NOWHERE = Progress(Prefill(), 0, 0)
"""The progress of a forward that does not go through the session."""
ALL = sys.maxsize
"""More rows than a forward has."""
_decoding: ContextVar[tuple[object, ...]] = ContextVar("sparseprefill_decoding", default=())


class Idle:
    """What a hook is in a copy or a pickle of the model: nothing. The copy is a stock model."""

    def __call__(self, *_: Any) -> None:
        """Nothing."""


@define(eq=False)
class Around:
    """Opens and closes the forwards of one attachment; gone in a copy or a pickle of the model.

    Short forwards return before anything that cannot be compiled. names: of the forward's arguments.
    """

    names: tuple[str, ...]
    attached: Attachment
    requests: Requests
    min_query: int

    def __deepcopy__(self, memo: dict[int, Any]) -> Idle:
        return Idle()

    def __reduce__(self) -> tuple[Any, ...]:
        return Idle, ()


class Before(Around):
    """Before the forward."""

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open the forward, or count it as short."""
        rows = _rows(self.names, args, kwargs)
        if rows is None or rows >= self.min_query:
            _open(self.attached, self.requests, module, _named(self.names, args, kwargs))
        elif not torch.compiler.is_compiling():
            _short(self.attached, self.requests, module, _named(self.names, args, kwargs))


class After(Around):
    """After the forward, errors included."""

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Close the forward."""
        rows = _rows(self.names, args, kwargs)
        if rows is None or rows >= self.min_query:
            _close(self.attached, self.requests, module, output)


def install(attached: Attachment, decoder: torch.nn.Module) -> list[Any]:
    """Hook the decoder; returns what removes the hooks."""
    names, requests = tuple(inspect.signature(decoder.forward).parameters), Requests()
    given = (names, attached, requests, attached.session.min_query)
    return [
        decoder.register_forward_pre_hook(Before(*given), with_kwargs=True),
        decoder.register_forward_hook(After(*given), with_kwargs=True, always_call=True),
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
    if not attached.serves or _overruled(attached, module):
        attached.enter(Forward(attached, NOWHERE, stock=True, aside=owner_of(module) not in (None, attached)))
        return
    cache, shape = named.get("past_key_values"), _shape(named)
    batch, rows = (0, 0) if shape is None else shape
    past = past_length(cache)
    draft = drafted(attached, past)
    if draft and rows - draft < attached.session.min_query:
        attached.session.note(DRAFT)
        attached.enter(Forward(attached, NOWHERE, stock=True))
        if cache is not None:
            requests.drop(cache)
        return
    progress, goes_on = requests.advance(cache, past, rows - draft, batch)
    progress.prefill.memory.prefix.steady = is_steady(cache)
    if goes_on and ((grain := attached.session.route.method_grain) is None or past % grain):
        why = "the method has no grain" if grain is None else f"its grain is {grain} tokens"
        attached.session.note(f"prefill was cut at token {past}; {why}, so the cut may change what is selected")
    attached.enter(Forward(attached, progress, cache, _objection(module, named), draft=draft))


@eagerly
def _close(attached: Attachment, requests: Requests, module: torch.nn.Module, output: Any) -> None:
    if not attached.is_decoder(module):
        return
    forward = attached.leave()
    if forward is None or forward.stock or output is None:
        return
    if forward.seen and forward.dense is None:
        for layer in attached.session.missing(forward.seen):
            attached.tell(f"layer {layer} {UNREACHED}")
    cache = forward.cache
    if cache is None:
        cache = getattr(output, "past_key_values", None)
    if cache is not None:
        requests.keep(cache, forward.progress)


@eagerly
def _short(attached: Attachment, requests: Requests, module: torch.nn.Module, named: dict[str, Any]) -> None:
    if not attached.is_decoder(module) or not attached.serves:
        return
    attached.session.count_short()
    cache = named.get("past_key_values")
    if cache is not None:
        requests.drop(cache)


def _overruled(attached: Attachment, decoder: Any) -> bool:
    """Whether somebody set another implementation meanwhile. That choice stands, and is noted."""
    name = decoder.config._attn_implementation
    if name == attached.name:
        return False
    attached.tell(f"the model was set to {name!r} after it was attached: such forwards run without the method")
    return True


def _objection(decoder: torch.nn.Module, named: dict[str, Any]) -> str | None:
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


@contextmanager
def decoding(owner: object) -> Iterator[None]:
    """Forwards of `owner`'s model that begin in this context check drafts."""
    token = _decoding.set((*_decoding.get(), owner))
    try:
        yield
    finally:
        _decoding.reset(token)


def drafted(owner: object, past: int) -> int:
    """How many last rows of a forward behind `past` tokens are a draft: 0 for none, `ALL` where it has no prompt.

    The first forward of assisted decoding has the prompt and the first draft, later ones a draft alone. One without a
    past is a prompt all the same: an assistant's that keeps no cache.
    """
    if any(one is owner for one in _decoding.get()):
        return ALL
    known = _assisted()
    if known is None:
        return 0
    if known.get("is_first_iteration", past == 0):
        return int(known.get("candidate_length", 0))  # not there yet while an assistant drafts
    return ALL if past else 0


def _assisted() -> dict[str, Any] | None:
    """The variables of the innermost assisted decoding on this thread's stack, by transformers or by a copy of it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_assisted_decoding":
        frame = frame.f_back
    return None if frame is None else dict(frame.f_locals)
