"""Plain attention as the contracts' yardstick: one small softmax that shares no code with the library it judges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def allowed_pairs(call: AttentionCall) -> Tensor:
    """bool ``[B, Nq, Nkv]``: pairs that causality, window and padding allow, from the call's own fields."""
    batch, _, q_len, _ = call.q.shape
    kv_len, device = call.kv_len, call.q.device
    offset = kv_len - q_len if call.q_offset is None else call.q_offset
    zeros = torch.zeros(batch, dtype=torch.int64, device=device)
    start = zeros if call.starts is None else call.starts.to(torch.int64)
    behind = zeros + kv_len if call.lengths is None else start + call.lengths
    start, behind = start[:, None, None], behind[:, None, None]
    row = (torch.arange(q_len, device=device) + offset)[None, :, None]
    key = torch.arange(kv_len, device=device)[None, None, :]
    allowed = (start <= key) & (key <= row) & (row < behind)
    return allowed if call.window is None else allowed & (key > row - min(call.window, kv_len))


def attention(call: AttentionCall, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output ``[B, Hq, Nq, Dv]`` and LSE ``[B, Hq, Nq]`` in float64 over the allowed pairs, those in `keep` alone.

    keep: bool ``[B, Hq, Nq, Nkv]``. A pair left out adds nothing, whatever its key and value hold. A row without a
    pair gives zeros and an LSE of -inf.
    """
    allowed = allowed_pairs(call)[:, None]
    keep = allowed if keep is None else allowed & keep
    q, k, v = (x.to(torch.float64) for x in (call.q, call.k, call.v))
    ratio = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    logits = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    logits = torch.where(keep, logits, -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    weight = torch.exp(logits - torch.where(peak == -torch.inf, 0.0, peak))
    total = weight.sum(-1, keepdim=True)
    lse = torch.where(peak == -torch.inf, -torch.inf, peak + torch.log(total))[..., 0]
    if call.sinks is not None:
        sink = call.sinks.to(torch.float64)[None, :, None, None]
        total = total + torch.exp(sink - torch.where(peak == -torch.inf, 0.0, peak))
    out = _weighted(weight, v, keep.expand_as(logits)) / torch.where(total == 0, 1.0, total)
    return out, lse


def _weighted(weight: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Weighted values, where 0 * NaN of a pair that is left out stays out."""
    clean = torch.isfinite(v).all(-1, keepdim=True)
    out = weight @ torch.where(clean, v, 0.0)
    nonfinite = torch.nonzero(~clean.all(1).all(0)[:, 0])[:, 0]
    for key in nonfinite.tolist():
        term = weight[..., key, None] * torch.where(clean, 0.0, v)[:, :, None, key]
        out = out + torch.where(keep[..., key, None], term, 0.0)
    return out


def difference(expected: Tensor, actual: Tensor, dtype: torch.dtype) -> str | None:
    """None where `actual` agrees within the tolerance of `dtype`, NaN and infinities in place; else what differs."""
    if expected.shape != actual.shape:
        return f"expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    if expected.numel() == 0:
        return None
    want, got = expected.to(torch.float64), actual.to(torch.float64)
    bound = TOLERANCE[dtype] * (1 + want.abs())
    close = ((want - got).abs() <= bound) | (want == got) | (torch.isnan(want) & torch.isnan(got))
    if bool(close.all()):
        return None
    worst = torch.nonzero(~close)[0].tolist()
    at = tuple(worst)
    return f"at {worst} expected {float(want[at]):.6g}, got {float(got[at]):.6g} ({int((~close).sum())} entries differ)"
