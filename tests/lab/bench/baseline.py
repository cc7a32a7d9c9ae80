"""The yardstick of our pages: the fastest of PyTorch's kernels and FlashAttention-4, on a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from torch import Tensor

from sparseprefill.call import AttentionCall

from . import dense
from .dense import ANY, KERNELS, Baseline, Piece, by, fastest, pieces_of, takes

logger = logging.getLogger(__name__)

FLASH4 = "FlashAttention-4"
"""The package flash-attn-4, where it is installed."""
APART = 0.01
"""How far a kernel's output may be from that of PyTorch's, as a share of its norm, for its time to count."""


def baseline(call: AttentionCall, lengths: Sequence[int]) -> Baseline:
    """The fastest kernel for a call whose batch rows have these lengths, as `dense.baseline` finds it."""
    if not call.q.is_cuda or flash4() is None:
        return dense.baseline(call, lengths)
    pieces, scale = pieces_of(call, lengths), call.softmax_scale
    able = able_of(pieces[:1], scale) or [by(ANY, pieces[:1], scale)]
    return _made(fastest(able, call, lengths), pieces, scale)


def dense_of(kernel: str, call: AttentionCall) -> Baseline:
    """Dense attention by one kernel, by its name, fastest or not; for batch rows that are all as long.

    Running it raises whatever the kernel raises for a call that it does not take.
    """
    return _made(kernel, pieces_of(call, [call.kv_len] * call.q.shape[0]), call.softmax_scale)


@cache
def flash4() -> Callable[..., Any] | None:
    """flash-attn-4's function; None where the package cannot be imported."""
    try:
        from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    function: Callable[..., Any] = flash_attn_func
    return function


def able_of(pieces: Sequence[Piece], scale: float) -> list[Baseline]:
    """The kernels that take the first piece, and whose output is that of the first of PyTorch's."""
    found: list[Baseline] = []
    truth: Tensor | None = None
    for kernel in (*KERNELS, FLASH4):
        one = None if kernel == FLASH4 and flash4() is None else _made(kernel, pieces[:1], scale)
        if one is None or not takes(one):
            continue
        out = one.run()[0]
        out = out.transpose(1, 2) if kernel == FLASH4 else out
        if truth is None:
            truth = by(ANY, pieces[:1], scale).run()[0] if kernel == FLASH4 else out
        apart = float((out.float() - truth.float()).norm() / truth.float().norm().clamp(min=1e-30))
        if not apart <= APART:
            logger.warning("%s does not count as dense attention: its output is off by %.3f", kernel, apart)
            continue
        found.append(_made(kernel, pieces, scale))
    return found


def _made(kernel: str, pieces: Sequence[Piece], scale: float) -> Baseline:
    if kernel != FLASH4:
        return by(kernel, pieces, scale)
    turned = [_each(lambda x: x.transpose(1, 2).contiguous(), piece) for piece in pieces]  # [B, N, H, D]
    return Baseline(kernel, partial(_flash4, turned, scale))


def _flash4(pieces: Sequence[Piece], scale: float) -> list[Tensor]:
    function = flash4()
    if function is None:
        raise RuntimeError("flash-attn-4 is not installed")
    found = [function(q, k, v, softmax_scale=scale, causal=True) for q, k, v in pieces]
    return [one[0] if isinstance(one, tuple) else one for one in found]


def _each(change: Callable[[Tensor], Tensor], piece: Piece) -> Piece:
    q, k, v = piece
    return change(q), change(k), change(v)
