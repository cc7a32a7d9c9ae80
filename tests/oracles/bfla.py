"""BFLA, Stage 1 and the tile-level rescues, in plain loops: float64, one head at a time, equation by equation.

Shares no code with the plugin or the core. Settled where the paper is silent or prints wrongly:

- Blocks, groups and tiles lie on the batch row's own grid, position 0 being its first real token (eq. 5 counts query
  blocks from the call's first row, which is the same where a chunk begins at a block).
- Keys after the call's last query are not there: no query may see them, and the next chunk brings them.
- A pair of groups is compared over the positions within the group where both have a token. With none it is -inf: a
  pair of padding must not win the maximum of eq. 4 with a score of 0.
- alpha is the call's scale; score_norm "mean" divides the score by g, and there the softcap, if any, applies.
- A share gamma of 1 keeps every causal block. Of equal probabilities the earlier block goes first.
- Eq. 15: the diagonal tile and the n_local tiles before it. Eq. 16: the first tiles. Eq. 17 to 20 print the rescue
  inverted: a tile is kept if mass or local or sink or stride or random keeps it.
- chi(i, j; s) = j + hash(s, layer, head, i), so each query tile rescues every eta-th key tile, from a phase of its own;
  psi = hash(s, layer, head, i, j) / 2^32.
- The diagonal tile is kept always.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parameters:
    """As the paper names them: b, g, gamma, n_local, eta, rho, s, T."""

    b: int
    g: int
    gamma: float
    T: int
    norm: str = "sum"
    n_local: int = 0
    n_sink: int = 0
    eta: int | None = None
    rho: float = 0.0
    s: int = 0
    gqa_union: bool = False


def mix(x: int) -> int:
    """A 32-bit integer hash."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32
    x = ((x ^ (x >> 15)) * 0x735A2D97) % 2**32
    return x ^ (x >> 15)


def hash_words(words: Sequence[int]) -> int:
    """Folds 32-bit words into one."""
    state = 0
    for word in words:
        state = mix(((state ^ (word % 2**32)) + 0x9E3779B9) % 2**32)
    return state


STRIDE, RANDOM = 1, 2  # two uses of one seed


def block_score(q: dict[int, Tensor], k: dict[int, Tensor], i: int, j: int, p: Parameters) -> float:
    """Eq. 3 and 4: the largest dot product over pairs of flattened groups; q and k hold real tokens by position."""
    best = -math.inf
    for u in range(p.b // p.g):
        for v in range(p.b // p.g):
            total, common = 0.0, False
            for t in range(p.g):
                query, key = i * p.b + u * p.g + t, j * p.b + v * p.g + t
                if query in q and key in k:
                    total, common = total + float(q[query] @ k[key]), True
            if common:
                best = max(best, total)
    return best


def mass_blocks(
    q: dict[int, Tensor],
    k: dict[int, Tensor],
    i: int,
    p: Parameters,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> set[int]:
    """Eq. 5 to 12: the key blocks that the query block i keeps by mass."""
    e_i = (i + 1) * p.b - 1
    causal = [j for j in range(max(k) // p.b + 1) if j * p.b <= e_i]
    if window is not None:  # blocks with a pair that the window allows to some row of the block
        causal = [j for j in causal if i * p.b - ((j + 1) * p.b - 1) < window]
    if p.gamma == 1.0:
        return set(causal)
    alpha = scale / (p.g if p.norm == "mean" else 1)
    s = {j: alpha * block_score(q, k, i, j, p) for j in causal}
    if softcap is not None and p.norm == "mean":
        s = {j: value if value == -math.inf else softcap * math.tanh(value / softcap) for j, value in s.items()}
    peak = max(s.values())
    exp = {j: math.exp(value - peak) for j, value in s.items()}
    a = {j: value / sum(exp.values()) for j, value in exp.items()}
    kept: set[int] = set()
    total = 0.0
    for j in sorted(a, key=lambda j: -a[j]):
        if total >= p.gamma:
            break
        kept.add(j)
        total += a[j]
    return kept


def rescued(i: int, j: int, head: int, layer: int, p: Parameters) -> bool:
    """Eq. 15 to 20 for query tile i and key tile j."""
    seed = (p.s % 2**32, p.s // 2**32)
    local = i - p.n_local <= j <= i
    sink = j < p.n_sink
    stride = p.eta is not None and (j + hash_words((STRIDE, *seed, layer, head, i))) % p.eta == 0
    random = hash_words((RANDOM, *seed, layer, head, i, j)) / 2**32 < p.rho
    return local or sink or stride or random


def bfla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Parameters,
    *,
    q_offset: int | None = None,
    starts: list[int] | None = None,
    lengths: list[int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    layer: int = 0,
) -> tuple[Tensor, Tensor]:
    """Output and bool mask ``[B, Hq, Nq, Nkv]``, eq. 21 over the pairs of the kept tiles."""
    batch, heads, q_len, width = q.shape
    kv_len = k.shape[2]
    offset = kv_len - q_len if q_offset is None else q_offset
    scale = 1.0 / math.sqrt(width) if scale is None else scale
    out = torch.zeros(batch, heads, q_len, v.shape[-1], dtype=torch.float64)
    mask = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool)
    for b in range(batch):
        start = 0 if starts is None else starts[b]
        length = kv_len - start if lengths is None else lengths[b]
        rows = {offset + n - start: n for n in range(q_len) if 0 <= offset + n - start < length}
        for h in range(heads):
            kv = h // (heads // k.shape[1])
            keys = {x: k[b, kv, start + x] for x in range(max(rows, default=-1) + 1)}
            queries = {x: q[b, h, n] for x, n in rows.items()}
            for i in sorted({x // p.b for x in rows}):
                blocks = mass_blocks(queries, keys, i, p, scale, softcap, window)
                for x in (x for x in rows if x // p.b == i):
                    for y in range(x + 1):
                        ti, tj = x // p.T, y // p.T
                        if window is not None and x - y >= window:
                            continue
                        if y // p.b in blocks or ti == tj or rescued(ti, tj, h, layer, p):
                            mask[b, h, rows[x], start + y] = True
    if p.gqa_union:
        m = heads // k.shape[1]
        for h in range(0, heads, m):
            mask[:, h : h + m] = mask[:, h : h + m].any(1, keepdim=True)
    for b, h, n in mask.any(-1).nonzero().tolist():
        kv, chosen = h // (heads // k.shape[1]), mask[b, h, n]
        logits = k[b, kv, chosen] @ q[b, h, n] * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        out[b, h, n] = torch.softmax(logits, -1) @ v[b, kv, chosen]
    return out, mask
