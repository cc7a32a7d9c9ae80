"""AnchorAttention, Algorithms 1-3 of the paper, line by line: slow, float64, one head at a time.

Shares no code with the plugin. Line numbers ("A1.8": Algorithm 1, line 8) are the paper's; indices here count from 0.
Settled where the paper is silent or prints a slip:

- Positions lie on the batch row's own grid: blocks, groups and the initial tokens count from its first real token.
- A1.8 starts the window at the group's start (the printed index is one block early), A2.8 searches exactly
  [end of the initial tokens, group's start). Together they hold every causal key once.
- A2.2 averages Acc: equation 2 and the text say x_a, the row maximum of equation 1, which is M of Algorithm 1.
- A2.11 compares with <=, as equation 2 does.
- "Without anchor" (Table 4) is x_a = 0.
- A softcap is part of a logit, in equation 1 and in equation 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parameters:
    """The options of the paper; b_q and b_kv are one `block`."""

    theta: float
    step: int
    block: int
    init_tokens: int
    use_anchor: bool = True


@dataclass(frozen=True)
class Answer:
    """out ``[B, Hq, Nq, Dv]``, lse ``[B, Hq, Nq]``; anchor and stripes: bool ``[B, Hq, Nq, Nkv]``."""

    out: Tensor
    lse: Tensor
    anchor: Tensor
    stripes: Tensor


@dataclass(frozen=True)
class Head:
    """One head of one batch row, without its padding: Q stands at positions first, first + 1, ..."""

    Q: Tensor
    K: Tensor
    V: Tensor
    first: int
    scale: float
    softcap: float | None

    def blocks(self, size: int) -> dict[int, range]:
        """Query positions of each query block that the call touches."""
        behind = self.first + len(self.Q)
        numbers = range(self.first // size, (behind - 1) // size + 1)
        return {i: range(max(i * size, self.first), min((i + 1) * size, behind)) for i in numbers}

    def rows(self, positions: range) -> Tensor:
        return self.Q[positions.start - self.first : positions.stop - self.first]

    def logits(self, queries: Tensor, keys: list[int]) -> Tensor:
        qk = queries @ self.K[keys].T * self.scale
        return qk if self.softcap is None else self.softcap * torch.tanh(qk / self.softcap)


@dataclass
class Softmax:
    """M_i, L_i, Acc_i of one query block."""

    m: Tensor
    l: Tensor  # noqa: E741
    acc: Tensor

    def add(self, head: Head, positions: range, keys: list[int]) -> None:
        """A1.11-15 and A3.10-14: one more block of keys; those of the future do not count."""
        qk = head.logits(head.rows(positions), keys)
        for r, position in enumerate(positions):
            for c, key in enumerate(keys):
                if key > position:
                    qk[r, c] = -math.inf
        m_new = torch.maximum(self.m, qk.max(dim=-1).values)
        p = torch.exp(qk - m_new[:, None])
        alpha = torch.exp(self.m - m_new)
        self.l = self.l * alpha + p.sum(-1)
        self.acc = self.acc * alpha[:, None] + p @ head.V[keys]
        self.m = m_new


def _cut(keys: list[int], size: int) -> list[list[int]]:
    return [keys[c : c + size] for c in range(0, len(keys), size)]


def algorithm_1(head: Head, p: Parameters) -> tuple[dict[int, Softmax], dict[int, list[int]]]:
    """Anchor computation: the softmax state of every query block, and the keys that it covers."""
    states: dict[int, Softmax] = {}
    covered: dict[int, list[int]] = {}
    for i, positions in head.blocks(p.block).items():  # A1.2
        behind = positions.stop
        initial = list(range(min(p.init_tokens, behind)))  # A1.3
        group_start = i // p.step * p.step * p.block  # A1.8
        window = list(range(max(group_start, p.init_tokens), behind))  # A1.8-9
        rows = len(positions)
        empty = torch.full((rows,), -math.inf, dtype=torch.float64)
        state = Softmax(empty, torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, head.V.shape[1]).double())
        for keys in _cut(initial, p.block) + _cut(window, p.block):  # A1.4-6, A1.10-16
            state.add(head, positions, keys)
        states[i], covered[i] = state, initial + window  # A1.17
    return states, covered


def algorithm_2(head: Head, p: Parameters, states: dict[int, Softmax]) -> dict[int, list[int]]:
    """Stripe sparsity identification: the selected key columns of every group of `step` query blocks."""
    selected: dict[int, list[int]] = {}
    for i, positions in head.blocks(p.block).items():
        q_mean = head.rows(positions).mean(0)  # A2.1
        x_a = float(states[i].m.mean()) if p.use_anchor else 0.0  # A2.2
        k = i // p.step  # A2.3
        f_idx = selected.setdefault(k, [])  # A2.6; one list per group, the union over its blocks (section 3.4)
        group_start = k * p.step * p.block  # A2.7
        for keys in _cut(list(range(p.init_tokens, group_start)), p.block):  # A2.8
            qk = head.logits(q_mean[None], keys)[0]  # A2.10
            for key, score in zip(keys, qk.tolist(), strict=True):
                if x_a - score <= p.theta and key not in f_idx:  # A2.11, equation 2
                    f_idx.append(key)  # A2.12
    return {k: sorted(f_idx) for k, f_idx in selected.items()}  # A2.14


def algorithm_3(head: Head, p: Parameters, states: dict[int, Softmax], selected: dict[int, list[int]]) -> None:
    """Sparse attention over the discrete keys of each group, resumed from Algorithm 1's states."""
    for i, positions in head.blocks(p.block).items():  # A3.4
        for keys in _cut(selected[i // p.step], p.block):  # A3.7-10
            states[i].add(head, positions, keys)


def anchor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Parameters,
    *,
    scale: float | None = None,
    q_offset: int | None = None,
    starts: list[int] | None = None,
    lengths: list[int] | None = None,
    softcap: float | None = None,
) -> Answer:
    """Every head of every batch row. q ``[B, Hq, Nq, D]``; k, v ``[B, Hkv, Nkv, *]``, not repeated for GQA."""
    batch, heads, q_len, width = q.shape
    kv_len = k.shape[2]
    offset = kv_len - q_len if q_offset is None else q_offset
    factor = 1.0 / math.sqrt(width) if scale is None else scale
    pairs = (batch, heads, q_len, kv_len)
    out = torch.zeros(batch, heads, q_len, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, q_len), -math.inf, dtype=torch.float64)
    anchor, stripes = torch.zeros(pairs, dtype=torch.bool), torch.zeros(pairs, dtype=torch.bool)
    for b in range(batch):
        start = 0 if starts is None else starts[b]
        length = kv_len - start if lengths is None else lengths[b]
        real = [i for i in range(q_len) if 0 <= offset + i - start < length]
        if not real:
            continue
        keys = slice(start, start + length)
        for h in range(heads):
            kv = h // (heads // k.shape[1])
            queries = q[b, h, real].double()
            first = offset + real[0] - start
            head = Head(queries, k[b, kv, keys].double(), v[b, kv, keys].double(), first, factor, softcap)
            states, covered = algorithm_1(head, p)
            selected = algorithm_2(head, p, states)
            algorithm_3(head, p, states, selected)
            for i, positions in head.blocks(p.block).items():
                for r, position in enumerate(positions):
                    row = position - offset + start
                    out[b, h, row] = states[i].acc[r] / states[i].l[r]  # A3.16
                    lse[b, h, row] = states[i].m[r] + torch.log(states[i].l[r])
                    for mask, chosen in ((anchor, covered[i]), (stripes, selected[i // p.step])):
                        allowed = [key + start for key in chosen if key <= position]
                        mask[b, h, row, allowed] = True
    return Answer(out, lse, anchor, stripes)
