"""The estimator of SampleAttention. The executor is the shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from sparseprefill.mask import SparseMask
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Plan
from sparseprefill.sampling import SampledMass, sampled_mass
from sparseprefill.selection import top_mass
from sparseprefill.slashes import slash_tiles

from .cra import SAMPLED, Sampled
from .samples import Samples

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory

    from .config import SampleConfig


@frozen
class SampleEstimator:
    """Algorithm 1: sample each chunk's last rows, keep the strips that reach both thresholds, merge them to tiles.

    It looks at the last rows of chunks of the call, so cutting a prompt changes the estimate: it has no grain.
    """

    alpha_c: float
    alpha_s: float
    chunk_n: int
    block: int
    extend: str

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        """Tiles of column and slash strips; `Plan.notes` keeps what `cra` needs."""
        samples = Samples.of(call.geometry, self.block, self.chunk_n)
        found = [self._mass(call, samples, chunk) for chunk in range(len(samples.until))]
        columns = top_mass(torch.stack([mass.columns for mass in found], 2), self.alpha_c)
        slashes = top_mass(torch.stack([mass.slashes for mass in found], 2), self.alpha_s)
        keep = self._tiles(call, samples.part, columns, slashes)
        keep[..., 0] = True
        notes = Sampled(samples.rows.flatten(1), samples.real.flatten(1), torch.cat([mass.lse for mass in found], 2))
        return Plan(SparseMask.from_tiles(call, keep, self.block), notes={SAMPLED: notes})

    def _mass(self, call: AttentionCall, samples: Samples, chunk: int) -> SampledMass:
        """One chunk at a time, so that memory is that of one sample."""
        rows, real = samples.rows[:, chunk], samples.real[:, chunk]
        return sampled_mass(call, rows, real, self.block, column=self.block, until=samples.until[chunk])

    def _tiles(self, call: AttentionCall, part: Tensor, columns: Tensor, slashes: Tensor) -> Tensor:
        """bool ``[B, Hq, R, C]`` from strips ``[B, Hq, S, C]`` of every chunk."""
        if self.extend == "union":
            columns, slashes, part = columns.any(2, keepdim=True), slashes.any(2, keepdim=True), torch.zeros_like(part)
        index = part[:, None, :, None].expand(-1, columns.shape[1], -1, columns.shape[3])
        return torch.gather(columns, 2, index) | slash_tiles(call.geometry, slashes, self.block, part)


def pipeline(config: SampleConfig) -> Pipeline:
    """Build `sample-attention`."""
    estimator = SampleEstimator(config.alpha_c, config.alpha_s, config.chunk_n, config.block, config.extend)
    return Pipeline(estimator, name="sample-attention")
