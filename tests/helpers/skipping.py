"""A result that skipped tiles beside its oracle."""

from __future__ import annotations

import math

import torch
from hypothesis import assume

from oracles.skip_softmax import Answer, Rule, skip_softmax
from sparseprefill import AttentionCall, Plan, Result, SparseMask
from sparseprefill.refiners.skip import prompt_length
from sparseprefill.testing.truth import TOLERANCE

NEAR = 1e-3
"""Votes that a rounding may turn: logits that lie so near their bound."""


def plan_of(call: AttentionCall, mask: SparseMask, below: float) -> Plan:
    """A plan whose thresholds are worked out here: c over the prompt's length, 0 where that is 1 or more."""
    thresholds = [below / max(1, length) for length in prompts_of(call)]
    made = torch.tensor([0.0 if x >= 1 else x for x in thresholds], dtype=torch.float32, device=call.q.device)
    return Plan(mask, skip_below=made)


def prompts_of(call: AttentionCall) -> list[int]:
    """Tokens of the prompt of each batch row."""
    length = prompt_length(call)
    return [int(x) for x in length] if isinstance(length, torch.Tensor) else [length] * call.q.shape[0]


def oracle_of(call: AttentionCall, mask: SparseMask, below: float, block: tuple[int, int, int]) -> Answer:
    """block: query rows of one order, those that vote together, and keys of a step."""
    geometry, tiles, stripes = mask.geometry, mask.tile_map(), mask.with_stripe_width(1).stripes
    first = geometry.first_tile(mask.tile_q).tolist()
    group = geometry.first_tile(mask.group_rows).tolist()

    def holds(b: int, h: int, row: int, column: int) -> bool:
        return column < tiles.shape[3] and bool(tiles[b, h, row - first[b], column])

    def columns(b: int, h: int, row: int) -> list[int]:
        if stripes is None:
            return []
        at = row // mask.group - group[b]
        offset, count = int(stripes.offsets[b, h, at]), int(stripes.counts[b, h, at])
        return [int(x) for x in stripes.indices[offset : offset + count]]

    rule = Rule(tile_q=mask.tile_q, tile_k=mask.tile_k, block=block[0], rows=block[1], keys=block[2], below=below)
    return skip_softmax(call, rule, holds, columns, geometry.key_counts().tolist(), prompts_of(call))


def check_against_oracle(call: AttentionCall, result: Result, below: float, *, bound: float | None = None) -> Answer:
    """Output, LSE and the pairs skipped are the oracle's; examples in which a vote is near are passed over.

    bound: largest difference of output and LSE, relative to 1 and more; by default that of the dtype.
    """
    skipped = result.skipped
    assert skipped is not None
    answer = oracle_of(call, result.plan.mask, below, (skipped.block, skipped.rows, skipped.keys))
    near = NEAR if call.q.dtype in (torch.float32, torch.float64) else 3e-2
    assume(answer.margin > near)
    bound = TOLERANCE[call.q.dtype] if bound is None else bound
    for wanted, got in ((answer.out, result.out), (answer.lse, result.lse)):
        expected, actual = torch.tensor(wanted, dtype=torch.float64), got.double().cpu()
        close = ((expected - actual).abs() <= bound * (1 + expected.abs())) | (expected == actual)
        assert bool(close.all()), (
            f"{int((~close).sum())} differ, by {float((expected - actual).abs().nan_to_num(math.inf).max())}"
        )
    assert answer.skipped == skipped.pairs.tolist()
    return answer
