"""Dense attention as the yardstick: cuDNN's kernel on a GPU, PyTorch's own choice on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparseprefill.call import AttentionCall

KERNELS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}
ANY = "SDPA"
LARGE = 1 << 31
"""Elements of q from which the heads run in groups, one after the other: kernels may address with 32 bits."""


@frozen(eq=False)
class Baseline:
    """Dense causal attention over the tokens of each batch row. kernel: its name, `ANY` where PyTorch chooses."""

    kernel: str
    run: Callable[[], Sequence[Tensor]]


def baseline(call: AttentionCall, lengths: Sequence[int]) -> Baseline:
    """For a call whose batch rows have these lengths, none of them padded on the left.

    Rows of unequal lengths run one after the other at their own length, which is faster than a padded batch.
    On a GPU the first of cuDNN and FlashAttention that takes the call; float32 is for neither.
    """
    pieces = [
        tuple(x[row : row + 1, :, :length] for x in (call.q, call.k, call.v)) for row, length in enumerate(lengths)
    ]
    if len(set(lengths)) == 1:
        pieces = [(call.q, call.k, call.v)]
    if call.q.numel() >= LARGE:
        pieces = [part for piece in pieces for part in _groups(*piece)]
    scale = call.softmax_scale

    def run(kernel: str, count: int | None = None) -> list[Tensor]:
        with forced(kernel):
            return [
                functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
                for q, k, v in pieces[:count]
            ]

    for kernel in KERNELS if call.q.device.type == "cuda" else ():
        try:
            run(kernel, 1)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            continue
        return Baseline(kernel, partial(run, kernel))
    return Baseline(ANY, partial(run, ANY))


def forced(kernel: str) -> AbstractContextManager[object]:
    """Makes PyTorch's attention use one of `KERNELS`, or raise RuntimeError where it cannot; `ANY` leaves it free."""
    return nullcontext() if kernel == ANY else sdpa_kernel(KERNELS[kernel])


def _groups(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    ratio = q.shape[1] // k.shape[1]
    return [(q[:, i * ratio : (i + 1) * ratio], k[:, i : i + 1], v[:, i : i + 1]) for i in range(k.shape[1])]
