"""Streaming and vertical-slash by brute force over (query, key) pairs: float64, one head at a time.

Shares no code with the plugin. Settled where the papers are silent:

- Tiles of `block` tokens lie on the batch row's own grid, position 0 being its first real token.
- Streaming is rounded up to whole tiles: a tile counts if any pair of it lies in the sinks or in the window.
- Vertical-slash samples the last `block` real queries of the call. Columns are single keys. Bin s of a slash holds the
  distances [s * block, (s + 1) * block); its pairs fall in the tile diagonals s and s + 1, and both are kept.
- The element that crosses the threshold is kept; of equal scores the earlier one; gamma = 1 keeps everything.
- The diagonal tile is kept always.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Keep = Callable[[int, int], bool]


def tiles_streaming(sink: int, window: int, block: int) -> Keep:
    """Whether (query position, key position) is computed."""
    known: dict[tuple[int, int], bool] = {}

    def tile(r: int, c: int) -> bool:
        queries, keys = range(r * block, (r + 1) * block), range(c * block, (c + 1) * block)
        return any(key < sink or query - key < window for query in queries for key in keys if key <= query)

    def keep(query: int, key: int) -> bool:
        at = (query // block, key // block)
        if at not in known:
            known[at] = tile(*at)
        return known[at]

    return keep


def _budget(scores: list[float], gamma: float) -> set[int]:
    """Algorithm 5: S = I[1:K], K = min {k : the k largest scores sum to gamma or more}."""
    if gamma == 1.0:
        return set(range(len(scores)))
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    taken: set[int] = set()
    total = 0.0
    for i in order:
        if total >= gamma:
            break
        taken.add(i)
        total += scores[i]
    return taken


def vertical_slash(
    q: Tensor, k: Tensor, first: int, gamma: float, block: int, scale: float, softcap: float | None
) -> Keep:
    """SharePrefill, Algorithm 5. q ``[n, D]`` stands at positions first, first + 1, ...; k ``[m, D]`` from 0."""
    sample = range(max(0, len(q) - block), len(q))
    a_v = [0.0] * len(k)
    a_s = [0.0] * (len(k) // block + 1)
    for i in sample:
        position = first + i
        logits = k[: position + 1] @ q[i] * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        for key, mass in enumerate(torch.softmax(logits, -1).tolist()):
            a_v[key] += mass / len(sample)
            a_s[(position - key) // block] += mass / len(sample)
    columns, slashes = _budget(a_v, gamma), _budget(a_s, gamma)

    def keep(query: int, key: int) -> bool:
        lag = query // block - key // block
        return lag == 0 or key in columns or lag in slashes or lag - 1 in slashes

    return keep


def dense_rows(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, softcap: float | None, keep: Keep) -> Tensor:
    """Output ``[n, Dv]`` of one head over the pairs that `keep` admits, and bool ``[n, m]`` of those pairs."""
    out = torch.zeros(len(q), v.shape[-1], dtype=torch.float64)
    for i in range(len(q)):
        keys = chosen(first + i, len(k), keep)
        logits = k[keys] @ q[i] * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        out[i] = torch.softmax(logits, -1) @ v[keys]
    return out


def chosen(position: int, length: int, keep: Keep) -> list[int]:
    """The keys that the query at `position` attends to."""
    return [key for key in range(min(position + 1, length)) if keep(position, key)]


def classic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    make: Callable[[Tensor, Tensor, int, float, float | None], Keep],
    *,
    q_offset: int | None = None,
    starts: list[int] | None = None,
    lengths: list[int] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and bool mask ``[B, Hq, Nq, Nkv]`` of every head; `make` gives a head's pattern."""
    batch, heads, q_len, width = q.shape
    kv_len = k.shape[2]
    offset = kv_len - q_len if q_offset is None else q_offset
    scale = 1.0 / math.sqrt(width)
    out = torch.zeros(batch, heads, q_len, v.shape[-1], dtype=torch.float64)
    mask = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool)
    for b in range(batch):
        start = 0 if starts is None else starts[b]
        length = kv_len - start if lengths is None else lengths[b]
        real = [i for i in range(q_len) if 0 <= offset + i - start < length]
        if not real:
            continue
        first = offset + real[0] - start
        for h in range(heads):
            kv = h // (heads // k.shape[1])
            queries, keys = q[b, h, real], k[b, kv, start : start + length]
            keep = make(queries, keys, first, scale, softcap)
            values = v[b, kv, start : start + length]
            out[b, h, real] = dense_rows(queries, keys, values, first, scale, softcap, keep)
            for n, i in enumerate(real):
                mask[b, h, i, [key + start for key in chosen(first + n, length, keep)]] = True
    return out, mask
