"""Places of a call's rows and keys: positions, tiles and who may see whom; what sizes alone tell is kept.

Every batch row has its own token grid. Position 0 is the row's first real token, so that a left-padded row of a
batch is computed exactly as it would be alone; tiles, bands and groups lie on that grid and do not move with the cut
of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill.mask.recorded import RECORDING, apart

P = ParamSpec("P")
T = TypeVar("T")
MODES: Any = torch._C
"""Knows which modes and transforms this thread is in; what torch says in Python is one word for all threads."""


def same_device(one: torch.device, other: torch.device) -> bool:
    """True where these are one device; "cuda" without a number may be any of them."""
    return one == other or (one.type == other.type and None in (one.index, other.index))


def in_a_mode() -> bool:
    """True if this thread is in a dispatch mode, or in a transform of torch.func.

    There tensors may hold no numbers, as fake tensors do not, or be wrapped for as long as it lasts, even those made of
    sizes alone.
    """
    return bool(MODES._len_torch_dispatch_stack()) or MODES._functorch.maybe_current_level() is not None


def remembered(most: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """The function with its last `most` answers kept, whatever mode the caller is in; its arguments are hashable.

    Nobody may write to an answer. Within a dispatch mode or a transform nothing is kept or given: see `in_a_mode`. A
    mode that sees functions of torch does not see these, so that nothing it makes of them is kept.
    """

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        def plain(*args: Any, **kwargs: Any) -> T:
            with (
                torch._C.DisableTorchFunction(),
                torch.inference_mode(False),
            ):  # else a later call with gradients could not use them
                return make(*args, **kwargs)

        known = cast(Callable[..., T], lru_cache(maxsize=most)(plain))

        @wraps(make)
        def get(*args: P.args, **kwargs: P.kwargs) -> T:
            if RECORDING.get() is not None:
                return apart(known, *args, **kwargs)
            return (plain if in_a_mode() else known)(*args, **kwargs)

        return get

    return decorate


def kept(make: Callable[P, T]) -> Callable[P, T]:
    """`remembered`, of a few answers, for small tensors that depend on sizes alone: to make them again takes launches
    in every layer.

    Each CUDA stream has its own, since another could read them before they are written. While a CUDA graph is captured
    nothing is kept or given: what a graph makes holds no values until it is replayed.
    """

    @remembered(64)
    def known(stream: int, *args: Any, **kwargs: Any) -> T:
        return make(*args, **kwargs)

    @wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.cuda.is_initialized():
            return known(0, *args, **kwargs)
        if torch.cuda.is_current_stream_capturing():
            return make(*args, **kwargs)
        return known(torch.cuda.current_stream().cuda_stream, *args, **kwargs)

    return get


Sizes = tuple[int, int, int, int, int, torch.device, None, None, int | None]


@frozen(eq=False)
class Geometry:
    """The shape of one attention call, without its data.

    batch, heads, q_len, kv_len: sizes of ``q [B, Hq, Nq, D]`` and of K/V ``[B, Hkv, Nkv, D]``.
    q_offset: index among the keys of query row 0 (bottom-right causal: ``kv_len - q_len``).
    starts: int32 ``[B]``, index of each row's first real key (left padding), or None for 0.
    lengths: int32 ``[B]``, number of real keys of each row, counted from its start, or None for all.
    window: keys a query sees, itself included (sliding window), or None.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    q_offset: int
    device: torch.device
    starts: Tensor | None = None
    lengths: Tensor | None = None
    window: int | None = None

    @cached_property
    def sizes(self) -> Sizes | None:
        """All there is to know of a geometry whose tiles do not depend on padding, hashable: its arguments but lengths.

        None where rows have starts.
        """
        if self.starts is not None:
            return None
        return (
            *(self.batch, self.heads, self.q_len, self.kv_len, self.q_offset, self.device, None, None),
            self.window,
        )

    def same_sizes(self, other: Geometry) -> bool:
        """Compare the sizes, the place of the queries and the window; padding is not looked at."""
        mine = (self.batch, self.heads, self.q_len, self.kv_len, self.q_offset, self.window)
        return mine == (other.batch, other.heads, other.q_len, other.kv_len, other.q_offset, other.window)

    def fits(self, other: Geometry) -> bool:
        """Tell if a mask made for `other` may serve a call of this geometry: same sizes, padding and device.

        Of padding on a device only the place in memory is compared, so that nothing synchronises: equal values in
        other tensors do not fit there.
        """
        if self is other:
            return True
        if not same_device(self.device, other.device):
            return False
        alike = _same_rows(self.starts, other.starts) and _same_rows(self.lengths, other.lengths)
        return alike and self.same_sizes(other)

    def describe(self) -> str:
        """Short text for error messages; with values of padding on the CPU, and the name of any other device."""
        sizes = f"B={self.batch}, Hq={self.heads}, Nq={self.q_len}, Nkv={self.kv_len}, q_offset={self.q_offset}"
        sizes += "" if self.window is None else f", window={self.window}"
        padding = _described("starts", self.starts) + _described("lengths", self.lengths)
        return f"[{sizes}{padding}]" + ("" if self.device.type == "cpu" else f" on {self.device}")

    def first_position(self) -> Tensor:
        """int64 [B]: position of query row 0 on each row's grid; negative where it is padding."""
        first = torch.full((self.batch,), self.q_offset, dtype=torch.int64, device=self.device)
        return first if self.starts is None else first - self.starts

    def query_positions(self) -> Tensor:
        """int64 [B, Nq]."""
        return self.first_position()[:, None] + torch.arange(self.q_len, device=self.device)

    def key_positions(self) -> Tensor:
        """int64 [B, Nkv]; negative before a row's start."""
        index = torch.arange(self.kv_len, device=self.device).expand(self.batch, -1)
        return index if self.starts is None else index - self.starts[:, None]

    def key_counts(self) -> Tensor:
        """int64 [B]: number of real keys of each row."""
        if self.lengths is not None:
            return self.lengths.to(torch.int64)
        full = torch.full((self.batch,), self.kv_len, dtype=torch.int64, device=self.device)
        return full if self.starts is None else full - self.starts

    def tile_rows(self, tile: int) -> int:
        """Number of query tiles of `tile` tokens that the call touches on any row's grid."""
        if self.starts is None:
            return (self.q_offset + self.q_len - 1) // tile - self.q_offset // tile + 1
        return (self.q_len + 2 * tile - 2) // tile

    def tile_columns(self, tile: int) -> int:
        """Number of key tiles of `tile` tokens."""
        return -(-self.kv_len // tile)

    def map_shape(self, tile_q: int, tile_k: int) -> tuple[int, int, int, int]:
        """The shape of a map of all tiles: batch rows, heads, query tiles, key tiles."""
        return self.batch, self.heads, self.tile_rows(tile_q), self.tile_columns(tile_k)

    def first_tile(self, tile: int) -> Tensor:
        """int64 [B]: index on each row's grid of query tile 0 of this call (floor, so negative for padding)."""
        return self.first_position() // tile

    def tiles(self, tile: int) -> Tensor:
        """int64 [B, R]: index on each row's grid of every query tile of this call."""
        return self.first_tile(tile)[:, None] + torch.arange(self.tile_rows(tile), device=self.device)

    def tile_at(self, position: Tensor, tile: int) -> Tensor:
        """int64 ``[B, n]``: index among the call's query tiles of `tile` tokens of those around positions ``[B, n]``.

        Where the call has none, that of the nearest.
        """
        index = position // tile - self.first_tile(tile)[:, None]
        return index.clamp(0, self.tile_rows(tile) - 1)

    def token_range(self) -> tuple[Tensor, Tensor, Tensor]:
        """int64 [B] each: position of query row 0, and the half-open range of positions whose rows are tokens."""
        first = self.first_position()
        return first, first.clamp(min=0), torch.minimum(first + self.q_len, self.key_counts())

    def real_queries(self) -> Tensor:
        """bool [B, Nq]: query rows that are tokens, not padding."""
        position = self.query_positions()
        return (position >= 0) & (position < self.key_counts()[:, None])

    def locate(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The index of the query row at each position, int64 ``[B, *]``, and bool, whether it is a token of the call.

        Where there is none, the index is that of some row.
        """
        first, low, high = (x.view(-1, *[1] * (position.dim() - 1)) for x in self.token_range())
        return (position - first).clamp(0, self.q_len - 1), (position >= low) & (position < high)

    def visible(self, rows: Tensor | None = None) -> Tensor:
        """bool [B, n, Nkv]: which keys each query row may attend to (causal, window, padding), exact per token."""
        query, key = self.query_positions(), self.key_positions()
        real = self.real_queries()
        if rows is not None:
            query, real = query[:, rows], real[:, rows]
        distance = query[:, :, None] - key[:, None, :]
        seen = (distance >= 0) & (key[:, None, :] >= 0) & real[:, :, None]
        return seen if self.window is None else seen & (distance < self.window)

    def visible_counts(self) -> Tensor:
        """int64 [B, Nq]: number of keys each query row may attend to."""
        counts = (self.query_positions() + 1) * self.real_queries()
        return counts if self.window is None else counts.clamp(max=self.window)


def kept_by_sizes(
    *, lengths: bool = False
) -> Callable[[Callable[Concatenate[Geometry, P], T]], Callable[Concatenate[Geometry, P], T]]:
    """`kept` for functions of a geometry, whose other arguments are hashable, where sizes alone tell the answer.

    Rows with starts, which do not, get theirs made afresh; so do rows with lengths if `lengths` says that it matters.
    """

    def decorate(make: Callable[Concatenate[Geometry, P], T]) -> Callable[Concatenate[Geometry, P], T]:
        @kept
        def known(sizes: Sizes, *args: Any, **kwargs: Any) -> T:
            return make(Geometry(*sizes), *args, **kwargs)

        @wraps(make)
        def get(geometry: Geometry, *args: P.args, **kwargs: P.kwargs) -> T:
            sizes = geometry.sizes
            if sizes is None or (lengths and geometry.lengths is not None):
                return make(geometry, *args, **kwargs)
            return known(sizes, *args, **kwargs)

        return cast(Callable[Concatenate[Geometry, P], T], get)

    return decorate


def _same_rows(mine: Tensor | None, theirs: Tensor | None) -> bool:
    """True if starts or lengths are the same, as far as the host can tell without waiting for a device."""
    if mine is theirs:
        return True
    if mine is None or theirs is None:
        return False
    if (mine.device, mine.dtype, mine.shape) != (theirs.device, theirs.dtype, theirs.shape):
        return False
    if mine.device.type == "cpu":
        return torch.equal(mine, theirs)
    return (mine.data_ptr(), mine.stride()) == (theirs.data_ptr(), theirs.stride())


def _described(name: str, rows: Tensor | None) -> str:
    if rows is None:
        return ""
    values = rows.tolist() if rows.device.type == "cpu" and rows.numel() <= 8 else f"of {rows.device}"
    return f", {name}={values}"


def span(geometry: Geometry, tile_q: int, tile_k: int) -> tuple[Tensor, Tensor]:
    """int64 [B, R] each: half-open range of key tiles that the rows of each query tile may see."""
    tiles = geometry.tiles(tile_q)
    last = ((tiles + 1) * tile_q - 1) // tile_k + 1
    last = last.clamp(0, geometry.tile_columns(tile_k))
    if geometry.window is None:
        return torch.zeros_like(last), last
    first = (tiles * tile_q - geometry.window + 1) // tile_k
    return first.clamp(min=0), last


def reachable_map(geometry: Geometry, tile_q: int, tile_k: int) -> Tensor:
    """bool [B, R, C]: tiles that hold at least one allowed pair."""
    first, last = span(geometry, tile_q, tile_k)
    column = torch.arange(geometry.tile_columns(tile_k), device=geometry.device)
    return (column >= first[..., None]) & (column < last[..., None])


def diagonal_map(geometry: Geometry, tile_q: int, tile_k: int) -> Tensor:
    """bool [B, R, C]: key tiles that hold a row's own position."""
    tiles = geometry.tiles(tile_q)
    column = torch.arange(geometry.tile_columns(tile_k), device=geometry.device)
    first = (tiles * tile_q // tile_k)[..., None]
    last = (((tiles + 1) * tile_q - 1) // tile_k)[..., None]
    return (column >= first) & (column <= last)


def regrid(geometry: Geometry, keep: Tensor, old: int, new: int) -> Tensor:
    """Rows of a map ``[B, H, R, C]`` on tiles of `old` tokens, repeated on the finer grid of `new` tokens."""
    return keep if old == new else rows_around(geometry, keep, geometry.tiles(new) * new, old)


def rows_around(geometry: Geometry, x: Tensor, position: Tensor, tile: int) -> Tensor:
    """``[B, H, n, X]``: of x ``[B, H, R, X]`` by query tiles of `tile` tokens, those around positions ``[B, n]``."""
    index = geometry.tile_at(position, tile).clamp(max=x.shape[2] - 1)[:, None, :, None]
    return torch.take_along_dim(x, index, 2)


def by_block(columns: Tensor, block: int) -> Tensor:
    """``[..., ceil(n / block)]``: sums of `block` neighbouring entries of ``[..., n]``."""
    total: Tensor = functional.pad(columns, (0, -columns.shape[-1] % block)).unflatten(-1, (-1, block)).sum(-1)
    return total
