"""A floor under the recall of sampled rows, in plain loops over Python's floats; shares no code with the refiner."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from attrs import define, frozen
from torch import Tensor

from sparseprefill import AttentionCall
from sparseprefill.testing import allowed_pairs

Held = Callable[[int, int, int, int], bool]
"""Batch row, head, query tile and key tile on the row's grid: whether the plan holds the tile as a tile."""


@frozen(kw_only=True)
class Rule:
    """The options of the floor, and the plan's tiles."""

    tile_q: int
    tile_k: int
    target: float
    rows: int
    span: int | None
    speaks_for: str
    dense_from: float


@define
class Answer:
    """keep: bool ``[B, Hq, Nq, Nkv]``, what is computed now. samples: by (batch row, head), each sampled query's index
    among the call's with its recall before and after. dense: heads with a span that runs dense."""

    keep: Tensor
    samples: dict[tuple[int, int], dict[int, tuple[float, float]]]
    dense: set[tuple[int, int]]


def recall_floor(call: AttentionCall, rule: Rule, computed: Tensor, held: Held) -> Answer:
    """computed: bool ``[B, Hq, Nq, Nkv]``, what the plan computes."""
    batch, heads, q_len, _ = call.q.shape
    answer = Answer(computed.clone(), {(b, h): {} for b in range(batch) for h in range(heads)}, set())
    allowed = allowed_pairs(call)
    for b in range(batch):
        start = 0 if call.starts is None else int(call.starts[b])
        offset = (call.kv_len - q_len if call.q_offset is None else call.q_offset) - start
        length = call.kv_len if call.lengths is None else int(call.lengths[b])
        real = [offset + i for i in range(q_len) if 0 <= offset + i < length]
        if not real:
            continue
        inhabited = sorted({position // rule.tile_q for position in real})
        for tiles in _spans(inhabited, rule):
            samples = _samples(tiles, real, rule)
            for h in range(heads):
                rows = {n: _attention(call, b, h, x - offset, allowed) for n, x in samples.items()}
                _floor(call, rule, answer, computed, held, b, h, tiles, inhabited, samples, rows, start, offset)
    answer.keep &= allowed[:, None]
    return answer


def _spans(inhabited: Sequence[int], rule: Rule) -> list[list[int]]:
    if rule.span is None:
        return [list(range(inhabited[0], inhabited[-1] + 1))]
    size = rule.span // rule.tile_q
    return [list(range(s * size, (s + 1) * size)) for s in range(inhabited[0] // size, inhabited[-1] // size + 1)]


def _samples(tiles: Sequence[int], real: Sequence[int], rule: Rule) -> dict[int, int]:
    """By number of the stretch: the position of its last real row."""
    found: dict[int, int] = {}
    for n, tile in enumerate(tiles):
        inside = [x for x in real if x // rule.tile_q == tile]
        if inside:
            found[_stretch(n, tiles, rule)] = max(inside)
    return found


def _stretch(n: int, tiles: Sequence[int], rule: Rule) -> int:
    return n * min(rule.rows, len(tiles)) // len(tiles)


def _attention(call: AttentionCall, b: int, h: int, i: int, allowed: Tensor) -> dict[int, float]:
    """By index among the keys: the share of query i's attention, sinks left out."""
    scale = 1 / math.sqrt(call.q.shape[3]) if call.scale is None else call.scale
    q = call.q[b, h, i].double()
    logits: dict[int, float] = {}
    for key in allowed[b, i].nonzero()[:, 0].tolist():
        x = float(q @ call.k[b, h // call.group, key].double()) * scale
        logits[key] = x if call.softcap is None else call.softcap * math.tanh(x / call.softcap)
    top = max(logits.values())
    total = math.fsum(math.exp(x - top) for x in logits.values())
    return {key: math.exp(x - top) / total for key, x in logits.items()}


def _floor(
    call: AttentionCall, rule: Rule, answer: Answer, computed: Tensor, held: Held,
    b: int, h: int, tiles: Sequence[int], inhabited: Sequence[int], samples: Mapping[int, int],
    rows: Mapping[int, Mapping[int, float]], start: int, offset: int,
) -> None:  # fmt: skip
    lost: dict[int, dict[int, float]] = {}
    chosen: dict[int, set[int]] = {}
    before: dict[int, float] = {}
    for n, position in samples.items():
        i = position - offset
        lost[n] = {}
        kept = []
        for key, share in rows[n].items():
            if bool(computed[b, h, i, key]):
                kept.append(share)
            else:
                j = (key - start) // rule.tile_k
                lost[n][j] = lost[n].get(j, 0.0) + share
        before[n] = math.fsum(kept)
        every = set(range(-(-call.kv_len // rule.tile_k)))  # also behind the row, for others of its query tile
        chosen[n] = every if rule.target >= 1 else _chosen(lost[n], before[n], position // rule.tile_k, rule)
    here = [tile for tile in tiles if tile in inhabited]
    wanted: dict[tuple[int, int], float] = {}
    total = have = 0
    for tile in here:
        reach = _reach(call, rule, tile)
        mine = {j for j in reach if held(b, h, tile, j)}
        worth = _heard(tile, tiles, chosen, lost, samples, rule)
        wanted |= {(tile, j): x for j, x in worth.items() if j in reach and j not in mine}
        total, have = total + len(reach), have + len(mine)
    added = {tile: {j for i, j in wanted if i == tile} for tile in here}
    new = len(wanted)
    if have <= rule.dense_from * total < have + new:
        answer.dense.add((b, h))
        added = {tile: {j for j in _reach(call, rule, tile) if not held(b, h, tile, j)} for tile in here}
    for i in range(call.q.shape[2]):
        for j in added.get((offset + i) // rule.tile_q, ()):
            first = j * rule.tile_k + start
            answer.keep[b, h, i, max(first, 0) : first + rule.tile_k] = True
    for n, position in samples.items():
        more = math.fsum(lost[n].get(j, 0.0) for j in added[position // rule.tile_q])
        answer.samples[b, h][position - offset] = (before[n], before[n] + more)


def _chosen(lost: Mapping[int, float], before: float, own: int, rule: Rule) -> set[int]:
    found: set[int] = set()
    gained = 0.0
    for j in sorted(lost, key=lambda j: (-lost[j], -j)):
        if before + gained >= rule.target or lost[j] == 0.0:
            break
        found.add(j)
        gained += lost[j]
    return found | {own} if found else found


def _heard(
    tile: int, tiles: Sequence[int], chosen: Mapping[int, set[int]], lost: Mapping[int, Mapping[int, float]],
    samples: Mapping[int, int], rule: Rule,
) -> dict[int, float]:  # fmt: skip
    """Key tiles that a query tile gets, each with the most that a sampled row loses by it."""
    mine = _stretch(tile - tiles[0], tiles, rule)
    found: dict[int, float] = {}

    def take(j: int, x: float) -> None:
        found[j] = max(found.get(j, 0.0), x)

    for n in (mine, mine - 1) if rule.speaks_for == "neighbours" else (mine,):
        if n not in samples:
            continue
        own = samples[n] // rule.tile_q
        if rule.speaks_for == "tile" and own != tile:
            continue
        for j in chosen[n]:
            x: float = lost[n].get(j, 0.0)
            take(j, x)
            if rule.speaks_for != "tile":
                away = (own - tile) * rule.tile_q / rule.tile_k
                take(j - math.floor(away), x)
                if rule.tile_q % rule.tile_k:
                    take(j - math.ceil(away), x)
    return found


def _reach(call: AttentionCall, rule: Rule, tile: int) -> set[int]:
    first, last = tile * rule.tile_q, (tile + 1) * rule.tile_q - 1
    low = 0 if call.window is None else max(0, first - call.window + 1)
    return {key // rule.tile_k for key in range(low, last + 1)} & set(range(-(-call.kv_len // rule.tile_k)))
