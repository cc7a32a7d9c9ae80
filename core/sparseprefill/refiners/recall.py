"""A floor under the attention mass that a plan keeps, measured on sampled query rows before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Union

import torch
from attrs import evolve, field, fields, frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.call import AttentionCall, rows_at, uncast
from sparseprefill.errors import ParameterError, nearest, printed
from sparseprefill.mask.geometry import Geometry
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.samples import Raised, Stretches, deal, stripes_at
from sparseprefill.mask.tile_map import TileMap
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.plan import Plan
from sparseprefill.refiners.narrow import descending
from sparseprefill.stages import ALL_ROWS, HeadScope
from sparseprefill.statistics.by_tile import RowMass, lse_by_tile, mass_of
from sparseprefill.validate import maybe, number, one_of, whole

Recall = Union[float, Mapping[str, Any], "RecallFloor", None]
"""Ways to ask for a floor: its target; its options, as a table or a `RecallFloor`; None for no floor."""
MOST_ROWS = 1 << 16
"""The most rows of a sample."""
SLACK = 2.0**-18
"""A row that misses the target by less, which rounding of float32 sums may do, does not count as left below it."""


@frozen(eq=False)
class SampledRecall:
    """The recall that a floor saw, row by row, in the notes as ``recall_sample``.

    rows: int64 ``[B, n]``, index of the sampled query rows. real: bool ``[B, n]``, which of them exist. before, after:
    ``[B, Hq, n]``, attention mass that the plan kept of each, and keeps now; `metrics.lowest_rows` tells the lowest.
    """

    rows: Tensor
    real: Tensor
    before: Tensor
    after: Tensor


@frozen(kw_only=True)
class RecallFloor:
    """Each sampled query row keeps at least `target` of its attention mass, whatever the estimator chose.

    The query tiles of a call are dealt to `rows` stretches of about equally many; where there are fewer tiles, each is
    a stretch. The last row of each stretch is sampled, and so the call's last row always is: its attention over all
    keys is worked out once, and what the plan keeps of it, the carry included. Where that is less than the target, the
    key tiles that hold most of what is lost are chosen, the largest first, until it is reached, and its own tile.

    speaks_for: who gets what a sampled row has chosen. "stretch": all query tiles of its stretch, both the very same
    key tiles and those at the same distance from the diagonal, as nobody knows which of the two made them matter.
    "neighbours": those of the next stretch too, so that each query tile hears the rows before and behind it.
    "tile": the query tile alone that holds the row.
    target: from 0 to 1; 1 gives whoever hears of a row every key. rows: query rows to sample in a call, or in each
    `span`.
    span: tokens, a multiple of the plan's query tile, that are treated as if they were a call of their own; cuts at its
    multiples then change nothing, which makes it the floor's grain. None: the call as a whole, which has no grain.
    dense_from: a head whose plan holds no more than this share of the key tiles in reach (of the call, or in a span),
    and which would need more, gets all of them. A head whose estimator chose more by itself just gets what is missing.
    1 turns that off.

    Notes, all on the device: ``recall_before`` and ``recall_after`` ``[B, Hq]``, mean over the sampled rows of a head
    (NaN where it has none, or where queries or keys are NaN); ``recall_dense``, bool ``[B, Hq]``, heads that run dense
    somewhere; ``recall_sample``, a `SampledRecall`.

    Source: none of the papers; for the sampled rows, SampleAttention's stage 1 (arXiv 2406.15486).
    """

    target: float = field(default=0.95, validator=number(0.0, 1.0))
    rows: int = field(default=64, validator=whole(1, MOST_ROWS))
    span: int | None = field(default=None, validator=maybe(whole()))
    speaks_for: str = field(default="neighbours", validator=one_of("neighbours", "stretch", "tile"))
    dense_from: float = field(default=0.5, validator=number(0.0, 1.0))

    head_scope: ClassVar[HeadScope] = "head"
    repeats: ClassVar[bool] = True

    @property
    def grain(self) -> int | None:
        """Tokens at whose multiples a cut changes nothing: `span`, or None where the rows are spread over each call."""
        return self.span

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles, and of each sampled row its mass by tile and the keys of the plan's stripes."""
        geometry = call.geometry
        samples = self.rows if self.span is None else self.rows * geometry.tile_rows(self.span)
        each = geometry.kv_len + 40 * geometry.tile_columns(128)
        return default_workspace(call) + geometry.batch * geometry.heads * min(samples, geometry.q_len) * each

    @uncast
    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Adds the tiles that hold most of what sampled rows lose."""
        geometry, grid = call.geometry, plan.common_grid()
        if self.span is not None and self.span % grid[0]:
            remedy = f"pass a multiple of {grid[0]}, the tokens of the plan's query tiles"
            raise ParameterError(f"RecallFloor.span is {self.span}: {remedy}")
        have, reach = plan.tiles_on(*grid), _reach(geometry, grid)
        at = deal(geometry, grid[0], self.rows, self.span)
        stripes = stripes_at(plan.masks, at.position, geometry.tile_columns(grid[1]) * grid[1])
        by_tile = lse_by_tile(call, at.rows, at.real, grid[1], stripes)
        raised = self._by_kernels(by_tile, at, have, grid, reach) if kernels.serve(call.q) else None
        if raised is None:
            raised = self._raised(mass_of(*by_tile), at, have, grid, reach)
        widened = plan.widen(SparseMask.from_rules(call, grid, keep=raised.added))
        return _noted(widened, SampledRecall(at.rows, at.real, raised.before, raised.after), raised.dense.any(-1))

    def _by_kernels(
        self, by_tile: tuple[Tensor, Tensor | None], at: Stretches, have: Tensor, grid: tuple[int, int], reach: Tensor
    ) -> Raised | None:
        """Do the work of `_raised` in a few launches; None for calls that the kernels do not know."""
        from sparseprefill.kernels.sampled import floor

        known = self.speaks_for != "tile" and by_tile[0].dtype == torch.float32
        if not known or have.shape[-1] > floor.MOST_COLUMNS:
            return None
        tiles, neighbours = floor.Held(have, reach), self.speaks_for == "neighbours"
        return floor.raised(
            by_tile, at, tiles, grid, target=self.target, dense_from=self.dense_from, neighbours=neighbours
        )

    def _raised(self, mass: RowMass, at: Stretches, have: Tensor, grid: tuple[int, int], reach: Tensor) -> Raised:
        """The floor's addition, on the plan's grid.

        have: tiles that the plan holds, bool ``[B, Hq, R, C]``. reach: those with an allowed pair, ``[B, 1, R, C]``.
        """
        reach = reach & at.inhabited[:, None, :, None]
        have, free = have & reach, ~have & reach
        own = rows_at(have, at.own)
        lost = torch.where(own, 0.0, mass.tiles - mass.kept).nan_to_num(nan=0.0).clamp(min=0.0)
        before = torch.where(own, mass.tiles, mass.kept).sum(-1)
        mine = (at.position // grid[1])[..., None] == torch.arange(have.shape[-1], device=have.device)
        chosen = self._chosen(lost, before, at.real[:, None], mine[:, None])
        added = self._spread(chosen, at, grid) & free
        dense = self._dense(added, have, reach, at)
        added = torch.where(at.to_tiles(dense)[..., None], free, added)
        return Raised(added, before, before + (lost * rows_at(added, at.own)).sum(-1), dense)

    def _chosen(self, lost: Tensor, before: Tensor, real: Tensor, own: Tensor) -> Tensor:
        """bool ``[B, Hq, n, C]``: the tiles that each sampled row needs, its own among them if it needs any."""
        if self.target >= 1:
            return real[..., None].expand_as(lost)
        need = torch.where(real, self.target - before, 0.0)[..., None]
        values, order = descending(lost, lost > 0)
        values = values.clamp(min=0.0)
        enough = (values.cumsum(-1) - values < need) & (values > 0)
        chosen = torch.zeros_like(enough).scatter_(-1, order, enough)
        return chosen | (own & chosen.any(-1, keepdim=True))

    def _spread(self, chosen: Tensor, at: Stretches, grid: tuple[int, int]) -> Tensor:
        """bool ``[B, Hq, R, C]``: what sampled rows choose, ``[B, Hq, n, C]``, for query tiles that they speak for."""
        tile = torch.arange(at.of.shape[1], device=chosen.device)
        if self.speaks_for == "tile":
            own = (torch.gather(at.own, 1, at.of) == tile)[:, None, :, None]
            return own & rows_at(chosen, at.of)
        spread = _heard(chosen, at, at.of, grid)
        if self.speaks_for == "stretch":
            return spread
        before = _heard(chosen, at, (at.of - 1).clamp(min=0), grid)
        return spread | (before & (at.of % at.each > 0)[:, None, :, None])

    def _dense(self, added: Tensor, have: Tensor, reach: Tensor, at: Stretches) -> Tensor:
        """bool ``[B, Hq, P]``: spans of heads that get every tile."""
        held, bound = at.in_spans(have.sum(-1)), self.dense_from * at.in_spans(reach.sum(-1)).double()
        return (held <= bound) & (held + at.in_spans(added.sum(-1)) > bound)


@frozen
class KeptWhole:
    """A floor over plans that hold every key: its notes. Nothing is lost, so nothing is worked out.

    rows: query rows to sample, as of `RecallFloor`.
    """

    rows: int
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"
    repeats: ClassVar[bool] = True
    tail: ClassVar[int] = ALL_ROWS

    def workspace(self, call: AttentionCall) -> int:
        """The notes, and what deals query tiles to samples."""
        geometry = call.geometry
        rows = min(self.rows, geometry.q_len)
        return geometry.batch * (64 * geometry.tile_rows(1) + 32 * geometry.heads * rows)

    @uncast
    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """The plan, with all of the mass of sampled rows kept before and after."""
        geometry = call.geometry
        at = deal(geometry, plan.common_grid()[0], self.rows, None)
        shape = geometry.batch, geometry.heads, at.rows.shape[1]
        kept = torch.ones(shape, dtype=torch.float32, device=geometry.device)
        return _noted(plan, SampledRecall(at.rows, at.real, kept, kept))


def floor_of(given: object) -> RecallFloor | None:
    """The floor that somebody asks for as `recall`; ParameterError for what is none."""
    if given is None or isinstance(given, RecallFloor):
        return given
    if isinstance(given, Mapping):
        known = [one.name for one in fields(RecallFloor)]
        for name in given:
            if name not in known:
                raise ParameterError(f"recall has no option {printed(name)}{nearest(str(name), known)}")
        try:
            return RecallFloor(**given)
        except ParameterError as error:
            raise ParameterError(f"recall.{error}") from error
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given <= 1:
        return RecallFloor(target=given)
    raise ParameterError(
        f"recall is {printed(given)}: pass a number from 0 to 1, a table of options, a RecallFloor, or None"
    )


def _noted(plan: Plan, seen: SampledRecall, dense: Tensor | None = None) -> Plan:
    """The plan with a floor's notes; dense: None for no head, else as `RecallFloor` says."""
    real, before = seen.real[:, None], seen.before
    mean = _mean(before, real)
    notes = {
        "recall_before": mean,
        "recall_after": mean if seen.after is before else _mean(seen.after, real),
        "recall_dense": torch.zeros_like(mean, dtype=torch.bool) if dense is None else dense,
        "recall_sample": seen,
    }
    return evolve(plan, notes={**plan.notes, **notes})


def _mean(x: Tensor, real: Tensor) -> Tensor:
    """Mean over the rows that exist; NaN where none does."""
    mean: Tensor = torch.where(real, x, 0.0).sum(-1) / real.sum(-1)
    return mean


def _heard(chosen: Tensor, at: Stretches, sample: Tensor, grid: tuple[int, int]) -> Tensor:
    """Gains of each query tile by one sample, int64 ``[B, R]``: its key tiles, and those as far from the
    diagonal."""
    picked = rows_at(chosen, sample)
    tile = torch.arange(sample.shape[1], device=chosen.device)
    column = torch.arange(chosen.shape[-1], device=chosen.device)
    tokens = (torch.gather(at.own, 1, sample) - tile) * grid[0]
    heard = picked
    for rounding in (0, grid[1] - 1) if grid[0] % grid[1] else (0,):
        moved = column + ((tokens + rounding) // grid[1])[..., None]
        known = (moved >= 0) & (moved < chosen.shape[-1])
        index = moved.clamp(0, chosen.shape[-1] - 1)[:, None].expand_as(picked)
        heard = heard | (torch.gather(picked, 3, index) & known[:, None])
    return heard


def _reach(geometry: Geometry, grid: tuple[int, int]) -> Tensor:
    """bool ``[B, 1, R, C]``: tiles that hold at least one allowed pair; one launch on a GPU."""
    every = TileMap(geometry=geometry, tile_q=grid[0], tile_k=grid[1], sink=geometry.tile_columns(grid[1]))
    return every.by_group(geometry.heads)
