"""The mask of a prefill: who may see whom, told in a few numbers, and made in full only where something reads it.

Transformers builds its mask once per forward and hands it to every layer as a tensor, of query x key entries. A causal
or sliding mask with padding is told by far less. So a layer gets a `LazyMask` in its place: it has the shape of the
host's mask, knows what was asked for, and any function that reads it reads the host's own mask, made at that moment.
Whoever ends up with it, our attention or the host's, computes what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import GetSetDescriptorType
from typing import Any, cast

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function, sdpa_mask

from sparseprefill.errors import AttachError

MaskFunction = Callable[..., Any]
CUSTOM = "the attention mask is custom, or neither causal nor a sliding window"
_UNMADE = object()


@frozen
class Pattern:
    """Causal attention, within `window` keys if there is one."""

    window: int | None = None


@frozen(eq=False)
class Compact:
    """A mask in a few numbers.

    used: slots of the cache in use, the first ones of the key tensor. starts, lengths: int32 ``[B]`` as in
    AttentionCall, None without padding. holes: some row's real keys are not contiguous.
    """

    used: int
    window: int | None
    starts: Tensor | None = None
    lengths: Tensor | None = None
    holes: bool = False


@define(eq=False)
class Order:
    """A mask as it was asked for. make: the host's mask function. asked: its arguments, which nobody changes later."""

    pattern: Pattern
    make: MaskFunction
    asked: dict[str, Any]
    _compact: Compact | None = field(default=None, init=False)
    _stock: Any = field(default=_UNMADE, init=False)
    _full: Tensor | None = field(default=None, init=False)
    _version: int = field(default=0, init=False)
    _elsewhere: dict[torch.device, Order] = field(factory=dict, init=False)
    _cut: dict[int, tuple[LazyMask, Order]] = field(factory=dict, init=False)

    @classmethod
    def of(cls, pattern: Pattern, make: MaskFunction, asked: dict[str, Any]) -> Order:
        """A static cache counts its tokens in a tensor and moves it on while the layers run: that number is copied."""
        moving = {name: x.clone() for name in ("q_offset", "kv_offset") if isinstance(x := asked[name], Tensor)}
        return cls(pattern, make, {**asked, **moving})

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the host's mask in full: batch rows, 1, queries, keys."""
        return self.asked["batch_size"], 1, self.asked["q_length"], self.asked["kv_length"]

    @property
    def device(self) -> torch.device:
        """The device that needs the mask."""
        return torch.device(self.asked.get("device", "cpu"))

    @property
    def changed(self) -> bool:
        """True if somebody wrote into the full mask, so that it is no longer what was asked for."""
        return self._full is not None and self._full._version != self._version

    def tells(self, query: Tensor) -> bool:
        """True if it still is the mask of these queries."""
        return self.shape[2] == query.shape[2] and not self.changed

    def told(self, query: Tensor, key: Tensor) -> Compact | str:
        """The mask of a layer's queries and keys in a few numbers; or why no AttentionCall can say it."""
        if self.changed:
            return CUSTOM
        made, given = (*self.shape[::2], self.shape[3]), (query.shape[0], query.shape[2], key.shape[2])
        if made != given:
            wanted, has = (f"{rows} x {queries} queries" for rows, queries, _ in (made, given))
            return f"the mask is for {wanted} and {made[2]} keys, the layer has {has} and {given[2]}"
        found = self.compact()
        if found.holes:
            return "the attention mask has holes: padding must be a prefix or a suffix of each row"
        return found if found.used >= query.shape[2] else f"{query.shape[2]} queries come after {found.used} keys"

    def compact(self) -> Compact:
        """The mask in a few numbers, read once; with padding or a static cache that takes one host sync."""
        if self._compact is None:
            self._compact = self._read()
        return self._compact

    def _read(self) -> Compact:
        """Padding is bool ``[B, n]`` over absolute positions."""
        (batch, _, q_length, kv_length), window = self.shape, self.pattern.window
        q_offset, kv_offset, padding = (self.asked[name] for name in ("q_offset", "kv_offset", "attention_mask"))
        if padding is None and isinstance(q_offset, int) and isinstance(kv_offset, int):
            return Compact(min(kv_length, max(0, q_offset + q_length - kv_offset)), window)
        position = torch.arange(kv_length, device=self.device) + kv_offset
        used = position < q_offset + q_length
        real = used[None].expand(batch, -1)
        if padding is not None:
            padding = functional.pad(padding, (0, max(0, kv_length + int(kv_offset) - padding.shape[-1])))
            real = real & padding[:, position]
        count, slots = real.sum(-1), used.sum()
        first = real.to(torch.uint8).argmax(-1)
        behind = kv_length - real.flip(-1).to(torch.uint8).argmax(-1)
        holes = ((count > 0) & (behind - first != count)).any()
        n, split, ragged = torch.stack([slots, holes.long(), (count != slots).any().long()]).tolist()
        starts, lengths = (first.to(torch.int32), count.to(torch.int32)) if ragged else (None, None)
        return Compact(cast(int, n), window, starts, lengths, bool(split))

    def stock(self) -> Any:
        """Exactly what the host's function gives, made once: None where its attention needs no mask."""
        if self.changed:
            return self._full
        if self._stock is _UNMADE:
            self._stock = self._make()
        return self._stock

    def full(self, reader: Any) -> Tensor:
        """The host's mask as a tensor, for a function that reads its values. AttachError where there is no such."""
        if self._full is None:
            made = self.stock()
            made = self._make(allow_is_causal_skip=False) if made is None else made
            if not isinstance(made, Tensor):
                name = getattr(reader, "__name__", reader)
                raise AttachError(
                    f"{name} reads the mask as a tensor, which this attention implementation does not make"
                )
            self._full, self._version = made, made._version
        return self._full

    def on(self, device: torch.device) -> Order:
        """This mask for layers on another device."""
        if device not in self._elsewhere:
            moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in self.asked.items()}
            self._elsewhere[device] = evolve(self, asked={**moved, "device": device})
        return self._elsewhere[device]

    def cut(self, rows: int) -> tuple[LazyMask, Order]:
        """The masks of the queries before the last `rows`, and of these."""
        if rows not in self._cut:
            asked, before = self.asked, self.asked["q_length"] - rows
            last = {"q_length": rows, "q_offset": asked["q_offset"] + before, "allow_is_causal_skip": False}
            first = evolve(self, asked={**asked, "q_length": before})
            self._cut[rows] = LazyMask.of(first), evolve(self, asked={**asked, **last})
        return self._cut[rows]

    def _make(self, **changes: Any) -> Any:
        with torch.inference_mode(False):  # inference tensors do not tell whether they were written to
            return self.make(**{**self.asked, **changes})


class LazyMask(Tensor):
    """A mask that is made when it is read. Its own values are never seen: every function gets the host's."""

    order: Order

    @staticmethod
    def of(order: Order) -> LazyMask:
        """A mask of the shape and the dtype that the host's has."""
        dtype = torch.bool if order.make is sdpa_mask else order.asked.get("dtype", torch.float32)
        unseen = torch.full((), False if dtype == torch.bool else torch.nan, dtype=dtype, device=order.device)
        mask = unseen.expand(order.shape).as_subclass(LazyMask)
        mask.order = order
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        kept = _KEPT[func](*args, **kwargs) if func in _KEPT and isinstance(args[0], LazyMask) else None
        if kept is not None:
            return kept
        args, kwargs = pytree.tree_map_only(LazyMask, lambda mask: mask.order.full(func), (args, kwargs))
        return func(*args, **kwargs)


def _to(mask: LazyMask, *args: Any, **kwargs: Any) -> LazyMask | None:
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
    if dtype is not None:
        return None
    return mask if device is None or device == mask.order.device else LazyMask.of(mask.order.on(device))


def _part(mask: LazyMask, index: Any) -> LazyMask | None:
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is not Ellipsis and (not isinstance(part, slice) or part.step not in (None, 1)) for part in parts):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        whole = mask[index].shape == mask.shape
    return mask if whole else None


def _same(mask: LazyMask, *_: Any, **__: Any) -> LazyMask:
    return mask


# What a mask tells without being made, and what leaves it as it is. Compilers ask for all of the former.
_VALUES = {"T", "mT", "H", "mH", "data", "real", "imag"}
_OF_SHAPE = {
    *(
        x.__get__
        for name, x in vars(torch._C.TensorBase).items()
        if isinstance(x, GetSetDescriptorType) and name not in _VALUES
    ),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.stride, Tensor.storage_offset),
    *(Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__, Tensor.__hash__),
}
_KEPT: dict[Any, Callable[..., LazyMask | None]] = {
    Tensor.to: _to,
    Tensor.__getitem__: _part,
    Tensor.contiguous: _same,
    Tensor.detach: _same,
}


def stock(mask: Any) -> Any:
    """The mask as the host's own attention wants it."""
    return mask.order.stock() if isinstance(mask, LazyMask) else mask


def classify(mask_function: MaskFunction, local_size: int | None, allow_is_causal_skip: bool) -> Pattern | None:
    """The pattern of a mask function of transformers; None for any other.

    Chunked and sliding masks arrive alike, as a closure and a size, so the closure is tried on a few pairs. Masks
    with an overlay (packed sequences, image blocks) arrive with `allow_is_causal_skip` off.
    """
    if not allow_is_causal_skip:
        inner = _unpacked(mask_function)
        if inner is None:
            return None
        mask_function = inner
    if local_size is None:
        return Pattern() if mask_function is causal_mask_function else None
    window = int(local_size)
    at = [0, 1, window - 1, window, window + 1, 2 * window - 1, 2 * window, 3 * window + 1]
    apart = [-window, -1, 0, 1, window // 2, window - 1, window, window + 1, 2 * window]
    query, distance = (torch.tensor(some, dtype=torch.int64, device="cpu") for some in (at, apart))
    query, distance, zero = query[:, None], distance[None], query[0]
    wanted = ((distance >= 0) & (distance < window)).expand(query.shape[0], -1)
    try:
        same = torch.equal(mask_function(zero, zero, query, query - distance).expand_as(wanted), wanted)
    except Exception:  # a closure over tensors of the batch or of another device: not a plain window
        return None
    return Pattern(window) if same else None


def _unpacked(mask_function: MaskFunction) -> MaskFunction | None:
    """The mask function inside of one for packed sequences, where each row is one sequence; None for any other.

    Under torch.compile transformers cannot look whether rows are packed, and takes all for packed (host sync). From
    5.24 on it also counts each token by its position, which in a row of one sequence only shifts the row.
    """
    parts = _closed_over(mask_function, and_masks.__name__).get("mask_functions", ())
    left, remapped = [], "remap_positions_for_packed_sequence"  # 5.19 has no such function to import
    for part in parts:
        sequences = _closed_over(part, packed_sequence_mask_function.__name__).get("packed_sequence_mask")
        if isinstance(sequences, Tensor):
            if not bool((sequences == sequences[:, :1]).all()):
                return None
            continue
        inner = _closed_over(part, remapped)
        if inner and not bool((inner["position_ids"].diff(dim=-1) == 1).all()):
            return None
        left.append(inner.get("mask_function", part))
    return left[0] if len(left) == 1 and len(parts) > 1 else None


def _closed_over(function: Any, maker: str) -> dict[str, Any]:
    """Values that a function of the host's function `maker` closes over, by name; nothing for any other function."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells or not code.co_qualname.startswith(f"{maker}.<locals>."):
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
