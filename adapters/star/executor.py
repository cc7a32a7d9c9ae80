"""AnchoredBlockExecutor: Star Attention over the ranks of a process group (Acharya et al., 2024, section 2)."""

from __future__ import annotations

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.errors import InvalidCallError
from sparseprefill.executors.dense import dense
from sparseprefill.stages import SparseExecutor

from .anchor import Keys
from .exchange import Exchange, exchange, join, pack
from .unmasked import attend_rows


@frozen(eq=False)
class Shard:
    """The context's keys that one rank holds.

    k, v: ``[B, Hkv, N, D]`` and ``[B, Hkv, N, Dv]``. lengths: how many of each batch row's N are real, the first ones;
    on the host. A rank without keys has no Shard.
    """

    k: Tensor
    v: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def empty(cls, keys: Keys, lengths: tuple[int, ...]) -> Shard:
        """Room for so many tokens of each batch row, to be filled."""
        k, v = (
            torch.zeros(len(lengths), keys.heads, max(lengths), width, dtype=keys.dtype, device=keys.device)
            for width in (keys.width, keys.value_width)
        )
        return cls(k, v, lengths)

    def __attrs_post_init__(self) -> None:
        if len(self.lengths) != self.k.shape[0] or max(self.lengths) > self.k.shape[2]:
            remedy = f"one length for each of {self.k.shape[0]} batch rows, at most {self.k.shape[2]}"
            raise InvalidCallError("k", f"a shard of lengths {self.lengths}", remedy)


@frozen(eq=False)
class AnchoredBlockExecutor:
    """Any executor, for rows whose keys are spread over ranks: those of the question and the answer, in phase 2.

    Each rank computes the part over its own keys, and one collective in float32 merges them. Phase 1 needs nothing of
    this: its calls hold all that their rows may see, the anchor and a block.
    """

    executor: SparseExecutor
    ranks: Exchange

    def attend(
        self,
        call: AttentionCall,
        shard: Shard | None,
        *,
        owner: bool,
        lse: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Phase 2, on all ranks at once: output ``[B, Hq, Nq, Dv]`` in q's dtype, LSE ``[B, Hq, Nq]`` in float32.

        call: the new tokens' queries, among the keys since the end of the context (causal, padding in `starts`). Only
        on the `owner`, exactly one rank, do these keys count; elsewhere q, scale, softcap and sinks of the call do.
        shard: this rank's keys of the context, of which every query sees all; None where it holds none. lse: whether it
        is wanted; a call with sinks needs it. Wanted on all ranks or on none.
        """
        if call.window is not None:
            raise InvalidCallError("window", str(call.window), "the keys of a window may be on other ranks: pass None")
        bare = call if call.sinks is None else evolve(call, sinks=None)
        part: tuple[Tensor, Tensor] | None = None
        if shard is not None and any(shard.lengths):
            part = attend_rows(self.executor, bare, shard.k, shard.v, shard.lengths)
        if owner:
            tail = dense(bare, self.executor)
            part = (tail.out, tail.lse) if part is None else join(*part, tail.out, tail.lse)
        if part is None:
            rows = call.q.shape[:3]
            part = call.q.new_zeros(*rows, call.value_dim), call.q.new_full(rows, -torch.inf)
        out, total = exchange(self.ranks, pack(*part), lse=lse or call.sinks is not None)
        if call.sinks is not None and total is not None:
            out = out * torch.sigmoid(total - call.sinks.to(total.dtype)[:, None])[..., None]
        return out.to(call.q.dtype), total
