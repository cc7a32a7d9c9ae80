"""SampleAttention, Algorithm 1, by brute force: float64, one head at a time, one sampled row at a time.

Shares no code with the plugin. Settled where the paper is silent:

- Blocks of `blk` tokens lie on the batch row's own grid, position 0 being its first real token. The query blocks that
  the call touches are dealt to the chunks in order, so that a block of the mask belongs to one chunk: block number t of
  T goes to chunk floor(t * chunk_n / T). With more chunks than blocks each block is a chunk.
- Q_slice of a chunk is its last `blk` real rows, or all where it has fewer.
- A_c sums over key blocks, A_s over bins of distance: bin s holds s * blk to (s + 1) * blk - 1, whose pairs fall in the
  block diagonals s and s + 1. Both are kept.
- find_k takes the smallest k whose top-k share reaches alpha, the crossing element included; of equal scores the
  earlier one goes first; alpha = 1 takes all.
- extend "chunk": columns and diagonals govern the rows of the chunk that they were found in. "union": those of every
  chunk govern all rows.
- The diagonal block and the first block are kept always.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def find_k(scores: list[float], alpha: float) -> int:
    """k_c, k_s: find_k(cumsum(sort(scores)), alpha)."""
    if alpha == 1.0:
        return len(scores)
    total, running = sum(scores), 0.0
    for k, score in enumerate(sorted(scores, reverse=True)):
        if running >= alpha * total:
            return k
        running += score
    return len(scores)


def arg_topk(scores: list[float], k: int) -> set[int]:
    """I_c, I_s: indices of the k largest scores."""
    return set(sorted(range(len(scores)), key=lambda i: -scores[i])[:k])


def softmax_row(q: Tensor, k: Tensor, position: int, scale: float, softcap: float | None) -> list[float]:
    """One row of A = softmax(Q_slice K^T / sqrt(d) + m_causal), over the keys up to its own."""
    logits = k[: position + 1] @ q * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return [float(x) for x in torch.softmax(logits, -1)]


def chunks_of(first: int, count: int, blk: int, chunk_n: int) -> dict[int, int]:
    """Position of a query row: its chunk."""
    blocks = sorted({(first + i) // blk for i in range(count)})
    chunk = {block: t * chunk_n // len(blocks) for t, block in enumerate(blocks)}
    return {first + i: chunk[(first + i) // blk] for i in range(count)}


def sampled_rows(chunks: dict[int, int], blk: int) -> dict[int, list[int]]:
    """Chunk: positions of its last `blk` rows."""
    return {c: [p for p in chunks if chunks[p] == c][-blk:] for c in sorted(set(chunks.values()))}


def columns_and_diagonals(
    q: Tensor,
    k: Tensor,
    first: int,
    alpha_c: float,
    alpha_s: float,
    chunk_n: int,
    blk: int,
    scale: float,
    softcap: float | None,
) -> dict[int, tuple[set[int], set[int]]]:
    """Chunk: (I_c, I_s). q ``[n, D]`` stands at positions first, first + 1, ...; k ``[m, D]`` from 0."""
    found = {}
    for chunk, rows in sampled_rows(chunks_of(first, len(q), blk, chunk_n), blk).items():
        bins = math.ceil(len(k) / blk)
        a_c, a_s = [0.0] * bins, [0.0] * bins
        for position in rows:
            for key, mass in enumerate(softmax_row(q[position - first], k, position, scale, softcap)):
                a_c[key // blk] += mass
                a_s[(position - key) // blk] += mass
        a_c, a_s = [x / sum(a_c) for x in a_c], [x / sum(a_s) for x in a_s]
        found[chunk] = (arg_topk(a_c, find_k(a_c, alpha_c)), arg_topk(a_s, find_k(a_s, alpha_s)))
    return found


def head_mask(
    q: Tensor,
    k: Tensor,
    first: int,
    *,
    alpha_c: float,
    alpha_s: float,
    chunk_n: int,
    blk: int,
    extend: str,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """bool ``[n, m]``: M, merged from columns and diagonals."""
    chunks = chunks_of(first, len(q), blk, chunk_n)
    found = columns_and_diagonals(q, k, first, alpha_c, alpha_s, chunk_n, blk, scale, softcap)
    mask = torch.zeros(len(q), len(k), dtype=torch.bool)
    for i in range(len(q)):
        position = first + i
        governing = list(found.values()) if extend == "union" else [found[chunks[position]]]
        for key in range(position + 1):
            column, lag = key // blk, position // blk - key // blk
            mask[i, key] = (
                lag == 0 or column == 0 or any(column in i_c or lag in i_s or lag - 1 in i_s for i_c, i_s in governing)
            )
    return mask


def head_cra(
    q: Tensor, k: Tensor, first: int, mask: Tensor, chunk_n: int, blk: int, scale: float, softcap: float | None
) -> float:
    """Cumulative residual attention: the least mass that a sampled row keeps."""
    kept = []
    for rows in sampled_rows(chunks_of(first, len(q), blk, chunk_n), blk).values():
        for position in rows:
            row = softmax_row(q[position - first], k, position, scale, softcap)
            kept.append(sum(mass for key, mass in enumerate(row) if mask[position - first, key]))
    return min(kept)


def sample_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    alpha_c: float,
    alpha_s: float,
    chunk_n: int,
    block: int,
    extend: str = "chunk",
    q_offset: int | None = None,
    starts: list[int] | None = None,
    lengths: list[int] | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, bool mask ``[B, Hq, Nq, Nkv]`` and CRA ``[B, Hq]`` (NaN where a batch row has no query)."""
    batch, heads, q_len, width = q.shape
    kv_len = k.shape[2]
    offset = kv_len - q_len if q_offset is None else q_offset
    scale = 1.0 / math.sqrt(width)
    out = torch.zeros(batch, heads, q_len, v.shape[-1], dtype=torch.float64)
    full = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool)
    cra = torch.full((batch, heads), torch.nan, dtype=torch.float64)
    for b in range(batch):
        start = 0 if starts is None else starts[b]
        length = kv_len - start if lengths is None else lengths[b]
        real = [i for i in range(q_len) if 0 <= offset + i - start < length]
        if not real:
            continue
        first = offset + real[0] - start
        for h in range(heads):
            kv = h // (heads // k.shape[1])
            queries, keys, values = q[b, h, real], k[b, kv, start : start + length], v[b, kv, start : start + length]
            mask = head_mask(
                queries,
                keys,
                first,
                alpha_c=alpha_c,
                alpha_s=alpha_s,
                chunk_n=chunk_n,
                blk=block,
                extend=extend,
                scale=scale,
                softcap=softcap,
            )
            cra[b, h] = head_cra(queries, keys, first, mask, chunk_n, block, scale, softcap)
            for n, i in enumerate(real):
                chosen = mask[n].nonzero()[:, 0]
                logits = keys[chosen] @ queries[n] * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                out[b, h, i] = torch.softmax(logits, -1) @ values[chosen]
                full[b, h, i, start + chosen] = True
    return out, full, cra
