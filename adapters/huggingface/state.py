"""What an attached model's attention, mask and hooks share: the attachment, and the forward that a call belongs to.

The attention function sees neither the cache nor the request. A hook before the decoder opens a `Forward`, one after
it (errors included) closes it; every thread and task has its own. What must outlive one forward, a prefill in chunks,
is found by its cache and goes with it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import define, field, frozen
from torch import Tensor
from transformers import PreTrainedModel

from ..session.session import Fallback, Prefill, Session
from .masks import Compact, decode
from .original import Original

_current: ContextVar[Forward | None] = ContextVar("sparseprefill_forward", default=None)


@define(eq=False)
class Attachment:
    """One model's attachment. Holds the model weakly: the model's hooks keep the attachment, and it goes with them.

    name: under which both functions are registered with transformers. active: whether prefill runs through the session.
    """

    session: Session
    original: Original
    name: str
    active: bool = field(default=False, init=False)
    _decoder: weakref.ref[PreTrainedModel]
    _modules: weakref.WeakSet[torch.nn.Module]

    @classmethod
    def of(cls, decoder: PreTrainedModel, session: Session, name: str) -> Attachment:
        """Of a decoder that is not switched yet."""
        original = Original(str(decoder.config._attn_implementation))
        return cls(session, original, name, weakref.ref(decoder), weakref.WeakSet(decoder.modules()))

    @property
    def decoder(self) -> PreTrainedModel | None:
        """The decoder, None where the model is gone."""
        return self._decoder()

    def owns(self, module: torch.nn.Module) -> bool:
        """Whether the module belongs to the attached decoder; models built from one config share its functions."""
        return module in self._modules

    def is_decoder(self, module: torch.nn.Module) -> bool:
        """Whether a hook speaks of the attached decoder, and not of a copy of it."""
        return self.active and module is self._decoder()


@frozen(eq=False)
class Progress:
    """How far a cache's prefill has come: the next chunk starts at token `end`, with as many batch rows."""

    prefill: Prefill
    end: int
    batch: int


@define(eq=False)
class Forward:
    """One forward of an attached decoder.

    masks: each compact mask of it, decoded once. rebuilt: the host's own in its place. small: what the gate left to the
    host, by sizes.
    """

    owner: object
    progress: Progress
    cache: Any = None
    outer: Forward | None = None
    masks: dict[int, tuple[Tensor, Compact]] = field(factory=dict)
    rebuilt: dict[int, Any] = field(factory=dict)
    small: dict[Hashable, Fallback] = field(factory=dict)

    def decoded(self, mask: Tensor) -> Compact:
        """Layers share one tensor, so its identity is the key; holding it keeps the identity true."""
        if id(mask) not in self.masks:
            self.masks[id(mask)] = (mask, decode(mask))
        return self.masks[id(mask)][1]


class Requests:
    """Prefills in progress, by cache. Entries vanish with their cache, or when it decodes."""

    def __init__(self) -> None:
        self._caches: WeakKeyDictionary[Any, Progress] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def advance(self, cache: Any, past: int, rows: int, batch: int) -> tuple[Progress, bool]:
        """The prefill of a forward of `rows` tokens behind `past`; whether it goes on with an earlier chunk.

        It does only where the last chunk of this cache ended; after decoding, cropping or a reset a new one begins.
        """
        with self._lock:
            before = None if cache is None else self._caches.get(cache)
            goes_on = before is not None and before.end == past > 0 and before.batch == batch
            prefill = before.prefill if before is not None and goes_on else Prefill()
            return Progress(prefill, past + rows, batch), goes_on

    def keep(self, cache: Any, progress: Progress) -> None:
        """Remember where this cache's prefill stands."""
        with self._lock:
            self._caches[cache] = progress

    def drop(self, cache: Any) -> None:
        """The cache decodes: its prefill is over."""
        with self._lock:
            self._caches.pop(cache, None)

    def __len__(self) -> int:
        return len(self._caches)


def enter(forward: Forward) -> None:
    """Make `forward` the current one of this context."""
    forward.outer = _current.get()
    _current.set(forward)


def leave(owner: object) -> Forward | None:
    """End the owner's current forward and return it; None where it has none."""
    forward = current(owner)
    if forward is not None:
        _current.set(forward.outer)
    return forward


def current(owner: object) -> Forward | None:
    """The innermost open forward of `owner` in this context."""
    forward = _current.get()
    while forward is not None and forward.owner is not owner:
        forward = forward.outer
    return forward


def past_length(cache: Any) -> int:
    """Tokens the cache holds already; 0 for none and for caches that cannot tell (linear attention only)."""
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError, TypeError):
        return 0
