"""Dense attention as the yardstick: the fastest kernel at hand on a GPU, PyTorch's own choice on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from sparseprefill.call import AttentionCall

from .clock import Clock

logger = logging.getLogger(__name__)

KERNELS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}
"""PyTorch's own, in the order in which they are tried."""
FLASH4 = "FlashAttention-4"
"""The package flash-attn-4, where it is installed."""
ANY = "SDPA"
LARGE = 1 << 31
"""Elements of q from which the heads run in groups, one after the other: kernels may address with 32 bits."""
APART = 0.01
"""How far a kernel's output may be from that of PyTorch's, as a share of its norm, for its time to count."""

_Piece = tuple[Tensor, Tensor, Tensor]
_fastest: dict[tuple[object, ...], str] = {}


@frozen(eq=False)
class Baseline:
    """Dense causal attention over the tokens of each batch row. kernel: its name, `ANY` where PyTorch chooses.

    run: the outputs of its launches, whose layout is the kernel's own.
    """

    kernel: str
    run: Callable[[], Sequence[Tensor]]


def baseline(call: AttentionCall, lengths: Sequence[int]) -> Baseline:
    """For a call whose batch rows have these lengths, none of them padded on the left.

    Rows of unequal lengths run one after the other at their own length, which is faster than a padded batch.
    On a GPU the fastest kernel of those that take the call (float32 is for none of them); which one that is, is
    measured once for each shape.
    """
    pieces = _pieces(call, lengths)
    free = Baseline(ANY, partial(_sdpa, pieces, call.softmax_scale, ANY))
    if call.q.device.type != "cuda":
        return free
    shape = (call.q.device, call.q.dtype, call.q.shape, call.k.shape, *lengths)
    if shape in _fastest:
        return _made(_fastest[shape], pieces, call.softmax_scale)
    able = _able(pieces, call.softmax_scale)
    clock = Clock(call.q.device, rounds=3, budget=0.5)
    best = able[0] if len(able) == 1 else min(able, key=lambda one: clock.median(one.run)) if able else free
    _fastest[shape] = best.kernel
    return best


def dense_of(kernel: str, call: AttentionCall) -> Baseline:
    """The same by one kernel, by its name, whether or not it is the fastest; for batch rows that are all as long.

    Running it raises whatever the kernel raises for a call that it does not take.
    """
    return _made(kernel, _pieces(call, [call.kv_len] * call.q.shape[0]), call.softmax_scale)


def forced(kernel: str) -> AbstractContextManager[object]:
    """Makes PyTorch's attention use one of `KERNELS`, or raise RuntimeError where it cannot; `ANY` leaves it free."""
    return nullcontext() if kernel == ANY else sdpa_kernel(KERNELS[kernel])


@cache
def flash4() -> Callable[..., Any] | None:
    """flash-attn-4's function; None where the package cannot be imported."""
    try:
        from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    function: Callable[..., Any] = flash_attn_func
    return function


def _pieces(call: AttentionCall, lengths: Sequence[int]) -> list[_Piece]:
    whole = call.q, call.k, call.v
    pieces = [_each(partial(_row, row, length), whole) for row, length in enumerate(lengths)]
    if len(set(lengths)) == 1:
        pieces = [whole]
    if call.q.numel() >= LARGE:
        pieces = [part for piece in pieces for part in _groups(*piece)]
    return pieces


def _able(pieces: Sequence[_Piece], scale: float) -> list[Baseline]:
    """The kernels that take the first piece, and whose output is that of the first of PyTorch's."""
    found: list[Baseline] = []
    truth: Tensor | None = None
    for kernel in (*KERNELS, FLASH4):
        if kernel == FLASH4 and flash4() is None:
            continue
        try:
            out = _made(kernel, pieces[:1], scale).run()[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Whatever a kernel of others raises for what it does not take.
            logger.info("%s does not take this call: %s", kernel, str(error).split("\n")[0])
            continue
        out = out.transpose(1, 2) if kernel == FLASH4 else out
        if truth is None:
            truth = _sdpa(pieces[:1], scale, ANY)[0] if kernel == FLASH4 else out
        apart = float((out.float() - truth.float()).norm() / truth.float().norm().clamp(min=1e-30))
        if not apart <= APART:
            logger.warning("%s does not count as dense attention: its output is off by %.3f", kernel, apart)
            continue
        found.append(_made(kernel, pieces, scale))
    return found


def _made(kernel: str, pieces: Sequence[_Piece], scale: float) -> Baseline:
    if kernel != FLASH4:
        return Baseline(kernel, partial(_sdpa, pieces, scale, kernel))
    turned = [_each(lambda x: x.transpose(1, 2).contiguous(), piece) for piece in pieces]  # [B, N, H, D]
    return Baseline(kernel, partial(_flash4, turned, scale))


def _sdpa(pieces: Sequence[_Piece], scale: float, kernel: str) -> list[Tensor]:
    with forced(kernel):
        return [
            functional.scaled_dot_product_attention(q, k, v, **_causal(q, k), scale=scale, enable_gqa=True)
            for q, k, v in pieces
        ]


def _causal(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Causality whose last row sees every key: a flag of PyTorch's only where there are as many queries as keys."""
    if q.shape[2] == k.shape[2]:
        return {"is_causal": True}
    return {"attn_mask": causal_lower_right(q.shape[2], k.shape[2])}


def _flash4(pieces: Sequence[_Piece], scale: float) -> list[Tensor]:
    function = flash4()
    if function is None:
        raise RuntimeError("flash-attn-4 is not installed")
    found = [function(q, k, v, softmax_scale=scale, causal=True) for q, k, v in pieces]
    return [one[0] if isinstance(one, tuple) else one for one in found]


def _row(row: int, length: int, x: Tensor) -> Tensor:
    return x[row : row + 1, :, :length]


def _each(change: Callable[[Tensor], Tensor], piece: _Piece) -> _Piece:
    q, k, v = piece
    return change(q), change(k), change(v)


def _groups(q: Tensor, k: Tensor, v: Tensor) -> list[_Piece]:
    ratio = q.shape[1] // k.shape[1]
    return [(q[:, i * ratio : (i + 1) * ratio], k[:, i : i + 1], v[:, i : i + 1]) for i in range(k.shape[1])]
