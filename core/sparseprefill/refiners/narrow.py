"""Parts that refiners by priority share: ranks, what there is to choose from, and the plan of what was chosen."""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import ParameterError
from sparseprefill.mask.geometry import Geometry, diagonal_map, reachable_map
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import Priority, ScoresError, asked, unfit
from sparseprefill.mask.tile_map import TileMap
from sparseprefill.plan import Plan

TOP = torch.finfo(torch.float32).max / 8
"""Scores are clamped to it, which leaves room above for tiles that go before any score, and below for NaN."""
ENTRIES = 1 << 23
"""Scores that are sorted at once, about."""


def tile_worth(plan: Plan, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
    """Finite scores broadcastable to ``[B, Hq, R, C]``: the estimator's, or the nearer to the diagonal the higher."""
    if plan.priority is not None:
        sizes = call.geometry.map_shape(tile_q, tile_k)
        return _finite(_scores(plan.priority, "tile_scores", sizes, call, tile_q, tile_k))
    first = torch.arange(call.geometry.tile_columns(tile_k), device=call.geometry.device) * tile_k
    return first.float()[None, None, None]


def column_worth(plan: Plan, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
    """Finite scores broadcastable to ``[B, h, n, Nkv]``, alike; see `Priority.column_scores` for the arguments."""
    if plan.priority is not None:
        geometry = call.geometry
        sizes = geometry.batch, len(range(geometry.heads)[heads]), position.shape[1], geometry.kv_len
        return _finite(_scores(plan.priority, "column_scores", sizes, call, position, heads))
    return torch.arange(call.kv_len, device=call.geometry.device).float()[None, None, None]


def _scores(
    priority: Priority, verb: str, sizes: tuple[int, int, int, int], call: AttentionCall, *given: object
) -> Tensor:
    """The answer of a priority, which may be a stranger's; ScoresError for what it raises, and for what is none."""
    name = f"{type(priority).__name__}.{verb}()"
    found = asked(name, getattr(priority, verb), call, *given)
    if why := unfit(name, found, call, sizes):
        raise ScoresError(why)
    scores: Tensor = found
    return scores


def _finite(scores: Tensor) -> Tensor:
    """Scores that can be compared, NaN below all others."""
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return torch.where(scores.isnan(), -2 * TOP, scores.clamp(-TOP, TOP))


def highest(scores: Tensor, candidates: Tensor, number: Tensor, entries: int = ENTRIES) -> Tensor:
    """bool: of the `candidates` ``[B, Hq, R, C]`` the `number` ``[B, Hq, R]`` of highest score, ties to the nearer.

    Sorts in chunks of query tiles, so that memory stays small.
    """
    batch, heads, rows, columns = candidates.shape
    step = max(1, entries // (batch * heads * columns))
    scores, number = scores.expand(candidates.shape), number.expand(batch, heads, rows)
    parts = zip(scores.split(step, 2), candidates.split(step, 2), number.split(step, 2), strict=True)
    return torch.cat([first_of(descending(*part[:2])[1], part[2], part[1]) for part in parts], 2)


def descending(scores: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in descending order and their index int64, over the last dimension: ties to the later entry.

    What is no candidate comes last, with -inf.
    """
    ordered = torch.where(candidates, scores, -torch.inf).flip(-1)
    values, order = torch.sort(ordered, dim=-1, descending=True, stable=True)
    return values, order.shape[-1] - 1 - order


def first_of(order: Tensor, number: Tensor, candidates: Tensor) -> Tensor:
    """bool like `candidates` ``[..., C]``: those among the first `number` ``[...]`` of an order."""
    chosen = torch.arange(order.shape[-1], device=order.device) < number[..., None]
    return torch.zeros_like(candidates, memory_format=torch.contiguous_format).scatter_(-1, order, chosen) & candidates


@frozen(eq=False)
class Choice:
    """The tiles of a plan on the grid that its mask and its carry share. Bool maps, broadcastable to ``[B, Hq, R, C]``.

    reach: tiles with an allowed pair. tiles: those that the plan holds. own: the diagonal ones, which stay or are
    added. free: those in reach that are no diagonal ones; own and free are without the carry's region. taken: int64
    ``[B, h, R]``, tiles of that region.
    """

    grid: tuple[int, int]
    reach: Tensor
    tiles: Tensor
    own: Tensor
    free: Tensor
    taken: Tensor | int

    @classmethod
    def of(cls, call: AttentionCall, plan: Plan) -> Choice:
        """The choice that a plan leaves."""
        geometry, grid = call.geometry, plan.common_grid()
        reach = reachable_map(geometry, *grid)[:, None]
        own = diagonal_map(geometry, *grid)[:, None] & reach
        free, tiles = reach & ~own, plan.mask.tiles_on(*grid)
        if plan.carry is None:
            return cls(grid, reach, tiles, own, free, 0)
        region = plan.carry.region.tiles_on(*grid)
        return cls(grid, reach, tiles, own & ~region, free & ~region, region.sum(-1))

    def ends(self, geometry: Geometry, sink: int, local: int) -> Tensor:
        """bool ``[B, Hq, R, C]``: those of the plan's tiles that are diagonal, or of the first `sink`, or of the
        `local` before the diagonal; a diagonal tile that the plan does not hold is added."""
        column = torch.arange(self.reach.shape[-1], device=geometry.device)
        first = geometry.tiles(self.grid[0]) * self.grid[0] // self.grid[1]
        behind = first[:, None, :, None]
        return self.tiles & ((column < sink) | ((column >= behind - local) & (column < behind))) | self.own

    def narrowed(
        self, plan: Plan, keep: Tensor, stripes: IndexLists | None, group: int = 1, *, disjoint: bool = True
    ) -> Plan:
        """The plan with these tiles ``[B, Hq, R, C]`` and stripes, for groups of so many query tiles, and no others.

        disjoint: no stripe lies in a tile that is kept.
        """
        geometry = plan.mask.geometry
        chosen = TileMap(geometry=geometry, tile_q=self.grid[0], tile_k=self.grid[1], keep=keep)
        narrow = SparseMask(geometry, *self.grid, chosen, group, stripes, disjoint=disjoint)
        if plan.carry is not None and plan.carry.region.stripes is not None:
            narrow = narrow - plan.carry.region  # a diagonal tile that was added may hold its stripes
        return evolve(plan, mask=narrow)


def scores_of(plan: Plan, refiner: object, instead: str) -> Priority:
    """The scores of a plan; ParameterError, with what would do `instead`, where its estimator left none."""
    if plan.priority is None:
        remedy = f"put it after an estimator that provides scores (every method except dense), or {instead}"
        raise ParameterError(f"{type(refiner).__name__} needs scores, but the plan's priority is None: {remedy}")
    return plan.priority
