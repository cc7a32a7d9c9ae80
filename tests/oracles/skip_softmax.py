"""Skip-softmax in plain loops over Python's floats: tile after tile, row after row; shares no code with the library."""

from __future__ import annotations

import math
from collections.abc import Callable

from attrs import define, frozen

from sparseprefill import AttentionCall

Tiles = Callable[[int, int, int, int], bool]
"""Batch row, head, query tile and key tile, both counted on the batch row's own grid."""
Columns = Callable[[int, int, int], list[int]]
"""Batch row, head, query tile on the row's grid: positions of its list of stripes, ascending; those in tiles too."""


@frozen(kw_only=True)
class Rule:
    """tile_q, tile_k: of the mask. block: query rows that go through the steps in one order. rows: of them, those that
    vote together. keys: of one step. below: c, in tokens."""

    tile_q: int
    tile_k: int
    block: int
    rows: int
    keys: int
    below: float


@define
class Answer:
    """out ``[B][H][N][D]``, lse ``[B][H][N]``, skipped: pairs ``[B][H]``. margin: how near a vote was, in logits."""

    out: list[list[list[list[float]]]]
    lse: list[list[list[float]]]
    skipped: list[list[int]]
    margin: float = math.inf


def skip_softmax(
    call: AttentionCall, rule: Rule, tiles: Tiles, columns: Columns, lengths: list[int], prompts: list[int]
) -> Answer:
    """lengths: real keys of each batch row. prompts: tokens of its whole prompt."""
    batch, heads, n, _ = call.q.shape
    width = call.value_dim
    answer = Answer(
        [[[[0.0] * width for _ in range(n)] for _ in range(heads)] for _ in range(batch)],
        [[[-math.inf] * n for _ in range(heads)] for _ in range(batch)],
        [[0] * heads for _ in range(batch)],
    )
    for b in range(batch):
        start = 0 if call.starts is None else int(call.starts[b])
        first = call.geometry.q_offset - start  # position of query 0
        threshold = rule.below / prompts[b] if prompts[b] else 1.0
        for h in range(heads):
            low = first // rule.block * rule.block
            while low < first + n:
                steps = _steps(rule, b, h, low, lengths[b], tiles, columns)
                for part in range(low, low + rule.block, rule.rows):
                    rows = [i for i in range(part, part + rule.rows) if max(first, 0) <= i < min(first + n, lengths[b])]
                    _group(call, b, h, rows, steps, threshold, first, start, answer)
                low += rule.block
    return answer


def _steps(rule: Rule, b: int, h: int, low: int, length: int, tiles: Tiles, columns: Columns) -> list[list[int]]:
    """Positions of the keys of each step, in the order of the visit."""
    query_tile = low // rule.tile_q
    listed = [j for j in range(-(-length // rule.tile_k)) if tiles(b, h, query_tile, j)]
    diagonal, first, between = [], [], []
    for j in listed:
        for at in range(j * rule.tile_k, (j + 1) * rule.tile_k, rule.keys):
            keys = list(range(at, at + rule.keys))
            if keys[-1] > low:
                diagonal.append(keys)
            elif j == listed[0]:
                first.append(keys)
            else:
                between.append(keys)
    steps = diagonal[::-1] + first[::-1] + between[::-1]
    stripes = columns(b, h, query_tile)
    for i in range(0, len(stripes), rule.keys):
        steps.append([j for j in stripes[i : i + rule.keys] if not tiles(b, h, query_tile, j // rule.tile_k)])
    return steps


def _group(
    call: AttentionCall, b: int, h: int, rows: list[int], steps: list[list[int]], threshold: float, first: int,
    start: int, answer: Answer,
) -> None:  # fmt: skip
    """Online softmax of the rows that vote together, positions on the grid of batch row b."""
    k, v = call.k[b, h // call.group].tolist(), call.v[b, h // call.group].tolist()
    most = dict.fromkeys(rows, -math.inf)
    total = dict.fromkeys(rows, 0.0)
    summed = {row: [0.0] * call.value_dim for row in rows}
    for step in steps:
        seen = {row: [j for j in step if j <= row and (call.window is None or row - j < call.window)] for row in rows}
        logits = {
            row: [_logit(call, call.q[b, h, row - first].tolist(), k[j + start]) for j in seen[row]] for row in rows
        }
        highest = {row: max(logits[row], default=-math.inf) for row in rows}
        votes = []
        for row in rows:
            apart = -math.inf if highest[row] == -math.inf else highest[row] - most[row]
            if most[row] == -math.inf or threshold >= 1 or threshold == 0:
                votes.append(False)
            else:
                votes.append(apart < math.log(threshold))
                answer.margin = min(answer.margin, abs(apart - math.log(threshold)))
        if all(votes):
            answer.skipped[b][h] += sum(len(seen[row]) for row in rows)
            continue
        for row in rows:
            if not seen[row]:
                continue
            peak = max(most[row], highest[row])
            shrink = math.exp(most[row] - peak)
            total[row] *= shrink
            summed[row] = [x * shrink for x in summed[row]]
            for logit, j in zip(logits[row], seen[row], strict=True):
                weight = math.exp(logit - peak)
                total[row] += weight
                summed[row] = [x + weight * y for x, y in zip(summed[row], v[j + start], strict=True)]
            most[row] = peak
    for row in rows:
        if total[row] == 0:
            continue
        sink = 0.0 if call.sinks is None else math.exp(float(call.sinks[h]) - most[row])
        answer.out[b][h][row - first] = [x / (total[row] + sink) for x in summed[row]]
        answer.lse[b][h][row - first] = most[row] + math.log(total[row])


def _logit(call: AttentionCall, q: list[float], k: list[float]) -> float:
    logit = sum(x * y for x, y in zip(q, k, strict=True)) * call.softmax_scale
    return logit if call.softcap is None else call.softcap * math.tanh(logit / call.softcap)
