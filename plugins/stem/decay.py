"""A budget of key tiles that falls with the position of the query (Stem, "Token Position-Decay")."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import field, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.errors import ParameterError, printed
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.plan import Plan
from sparseprefill.refiners.budget import Tiles, fitted
from sparseprefill.refiners.narrow import Choice, highest, scores_of, tile_worth
from sparseprefill.stages import HeadScope
from sparseprefill.validate import maybe, number, whole

UNIT = 10**6
"""Shares count in millionths, in whole numbers: so a budget is the same on every device."""
SHORT, LONG, MORE = 56, 160, 30
"""Stem's first budget of n tiles: n below SHORT, n / 5 + MORE below LONG, n / 10 + MORE from there on."""


@frozen(kw_only=True)
class PositionDecay:
    """Each query tile keeps its best key tiles by score: early ones all they see, late ones ever fewer.

    Of a prompt of n key tiles, query tiles keep k0 up to the k0-th, which is all that they can see; from there on the
    budget falls evenly to ``decay * k0`` at the last, rounded down, at least 1: in tiles of one size,
    ``k(i) = floor(k0 - (1 - decay) * k0 * (i - k0) / (n - k0 - 1))``, i counted from 0. What an early token misses is
    missing in all that later ones make of it; what a late one misses is not.

    tiles: k0. share: k0 as a share of n, rounded down, at least 1. Neither: Stem's own, n where n < 56, ``n // 5 + 30``
    where n < 160, and ``n // 10 + 30`` for longer prompts. decay: 1 keeps the budget even; Stem's figures are at 0.7.
    sink, local: of the tiles that the plan holds the first `sink`, the `local` before the diagonal, and the diagonal
    stay, on top of the budget where they are not within it.

    It takes away, and adds no tile but a diagonal one: behind an estimator with every key (``xattention`` at
    ``threshold=1``, ``bfla`` at ``keep_mass=1``) it chooses alone. Stripes rank among the tiles by worth per key, as
    with `BudgetCeiling`, and a carry's region counts, and stays. Where k0 comes from the length, n is that of the whole
    prompt (`AttentionCall.prompt_lengths`): so chunks that say how long it is get the mask of the whole, and those that
    do not are prompts of their own.

    Raises ParameterError for a plan without scores.

    Source: Stem (arXiv 2603.06274), "Token Position-Decay": ``k(i) = ceil(k_s - k_s (1 - mu) i / N)``. Where the decay
    begins (at k0, not at row 0), the rounding and k0 by length are those of the authors' released code.
    """

    tiles: int | None = field(default=None, validator=maybe(whole()))
    share: float | None = field(default=None, validator=maybe(number(0.0, 1.0)))
    decay: float = field(default=0.7, validator=number(0.0, 1.0))
    sink: int = field(default=4, validator=whole(0))
    local: int = field(default=3, validator=whole(0))
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    def __attrs_post_init__(self) -> None:
        if self.tiles is not None and self.share is not None:
            given = f"tiles={printed(self.tiles)}, share={printed(self.share)}"
            raise ParameterError(f"PositionDecay({given}): pass tiles or share, or neither for Stem's own budget")

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles, and lists of the stripes that budgets have room for."""
        geometry, tile = call.geometry, 128
        pairs = geometry.batch * geometry.heads * geometry.tile_rows(tile)
        return default_workspace(call) + pairs * self._most(call, tile) * tile * 4

    @uncast
    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Keeps the tiles and stripes of highest score."""
        scores_of(plan, self, "use BudgetCeiling, which then takes the nearest")
        at = Choice.of(call, plan)
        scores, room = tile_worth(plan, call, *at.grid), self.budget(call, *at.grid)[:, None] - at.taken
        ends, tile_k = at.ends(call.geometry, self.sink, self.local), at.grid[1]
        # Tiles behind the last query of a batch row hold nothing: they take nobody's place.
        *_, behind = call.geometry.token_range()
        keys = torch.arange(at.tiles.shape[-1], device=scores.device) * tile_k < behind[:, None]
        real = at.tiles & keys[:, None, None]
        ends = ends | (at.tiles & ~keys[:, None, None])
        if plan.mask.stripes is None:
            return at.narrowed(plan, highest(scores, real, room) | ends, None)
        tiles = Tiles(*at.grid, real, at.free & ~ends, scores, room * tile_k)
        kept, stripes = fitted(call, plan, tiles, self._most(call, tile_k) * tile_k)
        return at.narrowed(plan, kept | ends, stripes)

    def budget(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """int64 ``[B, R]``: key tiles that each query tile keeps by score."""
        geometry = call.geometry
        *_, end = geometry.token_range()
        prompt = end if call.prompt_lengths is None else torch.zeros_like(end) + call.prompt_lengths
        n = (-(-prompt // tile_k)).clamp(min=1)[:, None]
        first = self._first(n)
        i = torch.minimum(((geometry.tiles(tile_q) + 1) * tile_q - 1) // tile_k, n - 1)
        less = (UNIT - round(self.decay * UNIT)) * first * (i - first).clamp(min=0)
        return (first + -less // ((n - first - 1).clamp(min=1) * UNIT)).clamp(min=1)

    def _first(self, n: Tensor) -> Tensor:
        """int64: k0 of a prompt of so many key tiles."""
        if self.tiles is not None:
            return n.clamp(max=self.tiles)
        if self.share is not None:
            return (n * round(self.share * UNIT) // UNIT).clamp(min=1)
        longer = torch.where(n < LONG, n // 5, n // 10)
        return torch.where(n < SHORT, n, longer + MORE)

    def _most(self, call: AttentionCall, tile_k: int) -> int:
        """A bound on k0, known on the host, no more than the call's key tiles."""
        columns = call.geometry.tile_columns(tile_k)
        if self.tiles is not None:
            return min(self.tiles, columns)
        if isinstance(call.prompt_lengths, Tensor):
            return columns
        known = [columns, SHORT - 1, LONG - 1] if call.prompt_lengths is None else [-(-call.prompt_lengths // tile_k)]
        possible = [n for n in known if n <= columns or call.prompt_lengths is not None]
        here = torch.tensor(possible, dtype=torch.int64, device="cpu").clamp(min=1)
        return min(columns, int(self._first(here).max()))
