"""Memory: what one request keeps from layer to layer and from chunk to chunk, statistics of its keys among it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch
from attrs import define, field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall

T = TypeVar("T")
KEPT_BYTES = 256 << 20
"""Bytes of a request by default: of 32 layers with 8 heads of 128, mean keys of 128 tokens up to 256K tokens."""
Make = Callable[[Tensor | None, int], Tensor]
"""Makes a statistic ``[B, Hkv, C, *]`` of a call's tiles; of what is given, or None, the first so many tiles hold."""


@frozen(eq=False)
class _Entry:
    """Facts about one layer's heads.

    found: the statistic of some call, of which the first `tiles` tiles are whole and hold for the request. end: index
    behind the last query of the call that came last. last: its tensors, weakly. broken: calls came out of order.
    """

    found: Tensor | None
    tiles: int
    end: int
    last: tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None = None
    broken: bool = False


NOTHING = _Entry(None, 0, 0)


@define(eq=False)
class PrefixTiles:
    """Statistics of the tiles of one request's keys or values, extended by each chunk; a part of its `Memory`.

    Tiles lie on absolute positions, and keys before a chunk never change within a request, so a tile that was whole
    stays what it was: a chunk reads the keys of those that were not, or are new. What a prefix cache brought along is
    read once, by the first chunk. The result has the bits of one that is made afresh.

    It goes by what the host knows, and keeps nothing where that does not do: of calls whose rows have `starts` or
    `lengths`, while gradients flow into the keys or a CUDA graph is captured, and of layers whose calls come out of
    order, such as two with one index. Of a prompt's first chunk it keeps something only if the call says that the
    prompt goes on. Nothing is ever written to in place, so what was handed out stays as it is.

    most: bytes that all of it may take; what does not fit is made again for each call. 0 keeps nothing. steady: whether
    keys and values never change; a host whose cache rounds old ones anew says False, and nothing is kept. nbytes: what
    is held. Copies, by pickle too, begin empty.
    """

    most: int = KEPT_BYTES
    steady: bool = True
    nbytes: int = field(default=0, init=False, repr=False)
    _layers: dict[Hashable, dict[tuple[Any, ...], _Entry]] = field(factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return PrefixTiles, (self.most, self.steady)

    def clear(self) -> None:
        """Forget everything."""
        self._layers.clear()
        self.nbytes = 0

    def get(self, call: AttentionCall, rule: Hashable, tile: int, make: Make) -> Tensor:
        """A statistic of the call's key tiles by `make`, which is given what is kept of it.

        rule: what it is, such as a name and the tokens of a tile. tile: those tokens. make: returns contiguous
        ``[B, Hkv, C, *]``, bit by bit the same whatever it is given.
        """
        if self.most <= 0 or not self.steady or not _known(call):
            return make(None, 0)
        layer, mine = self._layers.setdefault((rule, call.layer), {}), _identity(call)
        offset, end = call.geometry.q_offset, call.geometry.q_offset + call.geometry.q_len
        pages = call.pages
        q, k = call.q, call.k if pages is None else pages.k
        entry = layer.get(mine, NOTHING)
        again = entry.last is not None and entry.last[0]() is q and entry.last[1]() is k
        if entry.broken or not (again or offset >= entry.end):
            self._drop(layer, mine)
            layer[mine] = _Entry(None, 0, end, broken=True)
            return make(None, 0)
        tiles = min(entry.tiles, offset // tile)  # of the call that came last, once more, what was before it
        made = make(entry.found if tiles else None, tiles)
        if len(layer) > (entry is not NOTHING):
            heads = mine[0]  # those of another cut of the layer are of no use any more
            for other in [key for key in layer if key != mine and set(heads).intersection(key[0])]:
                self._drop(layer, other)
        found, last = entry.found, (weakref.ref(q), weakref.ref(k))
        held = self.nbytes - (0 if found is None else found.nbytes) + made.nbytes
        goes_on = isinstance(call.prompt_lengths, int) and call.prompt_lengths > end
        if (offset or goes_on) and held <= self.most:
            self.nbytes = held
            layer[mine] = _Entry(made.detach(), end // tile, end, last)
        else:
            layer[mine] = _Entry(found, entry.tiles, end, last)
        return made

    def _drop(self, layer: dict[tuple[Any, ...], _Entry], key: tuple[Any, ...]) -> None:
        entry = layer.pop(key, NOTHING)
        self.nbytes -= 0 if entry.found is None else entry.found.nbytes


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


def _known(call: AttentionCall) -> bool:
    """True if the host knows where the call's keys stand, and they are the same for everybody."""
    if call.starts is not None or call.lengths is not None:
        return False
    if call.pages is None and torch.is_grad_enabled() and (call.k.requires_grad or call.v.requires_grad):
        return False
    return not (call.q.is_cuda and torch.cuda.is_current_stream_capturing())


def _identity(call: AttentionCall) -> tuple[Any, ...]:
    """Whose keys they are, as far as the host can tell: query heads first, then all that must be the same."""
    q, pages = call.q, call.pages
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    cache = 0 if pages is None else pages.k.data_ptr()
    heads = range(call.first_head, call.first_head + q.shape[1])
    return heads, call.kv_heads, q.shape[0], q.shape[3], call.value_dim, q.dtype, q.device, stream, cache
