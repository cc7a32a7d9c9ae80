"""What a ceiling leaves of each method's recall: `python -m lab.ceilings`, run in tests, prints the docs' table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from attrs import evolve, frozen
from torch import Tensor

import sparseprefill as sp
from sparseprefill.testing.heads import head_tensors

METHODS = (
    "anchor-attention", "bfla", "flexprefill", "sample-attention", "share-prefill", "star-attention", "streaming",
    "vertical-slash", "xattention",
)  # fmt: skip
CHARACTERS = ("sink", "local", "stripes", "slash", "mixed", "spans", "diffuse", "stripes")
SHARES = (0.1, 0.2, 0.3)


@frozen(eq=False)
class Trial:
    """Made-up heads of all characters: 8 query heads over 2 KV heads of 64, in tiles of 16 tokens."""

    tokens: int = 1024
    seed: int = 0

    @cached_property
    def call(self) -> sp.AttentionCall:
        """The call."""
        sizes = {"q_len": self.tokens, "heads": len(CHARACTERS), "kv_heads": 2, "head_dim": 64}
        return sp.AttentionCall(*head_tensors(**sizes, characters=CHARACTERS, seed=self.seed))  # type: ignore[arg-type]

    @cached_property
    def attention(self) -> Tensor:
        """``[1, 8, N, N]``: dense attention."""
        call = self.call
        logits = call.q @ call.k.repeat_interleave(call.group, 1).transpose(-1, -2) * call.softmax_scale
        seen = call.geometry.visible()[:, None]
        return logits.masked_fill(~seen, -torch.inf).softmax(-1)

    def plan(self, name: str, refiners: Sequence[sp.MaskRefiner] = ()) -> sp.Plan:
        """The plan of a method with its small parameters and further refiners."""
        method = sp.default_registry().get(name)
        made = method.pipeline(**method.small)
        return evolve(made, refiners=(*made.refiners, *refiners)).plan(self.call, sp.Memory())

    def capped(self, name: str, share: float, *, ideal: bool = False) -> sp.Plan:
        """The same under a ceiling; ideal: which ranks the method's tiles and stripes by the true attention."""
        truth: tuple[sp.MaskRefiner, ...] = (Ideal(self.attention),) if ideal else ()
        return self.plan(name, (*truth, sp.BudgetCeiling(share=share)))

    def recall(self, plan: sp.Plan) -> float:
        """Attention kept, on average over heads and rows."""
        keep = torch.stack([mask.to_dense() for mask in plan.computed()]).any(0)
        return float((self.attention * keep).sum(-1).mean())

    def density(self, plan: sp.Plan) -> float:
        """Share of the causal pairs."""
        return sum(mask.density for mask in plan.computed())


@frozen(eq=False)
class Ideal:
    """Leaves the true attention ``[1, H, N, N]`` as priority, for groups of query tiles as the plan has them."""

    attention: Tensor

    def refine(self, call: sp.AttentionCall, plan: sp.Plan, memory: sp.Memory) -> sp.Plan:
        """Tiles by their mass; columns by theirs in each query tile, which the ceiling asks for by group."""
        tile_q, tile_k, tokens = plan.mask.tile_q, plan.mask.tile_k, self.attention.shape[-1]
        columns = self.attention.unflatten(2, (-1, tile_q)).mean(3)
        tiles = columns.unflatten(3, (tokens // tile_k, tile_k)).sum(-1)
        scores = sp.PriorityScores(tiles=tiles, tile_q=tile_q, tile_k=tile_k, columns=columns, rows=tile_q)
        mask = plan.mask
        if mask.stripes is not None:  # a group for each query tile, so that each is asked for its own columns
            stripes = sp.IndexLists.from_map(mask.stripes_on(tile_q))
            mask = evolve(mask, group=1, stripes=stripes, stripe_width=1)
        return evolve(plan, mask=mask, priority=scores)


def table(trial: Trial) -> str:
    """A row for each method: density and recall without a ceiling, then recall under each share, and the ideal one."""
    lines = [
        "| | alone: density, recall | " + " | ".join(f"{share:g}: recall, ideal" for share in SHARES) + " |",
        "|---" * (2 + len(SHARES)) + "|",
    ]
    for name in METHODS:
        alone = trial.plan(name)
        cells = [f"{trial.density(alone):.2f}, {trial.recall(alone):.3f}"]
        for share in SHARES:
            both = [trial.recall(trial.capped(name, share, ideal=ideal)) for ideal in (False, True)]
            cells.append(f"{both[0]:.3f}, {both[1]:.3f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Trial()))  # noqa: T201
