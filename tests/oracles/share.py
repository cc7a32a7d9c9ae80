"""Sharing over any method, head by head in float64: SharePrefill's Algorithms 1 to 4, with another mask for the rest.

Who shares and who makes a pivot is decided, and pivots are made, as in `oracles.share_prefill`; heads that do neither
compute the pairs of the inner mask, which is given, and no others. Shares no code with the plugin.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracles.classic import Keep, chosen, dense_rows
from oracles.share_prefill import Answer, Clusters, Head, Parameters, Pivot, decide, pivot_pattern


def share(
    layers: list[tuple[Tensor, Tensor, Tensor]],
    inner: list[Tensor],
    clusters: Clusters,
    p: Parameters,
    *,
    q_offset: int | None = None,
    starts: list[int] | None = None,
    lengths: list[int] | None = None,
    softcap: float | None = None,
) -> list[Answer]:
    """All layers of one call, in order. inner: of each layer the inner method's mask, bool ``[B, Hq, Nq, Nkv]``.

    Patterns are "shared", "dense" and, for the inner mask, "vertical_slash", as the paper names its own.
    """
    batch = layers[0][0].shape[0]
    pivots: list[dict[int, Pivot]] = [{} for _ in range(batch)]
    answers = []
    for layer, ((q, k, v), theirs) in enumerate(zip(layers, inner, strict=True)):
        heads, q_len, kv_len = q.shape[1], q.shape[2], k.shape[2]
        offset = kv_len - q_len if q_offset is None else q_offset
        scale = 1.0 / math.sqrt(q.shape[-1])
        out = torch.zeros(batch, heads, q_len, v.shape[-1], dtype=torch.float64)
        mask = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool)
        patterns: list[list[str]] = []
        for b in range(batch):
            start = 0 if starts is None else starts[b]
            length = kv_len - start if lengths is None else lengths[b]
            real = [i for i in range(q_len) if 0 <= offset + i - start < length]
            patterns.append([])
            if not real:
                continue
            first, keys = offset + real[0] - start, slice(start, start + length)
            own = [Head(q[b, h, real], k[b, h * k.shape[1] // heads, keys], first, scale, softcap)
                   for h in range(heads)]  # fmt: skip
            last = range(max(first, own[0].end - p.block), own[0].end)
            a_hats = [head.scores(last, p) for head in own]
            patterns[-1] = decide(a_hats, layer, clusters, pivots[b], p)
            made = {}
            for h, pattern in enumerate(patterns[-1]):
                cluster = clusters.get((layer, h), -1)
                keep = _keep(pattern, pivots[b].get(cluster), theirs[b, h, real][:, keys], first, p.block)
                values = v[b, h * k.shape[1] // heads, keys]
                out[b, h, real] = dense_rows(own[h].Q, own[h].K, values, first, scale, softcap, keep)
                for n, i in enumerate(real):
                    mask[b, h, i, [key + start for key in chosen(first + n, length, keep)]] = True
                if pattern == "dense":
                    made[cluster] = Pivot(a_hats[h], pivot_pattern(own[h], p))
            pivots[b].update(made)
        answers.append(Answer(out, mask, patterns))
    return answers


def _keep(pattern: str, pivot: Pivot | None, theirs: Tensor, first: int, size: int) -> Keep:
    if pattern == "dense":
        return lambda query, key: True
    if pattern == "vertical_slash":
        return lambda query, key: bool(theirs[query - first, key])
    assert pivot is not None
    M = pivot.M
    return lambda query, key: query // size == key // size or (query // size, key // size) in M
