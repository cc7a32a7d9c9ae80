"""Memory: what one request carries from layer to layer and from chunk to chunk of one prefill."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from attrs import define, field

from sparseprefill.statistics.prefix import PrefixTiles

T = TypeVar("T")


@define(eq=False)
class Memory:
    """A small store, one per request and prefill. Stages read it; only observers write it.

    Keys are chosen by the method, usually ``(method name, layer)``; values are the method's own frozen objects.
    Sessions never share a Memory between requests or threads.

    prefix: statistics of the request's keys by tile, which any stage may ask for: they are what they would be if made
    afresh, and only spare the work. They have no part in `len` and ``in``.
    """

    _slots: dict[Hashable, Any] = field(factory=dict, init=False, repr=False)
    prefix: PrefixTiles = field(factory=PrefixTiles, init=False, repr=False)

    def get(self, key: Hashable, default: T) -> T:
        """The value under `key`, or `default`."""
        return cast(T, self._slots.get(key, default))

    def put(self, key: Hashable, value: object) -> None:
        """Write a value; for observers."""
        self._slots[key] = value

    def setdefault(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value under `key`, made and stored on first use; for observers."""
        if key not in self._slots:
            self._slots[key] = make()
        return cast(T, self._slots[key])

    def copy(self) -> Memory:
        """Another store of the same values; what is written to one is not in the other. Its `prefix` begins empty."""
        other = Memory()
        other._slots.update(self._slots)
        return other

    def clear(self) -> None:
        """Forget everything: the request ended."""
        self._slots.clear()
        self.prefix.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept in `prefix`; what observers keep is not counted."""
        return self.prefix.nbytes

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._slots
