"""Star Attention, phase by phase, host by host: float64, one head at a time, plain loops.

Shares no code with the plugin. Section and equation numbers are the paper's (Acharya et al., 2024). Settled where the
paper is silent:

- Positions are each batch row's own, 0 being its first real token; K/V keep the positions of their tokens.
- The context is the row's keys, or the first `context_length` of them, or all but the last ``-context_length``.
- A block is a quarter of the context, rounded up, and 32768 tokens above a context of 131072 (section 3.4).
- Sizes are in whole tiles of `tile` tokens: block and anchor rounded up, a given context rounded down. The last block
  is as short as it is.
- The anchor may be shorter or longer than a block: a block sees the first `anchor_length` keys before its own start.
- Phase 2 follows equations 1 to 4 with the log of the sums, merged by log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from attrs import frozen
from torch import Tensor


@frozen
class Parameters:
    """The public parameters."""

    block_size: int | None = None
    anchor_length: int | None = None
    context_length: int | None = None
    tile: int = 1


@frozen
class Sizes:
    """What holds for one batch row, in tokens."""

    block: int
    anchor: int
    context: int


def sizes(p: Parameters, length: int) -> Sizes:
    """Section 3.4, for a row of `length` keys."""
    context = length
    if p.context_length is not None:
        context = p.context_length if p.context_length >= 0 else max(length + p.context_length, 0)
    block = p.block_size
    if block is None:
        block = 32768 if context > 131072 else max(math.ceil(context / 4), 1)
    block = math.ceil(block / p.tile) * p.tile
    anchor = block if p.anchor_length is None else math.ceil(p.anchor_length / p.tile) * p.tile
    if p.context_length is not None:
        context = context // p.tile * p.tile
    return Sizes(block, anchor, context)


def local_attention(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Equations 1 and 2: one row's output over some keys, and the log of its sum of exponents."""
    return torch.softmax(logits, -1) @ values, torch.logsumexp(logits, -1)


def aggregate(parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Equations 3 and 4."""
    outs, sums = zip(*parts, strict=True)
    weights = torch.softmax(torch.stack(sums), 0)
    total: Tensor = (weights[:, None] * torch.stack(outs)).sum(0)
    return total


def head(
    q: Tensor, k: Tensor, v: Tensor, first: int, s: Sizes, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Output ``[n, Dv]`` and bool ``[n, m]`` of one head whose query 0 stands at `first`."""
    out, mask = torch.zeros(len(q), v.shape[-1], dtype=torch.float64), torch.zeros(len(q), len(k), dtype=torch.bool)

    def attend(i: int, keys: list[int]) -> tuple[Tensor, Tensor]:
        logits = k[keys] @ q[i] * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        mask[i, keys] = True
        return local_attention(logits, v[keys])

    for i in range(len(q)):
        position = first + i
        if position < s.context:  # phase 1 (section 2.1): the host of this block holds (anchor, block)
            begin = position // s.block * s.block
            augmented = [*range(min(s.anchor, begin)), *range(begin, min(begin + s.block, s.context, len(k)))]
            out[i] = attend(i, [key for key in augmented if key <= position])[0]
            continue
        context = min(s.context, len(k))  # phase 2 (section 2.2): every host holds its block, the query host the rest
        hosts = [range(begin, min(begin + s.block, context)) for begin in range(0, context, s.block)]
        hosts.append(range(context, position + 1))
        out[i] = aggregate(attend(i, list(keys)) for keys in hosts if len(keys))
    return out, mask


def star_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Parameters,
    *,
    q_offset: int | None = None,
    starts: list[int] | None = None,
    lengths: list[int] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and bool mask ``[B, Hq, Nq, Nkv]`` of every head."""
    batch, heads, q_len, width = q.shape
    kv_len = k.shape[2]
    offset = kv_len - q_len if q_offset is None else q_offset
    out = torch.zeros(batch, heads, q_len, v.shape[-1], dtype=torch.float64)
    mask = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool)
    for b in range(batch):
        start = 0 if starts is None else starts[b]
        length = kv_len - start if lengths is None else lengths[b]
        real = [i for i in range(q_len) if 0 <= offset + i - start < length]
        if not real:
            continue
        keys = slice(start, start + length)
        for h in range(heads):
            kv = h // (heads // k.shape[1])
            first = offset + real[0] - start
            k_h, v_h = k[b, kv, keys], v[b, kv, keys]
            found = head(q[b, h, real], k_h, v_h, first, sizes(p, length), 1.0 / math.sqrt(width), softcap)
            out[b, h, real] = found[0]
            mask[b, h, real, keys] = found[1]
    return out, mask
