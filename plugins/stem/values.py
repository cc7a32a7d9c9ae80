"""Scores weighted by the norm of values (Stem, "Output-Aware Metric")."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn import functional

from sparseprefill.call import AttentionCall, uncast
from sparseprefill.errors import ParameterError
from sparseprefill.mask.geometry import by_block
from sparseprefill.mask.priority import ENTRIES, Priority
from sparseprefill.memory import Memory, PrefixTiles
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.plan import Plan
from sparseprefill.refiners.narrow import scores_of
from sparseprefill.stages import HeadScope
from sparseprefill.validate import number, whole

TINY = 1e-6
"""Added to norms before the logarithm, and to standard deviations."""


@frozen
class ValueWeights:
    """Raises the scores of keys whose values are large: what a key adds to the output is its share times its value.

    Keys are taken `pool` at a time, and their largest value norm u counts. ``z`` is ln u, less its mean, over its
    standard deviation. To the logarithm of a key's score comes ``beta * max(0, z)``, to that of a tile's score the mean
    over its keys. The plan's pairs stay: it is for the refiners behind it that choose by score (`PositionDecay`,
    `RelativeThreshold`, `BudgetCeiling`, `BudgetFloor`).

    Mean and deviation are those of the keys before the query tile, per KV head, so no later token has a say in what
    earlier ones read, and cuts of a prompt change nothing; keys of the query tile itself, and the first `pool` keys of
    a prompt, have no bonus. A value that is not finite has none either. A chunk finds the norms of earlier ones in the
    request's `Memory`, and reads its own values alone.

    pool: tokens; divides the key tiles of whoever asks for scores of tiles, else they raise ParameterError.

    Raises ParameterError for a plan without scores.

    Source: Stem (arXiv 2603.06274), "Output-Aware Metric": ``Q K + beta * max(0, ln |V|)``, beta = 0.2. The pooling,
    and z in place of ln |V|, which hangs on the scale of the weights, are those of the authors' released code, where
    mean and deviation are over the whole prompt. The bonus goes to the logarithm of a share here, to a mean logit
    there.
    """

    beta: float = field(default=0.2, validator=number(0.0))
    pool: int = field(default=8, kw_only=True, validator=whole())
    grain: ClassVar[int] = 1
    head_scope: ClassVar[HeadScope] = "head"

    def workspace(self, call: AttentionCall) -> int:
        """The norms, and some bonuses at a time."""
        geometry = call.geometry
        keys = geometry.batch * call.kv_heads * geometry.kv_len
        return default_workspace(call) + 64 * keys + 24 * max(ENTRIES, keys)

    @uncast
    def refine(self, call: AttentionCall, plan: Plan, memory: Memory) -> Plan:
        """Weights the plan's priority."""
        inner = scores_of(plan, self, "leave it out")
        return evolve(plan, priority=WeightedPriority(inner, self.beta, self.pool, memory.prefix))


@frozen(eq=False)
class WeightedPriority(Priority):
    """Another priority times the weights of `ValueWeights`. prefix: where norms are kept from chunk to chunk, if so."""

    inner: Priority
    beta: float
    pool: int
    prefix: PrefixTiles | None = None
    _made: list[_Norms] = field(factory=list, init=False, repr=False)

    def tile_scores(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """The worth of each tile, float ``[B, H, R, C]``: see `Priority`."""
        if tile_k % self.pool:
            remedy = f"pass a divisor of {tile_k}, the tokens of the plan's key tiles"
            raise ParameterError(f"ValueWeights.pool is {self.pool}: {remedy}")
        geometry, norms, per = call.geometry, self._norms(call), tile_k // self.pool
        columns = geometry.tile_columns(tile_k)
        position = geometry.tiles(tile_q) * tile_q
        step = max(1, ENTRIES // norms.logs.numel())
        means = []
        for part in position.split(step, 1):
            bonus = norms.bonus(part, self.beta)
            known = norms.before(part)[..., None] - torch.arange(columns, device=geometry.device) * per
            means.append(by_block(bonus, per) / known.clamp(1, per)[:, None])
        weights = torch.cat(means, 2).exp_()
        return self.inner.tile_scores(call, tile_q, tile_k) * weights.repeat_interleave(call.group, 1)

    def column_scores(self, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
        """The worth of each key column: see `Priority`. The keys before the position count."""
        head = torch.arange(heads.start, heads.stop, device=call.geometry.device) // call.group
        bonus = self._norms(call).bonus(position, self.beta)[:, head]
        weights = bonus.exp_().repeat_interleave(self.pool, -1)[..., : call.kv_len]
        return self.inner.column_scores(call, position, heads) * weights

    def _norms(self, call: AttentionCall) -> _Norms:
        if not self._made:
            self._made.append(_Norms.of(call, self.pool, self.prefix))
        return self._made[0]


@frozen(eq=False)
class _Norms:
    """The largest value norms of every `pool` keys on each batch row's grid.

    logs: ``[B, Hkv, S]``, natural logarithms, 0 where `finite` is False; float32, float64 for float64 calls. count,
    total, squares: float64 ``[B, Hkv, S + 1]``, sums over those before.
    """

    pool: int
    logs: Tensor
    finite: Tensor
    count: Tensor
    total: Tensor
    squares: Tensor

    @classmethod
    def of(cls, call: AttentionCall, pool: int, prefix: PrefixTiles | None = None) -> _Norms:
        """From a call's values, and what is kept of earlier ones."""
        make = partial(largest_norms, call, pool)
        largest = make(None, 0) if prefix is None else prefix.get(call, ("largest value norm", pool), pool, make)
        logs = (largest + TINY).log()
        finite = logs.isfinite()
        logs = torch.where(finite, logs, 0.0)
        wide = logs.double()
        sums = (functional.pad(x.cumsum(-1), (1, 0)) for x in (finite.double(), wide, wide * wide))
        return cls(pool, logs, finite, *sums)

    def before(self, position: Tensor) -> Tensor:
        """int64 ``[B, n]``: how many whole pools of keys stand before a position."""
        return (position // self.pool).clamp(0, self.logs.shape[-1])

    def bonus(self, position: Tensor, beta: float) -> Tensor:
        """``[B, Hkv, n, S]``: what each pool of keys gets for the queries from a position ``[B, n]`` on."""
        before = self.before(position)
        at = before[:, None].expand(-1, self.logs.shape[1], -1)
        count, total, squares = (torch.gather(x, 2, at) for x in (self.count, self.total, self.squares))
        mean = total / count.clamp(min=1)
        spread = ((squares - count * mean * mean) / (count - 1).clamp(min=1)).clamp(min=0).sqrt() + TINY
        factor = torch.where(count > 1, beta / spread, 0.0).to(self.logs.dtype)
        bonus = (self.logs[:, :, None] - mean.to(self.logs.dtype)[..., None]).clamp_(min=0).mul_(factor[..., None])
        known = torch.arange(self.logs.shape[-1], device=before.device) < before[..., None]
        return bonus.masked_fill_(~(known[:, None] & self.finite[:, :, None]), 0.0)


def largest_norms(call: AttentionCall, pool: int, kept: Tensor | None = None, pools: int = 0) -> Tensor:
    """``[B, Hkv, S]``: the largest norm of every `pool` values on each row's grid; infinite or NaN where one is so.

    kept: the same of an earlier call of the request, whose first `pools` entries are taken as they are.
    """
    geometry = call.geometry
    if call.pages is not None:  # so that no copy of all values is made and kept
        v = call.values_at(torch.arange(pools * pool, geometry.kv_len, device=geometry.device)[None])
    else:
        v = call.v.detach()[:, :, pools * pool :]
    known = [] if kept is None else [kept[:, :, :pools]]
    norms = torch.linalg.vector_norm(v, dim=-1, dtype=torch.promote_types(v.dtype, torch.float32))
    if geometry.starts is not None:
        index = torch.arange(geometry.kv_len, device=norms.device) + geometry.starts[:, None]
        norms = torch.gather(norms, 2, index.clamp(max=geometry.kv_len - 1)[:, None].expand_as(norms))
    largest = functional.pad(norms, (0, -norms.shape[2] % pool)).unflatten(-1, (-1, pool)).amax(-1)
    return torch.cat([*known, largest], 2) if known else largest
