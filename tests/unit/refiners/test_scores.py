"""Refiners that choose by scores, where a small slip would go unseen: negative scores, later groups, few entries."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparseprefill as sp
from helpers.build import make
from sparseprefill.mask.mask import SparseMask
from sparseprefill.mask.priority import PriorityScores
from sparseprefill.memory import Memory
from sparseprefill.plan import Carry, Plan


@pytest.mark.parametrize("tiles", [1, 55, 56, 57, 159, 160, 161, 1000])
def test_stems_first_budget(tiles: int) -> None:
    """Of a whole prompt of so many tiles, as the released code has it; the first query tile keeps all of it."""
    wanted = tiles if tiles < 56 else tiles // 5 + 30 if tiles < 160 else tiles // 10 + 30
    call = make(16, prompt_lengths=16 * tiles)
    assert sp.PositionDecay().budget(call, 16, 16).tolist() == [[wanted]]


def columns_of(call: sp.AttentionCall, scores: Tensor, group: int = 1, rows: int | None = None) -> Plan:
    """Every column, with these scores of them."""
    mask = SparseMask.from_stripes(call, torch.ones(1, 1, 1, call.kv_len, dtype=torch.bool), group, 16)
    return Plan(mask, priority=PriorityScores(columns=scores, rows=rows))


def test_a_threshold_on_negative_scores_keeps_none_of_them() -> None:
    """The largest score counts as 0 where it is less: a share of it would be more than it."""
    call = make(64)
    plan = columns_of(call, torch.linspace(-0.9, -0.1, 64).expand(1, 2, 1, 64))
    left = sp.RelativeThreshold(1.0, sink=0, local=0).refine(call, plan, Memory()).mask
    assert left.stripes is not None
    assert int(left.stripes.counts.sum()) == 0


def test_a_threshold_takes_the_largest_score_that_a_group_sees() -> None:
    """Of groups behind the first too: the key at 40 comes after the rows of the group at 16."""
    call = make(64, heads=1, kv_heads=1)
    scores = torch.full((1, 1, 1, 64), 0.1)
    scores[..., 20], scores[..., 40] = 1.0, 10.0
    left = sp.RelativeThreshold(0.5, sink=0, local=0).refine(call, columns_of(call, scores), Memory()).mask
    kept = [row.nonzero().flatten().tolist() for row in left.stripe_map()[0, 0]]
    assert [row for row in kept[1] if row < 32] == [20]
    assert [row for row in kept[3] if row < 64] == [40]


def test_values_weigh_tiles_alike_however_many_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make(96)
    plan = Plan(SparseMask.full(call, 16), priority=PriorityScores(tiles=torch.rand(1, 2, 6, 6), tile_q=16, tile_k=16))

    def score() -> Tensor:
        priority = sp.ValueWeights(0.5).refine(call, plan, Memory()).priority
        assert priority is not None
        return priority.tile_scores(call, 16, 16)

    whole = score()
    monkeypatch.setitem(sp.ValueWeights.refine.__globals__, "ENTRIES", 1)
    torch.testing.assert_close(score(), whole)


def test_a_ceiling_ranks_negative_scores_too() -> None:
    call = make(64, heads=1, kv_heads=1)
    tiles = torch.tensor([-5.0, -1.0, -3.0, -4.0]).expand(1, 1, 4, 4)
    plan = Plan(SparseMask.full(call, 16), priority=PriorityScores(tiles=tiles, tile_q=16, tile_k=16))
    left = sp.BudgetCeiling(tiles=2, sink=0, local=0).refine(call, plan, Memory()).mask
    assert left.tile_map()[0, 0].int().tolist()[3] == [0, 1, 0, 1]
    left = (
        sp.BudgetCeiling(tiles=2, sink=0, local=0)
        .refine(call, columns_of(call, tiles[:, :, :1].repeat_interleave(16, -1)), Memory())
        .mask
    )
    assert left.stripe_map()[0, 0, 3].nonzero().flatten().tolist() == list(range(16, 32))


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float64, 0), (torch.float32, 2), (torch.bfloat16, 2)])
def test_double_scores_are_told_apart_as_such(dtype: torch.dtype, kept: int) -> None:
    """Of equal ones, which single precision makes of them, the nearer stays."""
    call, scores = make(64, heads=1, kv_heads=1), torch.tensor([1 + 1e-9, 1.0, 1.0, 0.0], dtype=torch.float64)
    given = PriorityScores(tiles=scores.to(dtype).expand(1, 1, 4, 4), tile_q=16, tile_k=16)
    plan = Plan(SparseMask.full(call, 16), priority=given)
    left = sp.BudgetCeiling(tiles=2, sink=0, local=0).refine(call, plan, Memory()).mask
    assert left.tile_map()[0, 0, 3].nonzero().flatten().tolist() == [kept, 3]


@pytest.mark.parametrize("differs", ["tiles", "stripes"])
def test_what_one_head_of_a_group_has_computed_already_is_computed_by_the_others(differs: str) -> None:
    """A carry's region that is not the same for all heads joins the union; what a head has itself is left out of it."""
    call = make(64, heads=2, kv_heads=1)
    own = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
    own[0, 0, 3, 1] = True
    if differs == "tiles":
        region = SparseMask.from_tiles(call, own, 16)
    else:
        region = SparseMask.from_stripes(call, own.repeat_interleave(16, -1), 1, 16, diagonal=False)
    carry = Carry(sp.ReferenceExecutor().accumulate(call, Plan(region)), region)
    plan = Plan(SparseMask.from_rules(call, 16, band=0) - region, carry)
    left = sp.GqaUnion().refine(call, plan, Memory()).mask.to_dense()[0]
    assert not left[0, 48:, 16:32].any()
    assert left[1, 48:, 16:32].all()
