"""Dense causal attention with its log-sum-exp, by the fastest kernel that torch has for the call."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from attrs import evolve
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.kernels.family.chips import amd, chip
from sparseprefill.mask.mask import SparseMask
from sparseprefill.plan import Kernel, Plan, Result
from sparseprefill.stages import SparseExecutor

KERNELS: Any = torch
"""Of torch: the operators behind `scaled_dot_product_attention`, which alone return the log-sum-exp."""
NATIVE = (Kernel("torch"),)


@uncast
def dense(call: AttentionCall, executor: SparseExecutor, reason: str = "") -> Result:
    """Attention over every key that the call allows. reason: why, for `Result.dense`.

    Where torch has a kernel that returns the log-sum-exp, that; else the executor with a full mask: padding, window,
    softcap, sinks, values of another width than the keys.
    """
    native = attend(call)
    if native is None:
        return evolve(executor.execute(call, Plan(SparseMask.full(call))), dense=reason)
    return Result(native[0], native[1], Plan(partial(SparseMask.full, call)), dense=reason, kernels=NATIVE)


def attend(call: AttentionCall) -> tuple[Tensor, Tensor] | None:
    """Output ``[B, Hq, Nq, D]`` and LSE ``[B, Hq, Nq]`` by a kernel of torch; None where it has none for this call."""
    if call.starts is not None or call.lengths is not None or call.geometry.window is not None:
        return None
    if call.softcap is not None or call.sinks is not None or call.value_dim != call.q.shape[-1]:
        return None
    q, k, v = call.q, call.k, call.v
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        return None
    if call.q_offset is not None:  # later keys are seen by no query
        k, v = (x[:, :, : call.q_offset + q.shape[2]] for x in (k, v))
    if q.is_cuda:
        return _cuda(q, k, v, call.softmax_scale)
    return _cpu(q, k, v, call.softmax_scale) if q.device.type == "cpu" else None


def _cuda(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor] | None:
    params = SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1])
    whole = q.shape[2] == k.shape[2]
    if whole and chip(q.device).cudnn and can_use_cudnn_attention(params):
        out, lse = KERNELS._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, scale=scale)[:2]
    elif _flash(q, whole) and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, True)):
        out, lse = KERNELS._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[:2]
    else:
        return None
    return out, lse.reshape(q.shape[:3])


def _cpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    rows, keys = q.shape[2], k.shape[2]
    mask = None
    if rows != keys:
        mask = torch.full((rows, keys), -torch.inf, dtype=q.dtype, device=q.device).triu_(keys - rows + 1)
    run = KERNELS._scaled_dot_product_flash_attention_for_cpu
    out, lse = run(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
    return out, lse if q.dtype == torch.float64 else lse.float()


def _flash(q: Tensor, whole: bool) -> bool:
    """True if torch's flash attention computes what is meant: its `is_causal` aligns the last query with the last key,
    as torch.nn.attention.bias relies on. That is not said of AMD's kernel, which serves whole prompts alone."""
    return q.shape[-1] % 8 == 0 and (whole or not amd(q.device))
