"""Prefills in progress, by the caches that hold their keys.

What a prefill remembers is true of the keys that it was made of. So a chunk goes on with its cache's prefill only where
the cache is what the last chunk left: the same tensors, at the same place, and nobody wrote into them since.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

from attrs import field, frozen
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers.cache_utils import QuantizedLayer

from ..session.session import Prefill

Print = tuple[tuple[Any, ...], ...]
"""Facts of a cache's tensors that change with whatever is done to them."""


@frozen(eq=False)
class Progress:
    """Progress of a cache's prefill: what it remembers, the token `end` at which the next chunk starts, and what the
    cache held then."""

    prefill: Prefill = field(factory=Prefill)
    end: int = 0
    left: Print = ()


class Requests:
    """Prefills in progress, by cache. Entries vanish with their cache, or when it decodes.

    By identity: caches may compare as equal, or have no hash. One that cannot be referred to weakly is not remembered.
    """

    def __init__(self) -> None:
        self._caches: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._lock = threading.Lock()

    def advance(self, cache: Any, past: int) -> tuple[Prefill, bool]:
        """The prefill of a forward behind `past` tokens of a cache; whether it goes on with an earlier chunk.

        It does only where the cache is as the last chunk left it. After decoding, cropping, a reset, other batch rows
        or anything else that was done to it a new one begins.
        """
        with self._lock:
            # `get` would refuse what cannot be referred to weakly.
            before: Progress | None = self._caches[cache] if cache in self._caches else None  # noqa: SIM401
        if before is None or before.end != past or past <= 0 or not _same(before.left, tensors_of(cache)):
            return Prefill(), False
        return before.prefill, True

    def keep(self, cache: Any, prefill: Prefill, end: int) -> None:
        """Remember where this cache's prefill stands, and what the cache holds there."""
        try:
            made = Progress(prefill, end, fingerprint(cache))
            with self._lock:
                self._caches[cache] = made
        except TypeError:  # a tuple, or an object without weak references
            return

    def drop(self, cache: Any) -> None:
        """The cache decodes: its prefill is over."""
        with self._lock:
            if cache in self._caches:
                del self._caches[cache]

    def __len__(self) -> int:
        return len(self._caches)


def tensors_of(cache: Any) -> Iterator[Tensor]:
    """The tensors of a cache, layer by layer, in an order of their own."""
    layers = getattr(cache, "layers", None)
    for holder in layers if isinstance(layers, list | tuple) else (cache,):
        for value in getattr(holder, "__dict__", {}).values():
            yield from _tensors(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


def fingerprint(cache: Any) -> Print:
    """Facts of the cache's tensors: their identity, held weakly, and what writes to them, or another storage, change.

    Inference tensors count no writes: see `is_steady`.
    """
    return tuple((weakref.ref(x), *_facts(x)) for x in tensors_of(cache))


def _facts(x: Tensor) -> tuple[Any, ...]:
    return None if x.is_inference() else x._version, x.data_ptr(), x.shape, x.stride()


def _same(left: Print, tensors: Iterator[Tensor]) -> bool:
    """True if these are the tensors that were left, as they were. False where there are none, so that nothing tells."""
    now = list(tensors)
    if not now or len(now) != len(left):
        return False
    return all(ref() is x and tuple(facts) == _facts(x) for (ref, *facts), x in zip(left, now, strict=True))


def past_length(cache: Any) -> int:
    """Tokens the cache holds already; 0 for none and for caches that cannot tell (linear attention only)."""
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError, TypeError, RuntimeError):
        return 0


def is_steady(cache: Any) -> bool:
    """True if statistics of the cache's keys and values may be kept: it gives them back as it got them, and tells
    whether somebody wrote to them meanwhile.

    Transformers' own do, unless they quantize, or were made under `torch.inference_mode`.
    """
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        return False
    ours = (type(layer).__module__ == QuantizedLayer.__module__ for layer in layers)
    if not all(ours) or any(isinstance(layer, QuantizedLayer) for layer in layers):
        return False
    return not any(x.is_inference() for x in tensors_of(cache))
