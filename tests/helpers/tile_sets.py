"""Plans as sets of tiles and columns, one query tile at a time, and what their scores say: for tests of refiners."""

from __future__ import annotations

import math
from typing import Any

import torch
from attrs import evolve
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.plans import KINDS, Positions, plans


class Tiles:
    """One query tile of one head: which key tiles it can see, has, and has in the carry's region."""

    def __init__(self, call: sp.AttentionCall, plan: sp.Plan, b: int, h: int, i: int) -> None:
        g, masks = call.geometry, [plan.mask] if plan.carry is None else [plan.mask, plan.carry.region]
        self.q = math.gcd(*[mask.tile_q for mask in masks])
        self.k = math.gcd(*[mask.tile_k for mask in masks])
        rows = range(i * self.q, (i + 1) * self.q)
        window = rows[-1] + 1 if call.window is None else call.window
        keys = range(max(0, rows[0] - window + 1), rows[-1] + 1)
        self.reach = {key // self.k for key in keys} & set(range(-(-g.kv_len // self.k)))
        self.own = {x // self.k for x in rows} & self.reach
        self.first = rows[0] // self.k
        have = [self._listed(mask, b, h, rows[0]) & self.reach for mask in masks]
        self.have, self.region = have[0], have[1] if len(have) == 2 else set()

    def _listed(self, mask: sp.SparseMask, b: int, h: int, x: int) -> set[int]:
        if mask.tiles is None:
            return set()
        row = x // mask.tile_q - int(mask.geometry.first_tile(mask.tile_q)[b])
        parts = mask.tile_k // self.k
        return {j * parts + n for j in mask.tiles.row(b, h, row).tolist() for n in range(parts)}


def each(call: sp.AttentionCall, size: int) -> list[tuple[int, int, int, list[int]]]:
    """(batch row, head, query tile, its real rows in the call)."""
    at = Positions.of(call)
    found = []
    for b in range(call.q.shape[0]):
        position = at.query[b, 0, :, 0]
        real = at.allowed[b, 0].any(-1)
        for i in (position[real] // size).unique().tolist():
            rows = ((position // size == i) & real).nonzero()[:, 0].tolist()
            found += [(b, h, i, rows) for h in range(call.q.shape[1])]
    return found


def grid(plan: sp.Plan) -> tuple[int, int]:
    masks = [plan.mask] if plan.carry is None else [plan.mask, plan.carry.region]
    return math.gcd(*[mask.tile_q for mask in masks]), math.gcd(*[mask.tile_k for mask in masks])


def paint(call: sp.AttentionCall, size: int, chosen: dict[tuple[int, int, int], set[int]], rows: Any) -> torch.Tensor:
    """The dense form of sets of key tiles of `size` tokens."""
    at = Positions.of(call)
    keep = torch.zeros(*call.q.shape[:3], call.k.shape[2], dtype=torch.bool)
    for b, h, i, real in rows:
        inside = torch.isin(at.key[b, 0, 0] // size, torch.tensor(sorted(chosen[b, h, i]), dtype=torch.int64))
        for n in real:
            keep[b, h, n] = inside
    return keep & at.allowed


class Worth:
    """What one query tile of one head thinks of tiles and columns, a number per key; NaN is below all."""

    def __init__(self, plan: sp.Plan, b: int, h: int, position: int, k: int) -> None:
        self.given, self.at, self.k = plan.priority, (b, h, position), k
        self.geometry = plan.mask.geometry

    def tile(self, j: int) -> float:
        if self.given is None:
            return float(j * self.k)
        assert isinstance(self.given, sp.PriorityScores)
        assert isinstance(self.given.tiles, torch.Tensor)
        assert self.given.tile_q is not None
        assert self.given.tile_k is not None
        row = self._row(self.given.tiles, self.given.tile_q)
        return lowest(row[j * self.k // self.given.tile_k] / self.given.tile_k)

    def column(self, y: int) -> float:
        if self.given is None:
            return float(y)
        assert isinstance(self.given, sp.PriorityScores)
        if self.given.columns is None:
            self.k, k = 1, self.k
            found = self.tile(y)
            self.k = k
            return found
        assert isinstance(self.given.columns, torch.Tensor)
        return lowest(self._row(self.given.columns, self.given.rows)[y])

    def _row(self, scores: torch.Tensor, rows: int | None) -> torch.Tensor:
        b, h, position = self.at
        index = 0 if rows is None else position // rows - int(self.geometry.first_tile(rows)[b])
        # A group may begin before the first query tile that has scores.
        return scores[b, h, max(0, min(index, scores.shape[2] - 1))]


def lowest(x: torch.Tensor) -> float:
    return -math.inf if bool(x.isnan()) else float(x)


def ranked(worth: Worth, tiles: Any) -> list[int]:
    """By descending priority, the nearer first among equals."""
    return sorted(tiles, key=lambda j: (-worth.tile(j), -j))


@st.composite
def prioritised(
    draw: st.DrawFn, call: sp.AttentionCall, *, kinds: tuple[str, ...] = KINDS, bare: bool = True
) -> sp.Plan:
    """A plan with scores of tiles, or of tiles and columns, some NaN, on grids of their own.

    kinds: of masks. bare: a plan of three has no scores.
    """
    choices = ["nothing", "tiles", "both"] if bare else ["tiles", "both"]
    plan, kind = draw(plans(call, kinds=kinds)), draw(st.sampled_from(choices), label="priority")
    if kind == "nothing":
        return plan
    source = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def scores(rows: int, columns: int) -> torch.Tensor:
        found = torch.randint(0, 7, (*call.q.shape[:2], rows, columns), generator=source).float()
        return torch.where(found == 6, torch.nan, found)

    g = call.geometry
    tile_q, tile_k = (size * draw(st.integers(1, 3)) for size in grid(plan))
    given = {"tiles": scores(g.tile_rows(tile_q), g.tile_columns(tile_k)), "tile_q": tile_q, "tile_k": tile_k}
    if kind == "both":
        rows = draw(st.none() | st.just(plan.mask.group_rows))
        given |= {"columns": scores(1 if rows is None else g.tile_rows(rows), g.kv_len) / 4, "rows": rows}
    return evolve(plan, priority=sp.PriorityScores(**given))  # type: ignore[arg-type]


def stripes_of(mask: sp.SparseMask, b: int, h: int, group: int) -> list[int]:
    """Positions of the keys in the stripes of a group, by its number on the row's grid."""
    stripes = mask.with_stripe_width(1).stripes
    assert stripes is not None
    return stripes.row(b, h, group - int(mask.geometry.first_tile(mask.group_rows)[b])).tolist()
