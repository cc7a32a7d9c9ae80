"""The estimator of FlexPrefill: both patterns on the device, and a choice per head without asking the host.

Tiles are chosen by the attention of mean queries to mean keys, for the heads that this describes well enough.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill import kernels
from sparseprefill.call import AttentionCall, rows_at, uncast
from sparseprefill.mask.geometry import by_block, reachable_map
from sparseprefill.mask.priority import Priority, PriorityScores
from sparseprefill.memory import Memory
from sparseprefill.parts.workspace import default_workspace
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.stages import HeadScope
from sparseprefill.statistics.pooled import js_distance, key_tile_mean, products, real_rows, tile_mean
from sparseprefill.statistics.sampled import last_mass, seen_blocks
from sparseprefill.statistics.select import top_mass
from sparseprefill.statistics.slashes import SampledPriority, columns_and_diagonals, slash_tiles

from . import FlexConfig

SCORES = 1 << 23
"""Scores that are sorted at once, over batch and heads."""
AT_ONCE = 1 << 26
"""Scores in memory at once where nothing is sorted."""
SQRT_LN2 = math.sqrt(math.log(2))
"""Largest distance in nats. The authors take the divergence by the natural logarithm, core by base 2."""


@frozen
class FlexEstimator:
    """Algorithms 1 to 4.

    It looks at the call's last queries, so cutting a prompt into chunks changes the estimate: it has no grain.
    """

    config: FlexConfig
    head_scope: ClassVar[HeadScope] = "head"
    repeats: ClassVar[bool] = True

    def workspace(self, call: AttentionCall) -> int:
        """Maps of tiles, and their lists."""
        return default_workspace(call, self.config.block)

    @uncast
    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Tiles of every head, and stripes of those that are not query-aware.

        Their scores are left as priority. Notes: `distance` ``[B, Hq]``, the Jensen-Shannon distance in nats, and
        `query_aware`, bool ``[B, Hq]``.
        """
        config, block = self.config, self.config.block
        least = -(-config.min_budget // block)
        most = None if config.max_budget is None else -(-config.max_budget // block)
        mass, rows, real = last_mass(call, block)
        keys = key_tile_mean(call, block, memory)
        by_kernels = kernels.serve(call.q) and call.q.dtype != torch.float64
        far = distance(call, keys, rows, real, mass.columns, block, by_kernels=by_kernels)
        aware = far < config.tau
        slashes = top_mass(mass.slashes, config.gamma, least, most)
        columns = top_mass(mass.columns, config.gamma, least * block, None if most is None else most * block)
        queries = query_aware_tiles(call, keys, config, least, most, by_kernels=by_kernels)
        tiles = slash_tiles(call.geometry, slashes, block, exclude=(aware, queries))
        # The first tile of every row too, as the paper's kernels keep it.
        mask = columns_and_diagonals(call, tiles, columns, block, exclude=aware, sink=1)
        priority = FlexPriority(aware, SampledPriority(mass, real, block), config)
        return Plan(mask, priority=priority, notes={"distance": far, "query_aware": aware})


@frozen(eq=False)
class FlexPriority(Priority):
    """Shares of the sampled attention, and of pooled attention for the tiles of query-aware heads.

    aware: bool ``[B, Hq]``. The pooled scores are made again where somebody asks for them.
    """

    aware: Tensor
    sampled: SampledPriority
    config: FlexConfig

    def tile_scores(self, call: AttentionCall, tile_q: int, tile_k: int) -> Tensor:
        """The worth of each tile, float ``[B, H, R, C]``: see `Priority`."""
        block = self.config.block
        pooled = PriorityScores(tiles=self._pooled, tile_q=block, tile_k=block).tile_scores(call, tile_q, tile_k)
        return torch.where(self.aware[..., None, None], pooled, self.sampled.tile_scores(call, tile_q, tile_k))

    def column_scores(self, call: AttentionCall, position: Tensor, heads: slice) -> Tensor:
        """The worth of each key column: see `Priority`."""
        return self.sampled.column_scores(call, position, heads)

    def _pooled(self, call: AttentionCall) -> Tensor:
        return tile_scores(call, key_tile_mean(call, self.config.block), self.config.block)


def distance(
    call: AttentionCall, keys: Tensor, rows: Tensor, real: Tensor, columns: Tensor, block: int, *,
    by_kernels: bool = False,
) -> Tensor:  # fmt: skip
    """Jensen-Shannon distance ``[B, Hq]``, in nats, between estimated and true attention of the sampled queries.

    keys: mean key per tile ``[B, Hkv, C, D]``. rows, real: the sampled queries, index and existence ``[B, n]``.
    columns: their exact attention mass by key ``[B, Hq, Nkv]``.
    """
    true = by_block(columns, block)
    query = _mean_query(call, rows, real, keys.dtype)
    if by_kernels:
        from . import kernels as gpu

        return gpu.distance(call, products(query, keys)[:, :, 0], true, rows.shape[1], block)
    true = true / true.sum(-1, keepdim=True).clamp(min=torch.finfo(true.dtype).tiny)
    estimate = scores(call, query, keys, seen_blocks(call.geometry, rows, real, block)[:, None])
    return js_distance(estimate[:, :, 0], true) * SQRT_LN2


def _mean_query(call: AttentionCall, rows: Tensor, real: Tensor, dtype: torch.dtype) -> Tensor:
    """``[B, Hq, 1, D]``: of the sampled queries."""
    if call.starts is None and call.lengths is None:
        return call.q[:, :, -rows.shape[1] :].mean(2, keepdim=True, dtype=dtype)
    picked = torch.where(real[:, None, :, None], rows_at(call.q, rows), 0)
    total: Tensor = picked.sum(2, keepdim=True, dtype=dtype)
    return total / real.sum(1).clamp(min=1)[:, None, None, None]


def scores(call: AttentionCall, queries: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """Softmax ``[B, Hq, r, C]`` of mean queries ``[B, Hq, r, D]`` over the mean keys ``[B, Hkv, C, D]`` that are seen.

    seen: bool ``[B, r, C]``. A row that sees nothing has scores of 0.
    """
    logits = products(queries * call.softmax_scale, keys)
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    hidden = ~seen[:, None]
    attention: Tensor = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
    return attention.masked_fill_(hidden, 0.0)


def tile_scores(call: AttentionCall, keys: Tensor, block: int) -> Tensor:
    """``[B, Hq, R, C]``: the scores of all query tiles, in plain PyTorch on any device."""
    geometry = call.geometry
    queries, seen = tile_mean(call.q, geometry, block), reachable_map(geometry, block, block)
    size = max(1, AT_ONCE // (geometry.batch * geometry.heads * keys.shape[2]))
    parts = zip(queries.split(size, 2), seen.split(size, 1), strict=True)
    return torch.cat([scores(call, q, keys, s) for q, s in parts], 2)


def query_aware_tiles(
    call: AttentionCall, keys: Tensor, config: FlexConfig, least: int, most: int | None, *, by_kernels: bool
) -> Tensor:
    """bool ``[B, Hq, R, C]``: the fewest tiles that reach gamma, between `least` and `most` per query tile."""
    geometry, block = call.geometry, config.block
    queries = tile_mean(call.q, geometry, block)
    entries = queries.shape[0] * queries.shape[1] * keys.shape[2]
    found: list[Tensor] = []
    if by_kernels and config.coverage == "row":
        from sparseprefill.kernels.statistics.softmax import tile_softmax

        first = 0
        for part in queries.split(max(1, AT_ONCE // entries), 2):
            every = tile_softmax(call, products(part, keys), block, call.softmax_scale, call.softcap, first_row=first)
            found.append(top_mass(every, config.gamma, least, most))
            first += part.shape[2]
        return found[0] if len(found) == 1 else torch.cat(found, 2)
    seen = reachable_map(geometry, block, block)
    if geometry.starts is not None or geometry.lengths is not None:
        seen = seen & (real_rows(geometry, block) > 0)[..., None]
    if config.coverage == "global":
        every = scores(call, queries, keys, seen)
        keep = top_mass(every.flatten(2), config.gamma).view(every.shape) | top_mass(every, 0.0, least)
        return keep if most is None else keep & top_mass(every, 1.0, most=most)
    size = max(1, SCORES // entries)
    for part, there in zip(queries.split(size, 2), seen.split(size, 1), strict=True):
        found.append(top_mass(scores(call, part, keys, there), config.gamma, least, most))
    return torch.cat(found, 2)


def pipeline(config: FlexConfig) -> Pipeline:
    """Build `flexprefill`."""
    return Pipeline(FlexEstimator(config), name="flexprefill")
