"""What each layer's sparse attention kept, taken while the model runs: no queries, keys or masks are held."""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.mask.mask import SparseMask
from sparseprefill.metrics import recall, sample_rows
from sparseprefill.plan import Result

from .outcome import Layer


@define
class LayerWatch:
    """Observer of one forward: recall on sampled rows and on the last ones, density, and masks worth a look.

    rows: sampled evenly. last: at the end of the call. pictured: layer and head whose mask is kept. Batch row 0 only.
    """

    rows: int
    last: int
    pictured: tuple[int, int] | None = None
    found: dict[int, Layer] = field(factory=dict, init=False)
    mask: SparseMask | None = field(default=None, init=False)

    def __call__(self, call: AttentionCall, result: Result) -> None:
        """Take the figures of one layer; waits for the device."""
        q_len = call.q.shape[2]
        last = torch.arange(max(0, q_len - self.last), q_len, device=call.q.device)
        spread = sample_rows(call, self.rows)
        kept = recall(call, result, rows=torch.cat([spread, last]))[0].double()  # [H, rows]
        rows = kept[:, : spread.numel()].cpu()
        recalls, ends = _means(rows), _means(kept[:, spread.numel() :])
        least = min(range(len(recalls)), key=lambda head: min(recalls[head], ends[head]))
        lowest = (least, result.mask.head(0, least))
        self.found[call.layer] = Layer(call.layer, min(1.0, result.density), recalls, ends, rows=rows, lowest=lowest)
        if self.pictured is not None and call.layer == self.pictured[0]:
            self.mask = result.mask.head(0, self.pictured[1])


def _means(kept: Tensor) -> tuple[float, ...]:
    return tuple(kept.nanmean(-1).nan_to_num(1.0).tolist())
