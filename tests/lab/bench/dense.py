"""Dense attention as the yardstick: the faster of PyTorch's kernels on a GPU, PyTorch's own choice on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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
ANY = "SDPA"
LARGE = 1 << 31
"""Elements of q from which the heads run in groups, one after the other: kernels may address with 32 bits."""

Piece = tuple[Tensor, Tensor, Tensor]
_fastest: dict[tuple[object, ...], str] = {}


@frozen(eq=False)
class Baseline:
    """Dense causal attention over the tokens of each batch row. kernel: its name, `ANY` where PyTorch chooses.

    run: the outputs of its launches, whose layout is the kernel's own.
    """

    kernel: str
    run: Callable[[], Sequence[Tensor]]


def baseline(call: AttentionCall, lengths: Sequence[int]) -> Baseline:
    """The fastest kernel for a call whose batch rows have these lengths, none of them padded on the left.

    Rows of unequal lengths run one after the other at their own length, which is faster than a padded batch. On a GPU
    the kernels that take the call (none takes float32) are timed, once for each shape.
    """
    pieces, scale = pieces_of(call, lengths), call.softmax_scale
    every = [by(kernel, pieces[:1], scale) for kernel in KERNELS] if call.q.is_cuda else []
    able = [one for one in every if takes(one)] or [by(ANY, pieces[:1], scale)]
    return by(fastest(able, call, lengths), pieces, scale)


def fastest(able: Sequence[Baseline], call: AttentionCall, lengths: Sequence[int]) -> str:
    """The fastest of several kernels for a call, timed on its first launch, once for each shape."""
    shape = (call.q.device, call.q.dtype, call.q.shape, call.k.shape, *lengths, *(one.kernel for one in able))
    if len(able) > 1 and shape not in _fastest:
        clock = Clock(call.q.device, rounds=3, budget=0.5)
        _fastest[shape] = min(able, key=lambda one: clock.median(one.run)).kernel
    return _fastest.get(shape, able[0].kernel)


def takes(one: Baseline) -> bool:
    """Whether a kernel takes the call: it runs once."""
    try:
        one.run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a kernel of others raises for what it does not take
        logger.info("%s does not take this call: %s", one.kernel, str(error).split("\n")[0])
        return False
    return True


def by(kernel: str, pieces: Sequence[Piece], scale: float) -> Baseline:
    """Attention of every piece by one kernel of PyTorch's, one after the other."""

    def run() -> list[Tensor]:
        with forced(kernel):
            return [
                functional.scaled_dot_product_attention(q, k, v, **_causal(q, k), scale=scale, enable_gqa=True)
                for q, k, v in pieces
            ]

    return Baseline(kernel, run)


def forced(kernel: str) -> AbstractContextManager[object]:
    """Makes PyTorch's attention use one of `KERNELS`, or raise RuntimeError where it cannot; `ANY` leaves it free."""
    return nullcontext() if kernel == ANY else sdpa_kernel(KERNELS[kernel])


def fastest_first() -> AbstractContextManager[object]:
    """Makes PyTorch's attention prefer the kernels of `KERNELS`, in their order, to its own choice."""
    return sdpa_kernel([*KERNELS.values(), SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)


def pieces_of(call: AttentionCall, lengths: Sequence[int]) -> list[Piece]:
    """q, k, v of each launch: the whole batch, or one row after the other; groups of heads where q is `LARGE`."""
    q, k, v = call.q, call.k, call.v
    pieces: list[Piece] = [(q, k, v)]
    if len(set(lengths)) > 1:
        cut = partial(_row, lengths=lengths)
        pieces = [(cut(q, row), cut(k, row), cut(v, row)) for row in range(len(lengths))]
    if q.numel() < LARGE:
        return pieces
    group = call.group
    return [
        (q[:, i * group : (i + 1) * group], k[:, i : i + 1], v[:, i : i + 1])
        for q, k, v in pieces
        for i in range(k.shape[1])
    ]


def _row(x: Tensor, row: int, lengths: Sequence[int]) -> Tensor:
    return x[row : row + 1, :, : lengths[row]]


def _causal(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Causality whose last row sees every key: a flag of PyTorch's only where there are as many queries as keys."""
    if q.shape[2] == k.shape[2]:
        return {"is_causal": True}
    return {"attn_mask": causal_lower_right(q.shape[2], k.shape[2])}
