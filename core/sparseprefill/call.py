"""AttentionCall: one layer's prefill attention, checked once when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, cached_property, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from attrs import field, fields, frozen
from torch import Tensor

from sparseprefill.errors import InvalidCallError, ParameterError, nearest, printed
from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.recorded import RECORDING, apart
from sparseprefill.pages import DTYPES, LONGEST, Pages, check_index, like, odd_layout
from sparseprefill.validate import LARGEST

P = ParamSpec("P")
T = TypeVar("T")
CASTING = ("cpu", "cuda", "xpu", "mps")
"""Kinds of devices for which `torch.autocast` may be on."""
TRACED = "made when the code runs"
"""Told to torch.compile where an object is made that it cannot trace: no error to it, but a break of its graph."""
LEAST, MOST = 1e-30, 1e30
"""Bounds of scale and softcap: beyond them float32 logits, or logits over the softcap, are no numbers any more."""


@frozen
class CallShape:
    """All of a call but its tensors and its layer, hashable: what a layer's launches follow from.

    tensors: type, shape, strides and alignment of each. given: which of starts, lengths and sinks there are, and the
    prompt's length, where that is a number. numbers: scale, q_offset, window, softcap, first_head. pages: their length,
    the type that they are read in, whether they may be copied and are scaled; None without.
    """

    tensors: tuple[tuple[torch.dtype, torch.Size, tuple[int, ...], int], ...]
    device: torch.device
    given: tuple[bool | int, ...]
    numbers: tuple[float | int | None, ...]
    pages: tuple[Any, ...] | None


@frozen(eq=False)
class AttentionCall:
    """Query, key and value of one layer, with everything that decides who attends to whom.

    q: ``[B, Hq, Nq, D]``; k: ``[B, Hkv, Nkv, D]``; v: ``[B, Hkv, Nkv, Dv]``, K/V not repeated for GQA, any strides.
    K and V may stand in pages instead, one `Pages` for both (`of_pages`): `k` and `v` are then copies, each made when
    first read; sizes are known without (`kv_heads`, `kv_len`, `value_dim`).
    scale: factor on ``q.k``; default ``1 / sqrt(D)``.
    q_offset: index among the keys of query row 0; default ``Nkv - Nq`` (bottom-right causal).
    layer: index of the layer, for methods that keep state per layer.
    starts, lengths: int32 ``[B]``: first real key and number of real keys of each batch row (left / right padding).
    prompt_lengths: tokens of the whole prompt, counted from its first real one: int32 ``[B]``, or one number for all
    batch rows. More than there are keys where chunks are still to come, fewer where tokens behind the prompt are
    computed. None: not known; the prompt then counts as ending with the call's last real query row.
    window: keys a query sees, itself included. softcap: ``cap * tanh(logit / cap)``.
    sinks: ``[Hq]`` logits that join each row's softmax denominator (GPT-OSS).
    first_head: index among the layer's query heads of query head 0, where the call holds only some of them: a part of
    a call (`split`), or one device's share of the heads. Stages that know heads by number go by it.

    Raises InvalidCallError, naming the field, for anything that does not fit. Values on a device are never read: starts
    and lengths that do not lie among the keys are found on the CPU alone.
    """

    q: Tensor
    _k: Tensor | Pages = field(alias="k")
    _v: Tensor | Pages = field(alias="v")
    scale: float | None = field(default=None, kw_only=True)
    q_offset: int | None = field(default=None, kw_only=True)
    layer: int = field(default=0, kw_only=True)
    starts: Tensor | None = field(default=None, kw_only=True)
    lengths: Tensor | None = field(default=None, kw_only=True)
    prompt_lengths: Tensor | int | None = field(default=None, kw_only=True)
    window: int | None = field(default=None, kw_only=True)
    softcap: float | None = field(default=None, kw_only=True)
    sinks: Tensor | None = field(default=None, kw_only=True)
    first_head: int = field(default=0, kw_only=True)

    def __attrs_pre_init__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(TRACED)

    def __attrs_post_init__(self) -> None:
        _check_tensors(self.q, self._k, self._v)
        _check_rows(self) if RECORDING.get() is None else apart(_check_rows, self)
        _check_numbers(self)

    @classmethod
    def of_pages(cls, q: Tensor, pages: Pages, **options: Any) -> AttentionCall:
        """A call whose keys and values are read from pages. q: ``[1, Hq, Nq, D]``; options: the other fields."""
        if not isinstance(pages, Pages):
            raise InvalidCallError(
                "pages", printed(pages), "pass Pages, which hold K and V, or use AttentionCall(q, k, v)"
            )
        return cls.of(q, pages, pages, options)

    @classmethod
    def of(cls, q: Tensor, k: Tensor | Pages, v: Tensor | Pages, options: Mapping[str, Any]) -> AttentionCall:
        """A call with other fields by name; InvalidCallError for a name that is no field, with the nearest."""
        for name, value in options.items():
            if name not in _options():
                raise InvalidCallError(name, printed(value), f"there is no such field{nearest(name, _options())}")
        return cls(q, k, v, **options)

    @property
    def pages(self) -> Pages | None:
        """The pages that hold K and V; None where K and V are tensors."""
        return self._k if isinstance(self._k, Pages) and self._k is self._v else None

    @cached_property
    def k(self) -> Tensor:
        """Keys ``[B, Hkv, Nkv, D]``; of pages a copy, made once."""
        return self._k.keys() if isinstance(self._k, Pages) else self._k

    @cached_property
    def v(self) -> Tensor:
        """Values ``[B, Hkv, Nkv, Dv]``; of pages a copy, made once."""
        return self._v.values() if isinstance(self._v, Pages) else self._v

    @property
    def recorded(self) -> bool:
        """True if gradients are recorded of what the call holds."""
        return torch.is_grad_enabled() and any(
            x.requires_grad for x in (self.q, self._k, self._v, self.sinks) if x is not None
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors of the call: keys and values where they stand, and what tells of rows."""
        pages = self.pages
        where = (self._k, self._v) if pages is None else (pages.k, pages.v, pages.table, pages.k_scale, pages.v_scale)
        rows = (self.starts, self.lengths, self.prompt_lengths, self.sinks)
        return tuple(x for x in (self.q, *where, *rows) if isinstance(x, Tensor))

    @property
    def shape(self) -> CallShape:
        """All of the call but its tensors and its layer."""
        pages, prompt = self.pages, self.prompt_lengths
        given = (self.starts is not None, self.lengths is not None, self.sinks is not None)
        return CallShape(
            tensors=tuple((x.dtype, x.shape, x.stride(), x.data_ptr() % 16) for x in self.tensors),
            device=self.q.device,
            given=(*given, prompt if isinstance(prompt, int) else prompt is not None),
            numbers=(self.scale, self.q_offset, self.window, self.softcap, self.first_head),
            pages=None if pages is None else (pages.length, pages.dtype, pages.copies, pages.k_scale is not None),
        )

    @property
    def kv_heads(self) -> int:
        """Heads of K and V."""
        return self._k.shape[1]

    @cached_property
    def kv_len(self) -> int:
        """Keys of a batch row, padding included."""
        return self._k.shape[2]

    @cached_property
    def value_dim(self) -> int:
        """Head dimension of V and of the output."""
        return self._v.value_dim if isinstance(self._v, Pages) else self._v.shape[3]

    @cached_property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q.shape[1] // self.kv_heads

    def narrow(self, heads: slice, keys: int) -> tuple[Tensor | Pages, Tensor | Pages]:
        """k and v of some KV heads and the first keys, for `attrs.evolve`: views, whatever they are."""
        if (pages := self.pages) is not None:
            part = pages.narrow(heads, keys)
            return part, part
        return self.k[:, heads, :keys], self.v[:, heads, :keys]

    def keys_at(self, index: Tensor) -> Tensor:
        """The keys ``[B, Hkv, n, D]`` at these indices, int64 ``[B, n]``; from pages only these are copied.

        InvalidCallError for an index that is none. Values on a device are never read.
        """
        check_index(index, (self.q.shape[0],), self.kv_len, self.q.device)
        return self._k.keys_at(index[0]) if isinstance(self._k, Pages) else rows_at(self._k, index)

    def values_at(self, index: Tensor) -> Tensor:
        """The values ``[B, Hkv, n, Dv]`` at these indices, int64 ``[B, n]``; from pages only these are copied."""
        check_index(index, (self.q.shape[0],), self.kv_len, self.q.device)
        return self._v.values_at(index[0]) if isinstance(self._v, Pages) else rows_at(self._v, index)

    @cached_property
    def softmax_scale(self) -> float:
        """The factor in use."""
        return 1.0 / math.sqrt(self.q.shape[-1]) if self.scale is None else float(self.scale)

    @cached_property
    def geometry(self) -> Geometry:
        """Positions, tiles and visibility of this call; a window longer than any prompt is none."""
        offset = self.kv_len - self.q.shape[2] if self.q_offset is None else self.q_offset
        batch, heads, q_len = self.q.shape[:3]
        window = None if self.window is None or self.window >= LONGEST else self.window
        return Geometry(batch, heads, q_len, self.kv_len, offset, self.q.device, self.starts, self.lengths, window)


@cache
def _options() -> tuple[str, ...]:
    return tuple(str(attribute.alias) for attribute in fields(AttentionCall) if attribute.kw_only)


def check_call(call: object) -> AttentionCall:
    """The call that was given; ParameterError for anything that is no AttentionCall."""
    if not isinstance(call, AttentionCall):
        raise ParameterError(f"call is {type(call).__name__}: pass an AttentionCall, such as AttentionCall(q, k, v)")
    return call


def uncast(compute: Callable[P, T]) -> Callable[P, T]:
    """The function with `torch.autocast` off, which would round its products to half precision.

    For what may be called on its own: executors, stages, statistics, metrics. Tensors come in the type that they have,
    and nothing else is changed. Where autocast is off, it costs a question for each kind of device.
    """

    @wraps(compute)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        for kind in CASTING:
            if torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return run(*args, **kwargs)  # it may be on for another kind, too
        return compute(*args, **kwargs)

    return run


def resized(call: AttentionCall, rows: int, keys: int, batch: int | None = None) -> AttentionCall:
    """A call of the same heads with so many query rows, the last of so many keys: for questions about sizes. Its
    tensors have shapes and types, and no values worth reading; they take no memory. batch: None for the call's own."""
    heads, width = call.q.shape[1], call.q.shape[3]
    batch = call.q.shape[0] if batch is None else batch
    shapes = (
        (batch, heads, rows, width),
        (batch, call.kv_heads, keys, width),
        (batch, call.kv_heads, keys, call.value_dim),
    )
    q, k, v = (call.q.new_empty(()).expand(shape) for shape in shapes)
    names = ("scale", "layer", "prompt_lengths", "window", "softcap", "sinks", "first_head")
    return AttentionCall(q, k, v, **{name: getattr(call, name) for name in names})


def over(call: AttentionCall, at: Callable[[Tensor], Tensor], layer: int) -> AttentionCall:
    """The call with other tensors in the place of its own: that of another layer. at: which, of the same sizes, types
    and strides, so that nothing of it is checked again."""

    def changed(x: Any) -> Any:
        return at(x) if isinstance(x, Tensor) else x

    def kept(x: Tensor | Pages) -> Tensor | Pages:
        return x.over(at) if isinstance(x, Pages) else at(x)

    keys = kept(call._k)
    values = keys if call._v is call._k else kept(call._v)
    rows = {name: changed(getattr(call, name)) for name in ("starts", "lengths", "prompt_lengths", "sinks")}
    return like(call, q=at(call.q), _k=keys, _v=values, layer=layer, **rows)


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Some rows of ``[B, H, N, *]``, by index int64 ``[B, n]``: ``[B, H, n, *]``, a copy."""
    return torch.gather(x, 2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _check_tensors(q: Tensor, k: Tensor | Pages, v: Tensor | Pages) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Pages) and name != "q":
            continue  # checked when they were made
        if not isinstance(x, Tensor):
            raise InvalidCallError(name, type(x).__name__, "pass a torch.Tensor [B, H, N, D]")
        if x.is_nested or x.layout != torch.strided:
            remedy = "pass a plain tensor [B, H, N, D]; rows of several lengths padded, and their lengths as `lengths`"
            raise InvalidCallError(name, odd_layout(x), remedy)
        if x.dim() != 4:
            raise InvalidCallError(name, f"of shape {tuple(x.shape)}", "pass four dimensions [B, H, N, D]")
        if x.dtype not in DTYPES:
            raise InvalidCallError(name, f"of {x.dtype}", "use float16, bfloat16, float32 or float64")
        if 0 in x.shape:
            raise InvalidCallError(name, f"of shape {tuple(x.shape)}", "no dimension may be empty")
    shape, keys, values = q.shape, k.shape, v.shape  # each a new object: asked once, for this runs in every layer
    dtype, device = q.dtype, q.device
    for name, x, given in (("k", k, keys), ("v", v, values)):
        if x.dtype != dtype:
            raise InvalidCallError(name, f"of {x.dtype}", f"use one dtype for q, k and v; q is {dtype}")
        if x.device != device:
            raise InvalidCallError(name, f"on {x.device}", f"move it to q's device {device}")
        if given[0] != shape[0]:
            paged = "; pages hold one request, so run batch rows one by one" if isinstance(x, Pages) else ""
            raise InvalidCallError(name, f"of batch {given[0]}", f"q has batch {shape[0]}{paged}")
    if keys[3] != shape[3]:
        raise InvalidCallError("k", f"of head dimension {keys[3]}", f"q has {shape[3]}")
    if values[1] != keys[1] or values[2] != keys[2]:
        raise InvalidCallError("v", f"of shape {tuple(values)}", f"heads and length must be k's, {tuple(keys)}")
    if shape[1] % keys[1]:
        remedy = f"query heads must be a multiple of the {keys[1]} KV heads"
        raise InvalidCallError("q", f"of {shape[1]} heads", remedy)


def _check_rows(call: AttentionCall) -> None:
    q_len, kv_len = call.q.shape[2], call.kv_len
    if call.q_offset is None:
        if kv_len < q_len:
            remedy = f"keys must cover the {q_len} query rows (bottom-right causal), or give q_offset"
            raise InvalidCallError("k", f"of length {kv_len}", remedy)
    elif not _is_int(call.q_offset) or not 0 <= call.q_offset <= kv_len - q_len:
        remedy = f"the {q_len} query rows must lie among the {kv_len} keys: 0 to {kv_len - q_len}"
        raise InvalidCallError("q_offset", printed(call.q_offset), remedy)
    prompt = call.prompt_lengths
    if _is_int(prompt) and not 0 <= cast(int, prompt) < LONGEST:
        raise InvalidCallError("prompt_lengths", printed(prompt), f"pass a number of tokens from 0 to {LONGEST - 1}")
    given: dict[str, Any] = {"starts": call.starts, "lengths": call.lengths, "prompt_lengths": prompt}
    for name, rows in given.items():
        if rows is None or (name == "prompt_lengths" and _is_int(rows)):
            continue
        number = " or a number of tokens" if name == "prompt_lengths" else ""
        remedy = f"pass an int32 tensor of shape ({call.q.shape[0]},){number}"
        _check_tensor(call, name, rows, call.q.shape[0], (torch.int32,), remedy)
        if rows.device.type == "cpu" and bool((rows < 0).any()):  # of other devices no value is read
            raise InvalidCallError(name, str(rows.tolist()), "pass numbers from 0")
    if call.q.device.type != "cpu":
        return
    starts, lengths = call.starts, call.lengths
    if starts is not None and bool((starts > kv_len).any()):
        raise InvalidCallError("starts", str(starts.tolist()), f"pass numbers from 0 to {kv_len}, the keys of a row")
    if lengths is not None and bool((lengths > kv_len - (0 if starts is None else starts)).any()):
        remedy = f"a row's real keys must lie among the {kv_len} from its start on: pass fewer"
        raise InvalidCallError("lengths", str(lengths.tolist()), remedy)


def _check_tensor(
    call: AttentionCall, name: str, x: Any, length: int, dtypes: tuple[torch.dtype, ...], remedy: str
) -> None:
    """Raise unless the tensor is ``[length]``, in one of these types, and beside q."""
    odd = odd_layout(x) if isinstance(x, Tensor) else printed(x)
    if odd or x.shape != (length,) or x.dtype not in dtypes:
        shown = odd or f"{x.dtype} {tuple(x.shape)}"
        raise InvalidCallError(name, shown, remedy)
    if x.device != call.q.device:
        raise InvalidCallError(name, f"on {x.device}", f"move it to q's device {call.q.device}")


def _check_numbers(call: AttentionCall) -> None:
    for name, value in (("scale", call.scale), ("softcap", call.softcap)):
        if value is not None and not (_is_number(value) and LEAST <= value <= MOST):
            remedy = f"pass a finite positive number from {LEAST:g} to {MOST:g}, or None"
            raise InvalidCallError(name, printed(value), remedy)
    if call.window is not None and not (_is_int(call.window) and call.window >= 1):
        raise InvalidCallError("window", printed(call.window), "pass a positive number of keys, or None")
    if not (_is_int(call.layer) and -LARGEST <= call.layer <= LARGEST):
        raise InvalidCallError("layer", printed(call.layer), "pass an integer, the index of the layer, below 2^31")
    if not (_is_int(call.first_head) and 0 <= call.first_head <= LARGEST):
        raise InvalidCallError("first_head", printed(call.first_head), "pass an integer from 0, below 2^31")
    if call.sinks is not None:
        heads = call.q.shape[1]
        remedy = f"pass one logit per query head, shape ({heads},), in float16, bfloat16, float32 or float64"
        _check_tensor(call, "sinks", call.sinks, heads, DTYPES, remedy)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
