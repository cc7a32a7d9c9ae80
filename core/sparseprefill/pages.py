"""One request's keys and values in the pages of a cache, by way of a block table."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from attrs import Factory, evolve, field, fields, frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.errors import InvalidCallError, printed

T = TypeVar("T")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""To compute in."""
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LONGEST = 1 << 31
"""No prompt reaches it, in tokens."""
STORED = (*DTYPES, *FP8)


def _type_of_cache(pages: Pages) -> torch.dtype:
    return pages.k.dtype if isinstance(pages.k, Tensor) else torch.float32  # which k then is refused for


@frozen(eq=False)
class Pages:
    """Keys and values in the pages of a cache, for kernels to read in place. Nothing on the device is read on the host.

    k, v: ``[pages, page, Hkv, D]`` and ``[pages, page, Hkv, Dv]``, views of the whole cache in float16, bfloat16,
    float32, float64 or fp8. Layouts differ in their strides, of which only the last must be 1: heads may stand side by
    side within a token, or a head's tokens together, and K beside V. Offsets of pages need 64 bits.
    table: int32 ``[n]``, n * page >= length; key j of the request is slot ``j % page`` of page ``table[j // page]``.
    Entries behind the last page in use may be anything, such as -1. Those in use are checked on the CPU; on another
    device they are trusted, and one that is no page of the cache makes kernels read what is not the cache's.
    length: keys of the request, on the host.
    dtype: of the numbers that keys() and values() yield, by default that of the cache; an fp8 cache needs one.
    k_scale, v_scale: float32 of one element on the device, factors on what an fp8 cache holds; None for 1, and for
    every other cache.
    copies: whether kernels may copy K and V where that is faster. If not, they read the cache in place, in a slower
    kernel if need be; what asks for tensors (keys(), values()) still gets copies.

    The cache must keep what it holds for as long as the object is in use: a copy is made when it is first asked for.
    Raises InvalidCallError, naming the field, for anything that does not fit.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    length: int
    dtype: torch.dtype = field(default=Factory(_type_of_cache, takes_self=True), kw_only=True)
    k_scale: Tensor | None = field(default=None, kw_only=True)
    v_scale: Tensor | None = field(default=None, kw_only=True)
    copies: bool = field(default=True, kw_only=True)
    cut_from: Pages | None = field(default=None, kw_only=True, repr=False)
    first_head: int = field(default=0, kw_only=True, repr=False)
    _kept: dict[str, Tensor] = field(factory=dict, init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        _check_cache(self)
        _check_table(self)

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.k.shape[1]

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape that `keys` returns: ``(1, Hkv, length, D)``."""
        return 1, self.k.shape[2], self.length, self.k.shape[3]

    @cached_property
    def value_dim(self) -> int:
        """Head dimension of the values."""
        return self.v.shape[3]

    @cached_property
    def device(self) -> torch.device:
        """The device that holds the pages and their table."""
        return self.k.device

    @property
    def converted(self) -> bool:
        """True if what the cache holds differs in type from what is yielded."""
        return self.k.dtype != self.dtype or self.k_scale is not None or self.v_scale is not None

    @property
    def requires_grad(self) -> bool:
        """True if keys or values have a gradient."""
        return self.k.requires_grad or self.v.requires_grad

    @property
    def gathered(self) -> frozenset[str]:
        """Copies made so far, "k" or "v", by these pages, those they were cut from, or others cut from those."""
        return frozenset((self.cut_from or self)._kept)

    def keys(self) -> Tensor:
        """``[1, Hkv, length, D]`` in `dtype`: copied once, when first asked for; a gradient reaches the cache."""
        return self._read("k")

    def values(self) -> Tensor:
        """``[1, Hkv, length, Dv]``, as keys()."""
        return self._read("v")

    def keys_at(self, index: Tensor) -> Tensor:
        """The keys ``[1, Hkv, n, D]`` at these indices, int64 ``[n]``; no others are copied.

        InvalidCallError for an index that is none. Values on a device are never read.
        """
        check_index(index, (), self.length, self.device)
        return _at(self.k, self.table, index, self.k_scale, self.dtype)

    def values_at(self, index: Tensor) -> Tensor:
        """The values ``[1, Hkv, n, Dv]`` at these indices, int64 ``[n]``; no others are copied."""
        check_index(index, (), self.length, self.device)
        return _at(self.v, self.table, index, self.v_scale, self.dtype)

    def narrow(self, heads: slice, keys: int) -> Pages:
        """Some KV heads, from `heads.start` to `heads.stop`, and the first `keys` keys; a copy is one of the whole."""
        first, whole = self.first_head + (heads.start or 0), self.cut_from or self
        k, v = self.k[:, :, heads], self.v[:, :, heads]
        return evolve(self, k=k, v=v, length=keys, cut_from=whole, first_head=first)

    def over(self, at: Callable[[Tensor], Tensor]) -> Pages:
        """Pages of the same sizes in other tensors, which are not checked again. at: which, in the place of each."""
        names = ("k", "v", "table", "k_scale", "v_scale")
        given = {name: at(x) for name in names if (x := getattr(self, name)) is not None}
        return like(self, **given, _kept={})

    def copy(self) -> tuple[Tensor, Tensor]:
        """keys() and values(): from one launch, where kernels copy them and neither is there."""
        fresh = self.cut_from is None and not self._kept and not self.requires_grad
        if fresh and kernels.serve(self.k):
            from sparseprefill.kernels.gather import gather_pages

            scales = (self.k_scale, self.v_scale)
            with torch.inference_mode(False), torch.no_grad():
                k, v = gather_pages((self.k, self.v), self.table, self.length, scales, self.dtype)
            self._kept.update(k=k, v=v)
        return self.keys(), self.values()

    def _read(self, name: str) -> Tensor:
        if self.cut_from is not None:
            heads = slice(self.first_head, self.first_head + self.k.shape[2])
            return self.cut_from._read(name)[:, heads, : self.length]
        if name not in self._kept:
            x, scale = (self.k, self.k_scale) if name == "k" else (self.v, self.v_scale)
            # Whoever asks first, later calls with gradients use it.
            with torch.inference_mode(False), torch.set_grad_enabled(x.requires_grad):
                self._kept[name] = _gather(x, self.table, self.length, scale, self.dtype)
        return self._kept[name]


def like(x: T, **changes: Any) -> T:
    """A copy with other fields, by their attributes' names, that is not checked: of the same sizes and types."""
    made = object.__new__(type(x))
    kind: Any = type(x)
    for name in _names(kind):
        object.__setattr__(made, name, changes[name] if name in changes else getattr(x, name))
    return made


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


class _Taken(torch.autograd.Function):
    """Tokens of pages, by page and slot; of the one copy several backward passes may be made, each with its graph."""

    @staticmethod
    def forward(x: Tensor, page: Tensor, slot: Tensor) -> Tensor:
        """``[n, Hkv, D]`` of ``[pages, page, Hkv, D]``."""
        return x[page, slot]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        """Not as saved tensors, which the first backward pass would let go."""
        x, ctx.page, ctx.slot = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None]:
        """Each token's gradient to its slot."""
        (gradient,) = given
        made = gradient.new_zeros(ctx.shape)
        return made.index_put((ctx.page, ctx.slot), gradient, accumulate=True), None, None


TAKE: Any = _Taken.apply


def _gather(x: Tensor, table: Tensor, length: int, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    if kernels.serve(x) and not x.requires_grad:
        from sparseprefill.kernels.gather import gather_pages

        return gather_pages((x,), table, length, (scale,), dtype)[0]
    return _at(x, table, torch.arange(length, device=table.device), scale, dtype)


def _at(x: Tensor, table: Tensor, index: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows ``[1, Hkv, n, D]`` of the keys `index`: a view of tokens, whose heads stand side by side."""
    page, slot = table[index // x.shape[1]].long(), index % x.shape[1]
    taken: Tensor
    if x.requires_grad:
        taken = TAKE(x, page, slot)
    else:
        raw = x.view(torch.uint8) if x.dtype in FP8 else x  # fp8 has no indexing everywhere
        taken = raw[page, slot].view(x.dtype)
    if scale is not None:
        taken = taken.to(torch.float32) * scale
    return taken.to(dtype)[None].transpose(1, 2)


def odd_layout(x: Tensor) -> str:
    """Name of a layout whose numbers do not stand at strides: nested, or sparse; empty for a plain one."""
    return "a nested tensor" if x.is_nested else "" if x.layout == torch.strided else f"of layout {x.layout}"


def check_index(index: object, rows: tuple[int, ...], length: int, device: torch.device) -> None:
    """InvalidCallError for what is no index among `length` keys: an int64 tensor ``[*rows, n]`` on the device.

    Its values are looked at on the CPU alone.
    """
    kind = isinstance(index, Tensor) and not odd_layout(index) and (index.dtype, index.device) == (torch.int64, device)
    if not isinstance(index, Tensor) or not kind or index.dim() != len(rows) + 1 or index.shape[:-1] != rows:
        wanted = ", ".join(map(str, (*rows, "n")))
        raise InvalidCallError("index", printed(index), f"pass an int64 tensor [{wanted}] on {device}")
    if outside := _outside(index, length):
        raise InvalidCallError("index", outside, f"pass numbers from 0 to {length - 1}, one less than there are keys")


def _outside(numbers: Tensor, behind: int) -> str:
    """The least and the largest of some numbers, where one is not from 0 to less than `behind`; CPU alone,
    and not while a layer is recorded."""
    if numbers.device.type != "cpu" or numbers.numel() == 0 or kernels.RECORDING.get() is not None:
        return ""
    low, high = map(int, torch.aminmax(numbers))
    return "" if low >= 0 and high < behind else f"of numbers from {low} to {high}"


def _check_cache(pages: Pages) -> None:
    for name, x in (("k", pages.k), ("v", pages.v), ("table", pages.table)):
        if not isinstance(x, Tensor):
            raise InvalidCallError(f"pages.{name}", printed(x), "pass a torch.Tensor")
        if odd := odd_layout(x):
            raise InvalidCallError(f"pages.{name}", odd, "pass a plain tensor, whose numbers stand at strides")
    for name, x in (("k", pages.k), ("v", pages.v)):
        if x.dim() != 4 or 0 in x.shape:
            remedy = "pass four dimensions [pages, page, Hkv, D], none of them empty"
            raise InvalidCallError(f"pages.{name}", f"of shape {tuple(x.shape)}", remedy)
        if x.dtype not in STORED:
            raise InvalidCallError(f"pages.{name}", f"of {x.dtype}", "view the cache as a floating-point type")
        if x.dtype in FP8 and x.requires_grad:
            raise InvalidCallError(f"pages.{name}", f"of {x.dtype} that requires a gradient", "pass it detached")
        if x.stride(3) != 1:
            raise InvalidCallError(f"pages.{name}", f"of strides {x.stride()}", "the last stride must be 1")
    k, v = pages.k, pages.v
    if v.shape[:3] != k.shape[:3] or v.dtype != k.dtype or v.device != k.device:
        remedy = f"pages, slots, heads, type and device must be k's: {tuple(k.shape)}, {k.dtype}, {k.device}"
        raise InvalidCallError("pages.v", f"of shape {tuple(v.shape)}, {v.dtype}, on {v.device}", remedy)
    if not isinstance(pages.copies, bool):
        remedy = "pass True, or False to have kernels read in place"
        raise InvalidCallError("pages.copies", printed(pages.copies), remedy)
    if not isinstance(pages.dtype, torch.dtype) or pages.dtype not in DTYPES:
        remedy = "give the dtype to compute in, which is that of q: float16, bfloat16, float32 or float64"
        raise InvalidCallError("pages.dtype", printed(pages.dtype), remedy)
    for name, scale in (("k_scale", pages.k_scale), ("v_scale", pages.v_scale)):
        if scale is None:
            continue
        kind = (
            isinstance(scale, Tensor)
            and not odd_layout(scale)
            and (scale.dtype, scale.device) == (torch.float32, k.device)
        )
        if kind and scale.requires_grad:
            raise InvalidCallError(f"pages.{name}", "a tensor that requires a gradient", "pass it detached")
        if not kind or scale.numel() != 1:
            shown = f"{printed(scale)} on {scale.device}" if isinstance(scale, Tensor) else printed(scale)
            raise InvalidCallError(f"pages.{name}", shown, f"pass one float32 on {k.device}, or None")
        if k.dtype not in FP8:
            remedy = f"a cache of {k.dtype} holds the numbers themselves: pass None"
            raise InvalidCallError(f"pages.{name}", "given for a cache that is not fp8", remedy)


def _check_table(pages: Pages) -> None:
    table = pages.table
    if table.dim() != 1 or table.dtype != torch.int32 or not table.is_contiguous() or table.device != pages.device:
        shown = f"of shape {tuple(table.shape)}, {table.dtype}, on {table.device}"
        raise InvalidCallError("pages.table", shown, f"pass a contiguous int32 [n] on {pages.device}")
    if isinstance(pages.length, bool) or not isinstance(pages.length, int) or not 1 <= pages.length < LONGEST:
        raise InvalidCallError("pages.length", printed(pages.length), f"pass a number of keys from 1 to {LONGEST - 1}")
    if table.numel() * pages.page < pages.length:
        remedy = f"pass {-(-pages.length // pages.page)} or more, for {pages.length} keys in pages of {pages.page}"
        raise InvalidCallError("pages.table", f"of {table.numel()} entries", remedy)
    if outside := _outside(table[: -(-pages.length // pages.page)], pages.k.shape[0]):
        remedy = f"entries of pages in use must be pages of the cache, from 0 to {pages.k.shape[0] - 1}"
        raise InvalidCallError("pages.table", outside, remedy)
