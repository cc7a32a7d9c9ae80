"""Attention of every query row over every key, with its log-sum-exp: no causal mask, no padding."""

from __future__ import annotations

import torch
from attrs import evolve
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from sparseprefill.call import AttentionCall
from sparseprefill.executors.dense import KERNELS
from sparseprefill.mask.mask import SparseMask
from sparseprefill.plan import Plan
from sparseprefill.stages import SparseExecutor

MANY = 128
"""Query rows from which cuDNN is tried before FlashAttention-2, which divides the keys of few rows among programs."""


def attend_all(executor: SparseExecutor, call: AttentionCall, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output ``[B, Hq, Nq, Dv]`` and LSE ``[B, Hq, Nq]`` of the call's queries over all keys of other tensors.

    call: gives q, scale, softcap and layer; its own keys, padding and window play no part. k, v: ``[B, Hkv, N, D]``
    and ``[B, Hkv, N, Dv]``, N > 0. A kernel of torch runs where there is one for the call, else the executor.
    """
    native = None if call.softcap is not None or v.shape[-1] != k.shape[-1] else _native(call, k, v)
    return _folded(executor, call, k, v) if native is None else native


def _native(call: AttentionCall, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    q, scale = call.q, call.softmax_scale
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        return None
    if q.device.type == "cpu":
        out, lse = KERNELS._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)
    elif not q.is_cuda:
        return None
    elif q.shape[2] >= MANY and can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, False, True)):
        out, lse = KERNELS._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False, scale=scale)[:2]
    elif q.shape[-1] % 8 == 0 and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, True)):
        out, lse = KERNELS._scaled_dot_product_flash_attention(q, k, v, 0.0, False, scale=scale)[:2]
    else:
        return None
    return out, lse.reshape(q.shape[:3])


def _folded(executor: SparseExecutor, call: AttentionCall, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Every query row as a head of its own, behind all keys: causality then hides none. Slow for many rows."""
    batch, heads, rows, width = call.q.shape
    q = call.q.reshape(batch, heads * rows, 1, width)
    one = AttentionCall(q, k, v, scale=call.scale, layer=call.layer, softcap=call.softcap)
    result = executor.execute(one, Plan(SparseMask.full(one)))
    return result.out.reshape(batch, heads, rows, -1), result.lse.reshape(batch, heads, rows)


def attend_rows(
    executor: SparseExecutor, call: AttentionCall, k: Tensor, v: Tensor, lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Output and LSE over the `lengths` first keys of each batch row; zeros and -inf where a row has none."""
    if len(set(lengths)) == 1 and lengths[0] > 0:
        return attend_all(executor, call, k[:, :, : lengths[0]], v[:, :, : lengths[0]])
    exact = call.q.dtype == torch.float64
    out = call.q.new_zeros(*call.q.shape[:3], v.shape[-1])
    lse = call.q.new_full(call.q.shape[:3], -torch.inf, dtype=torch.float64 if exact else torch.float32)
    for row, length in enumerate(lengths):
        if length:
            here = slice(row, row + 1)
            alone = evolve(call, q=call.q[here], k=call.k[here], v=call.v[here], starts=None, lengths=None)
            out[here], lse[here] = attend_all(executor, alone, k[here, :, :length], v[here, :, :length])
    return out, lse
