"""What works a piece at a time: as much at once as its module's `ENTRIES` allow and no more, with the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.plugins.flashprefill import threshold

import sparseprefill as sp
from helpers.build import make
from sparseprefill.mask import priority
from sparseprefill.refiners import budget

LENGTH, HEADS, TILE, DIM = 64, 2, 16, 8


def call() -> sp.AttentionCall:
    """64 tokens, two query heads of one KV head."""
    return make(LENGTH, heads=HEADS)


def plan(given: sp.AttentionCall) -> sp.Plan:
    """The diagonal tiles, and a few columns for all rows together."""
    keys = torch.arange(LENGTH) % 9 == 0
    mask = sp.SparseMask.from_tiles(given, torch.zeros(1, 1, 4, 4, dtype=torch.bool), TILE)
    return sp.Plan(mask | sp.SparseMask.from_stripes(given, keys.view(1, 1, 1, -1), 1, TILE, diagonal=False))


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """What `size` says of the arguments of each call of a module's function, with so many entries at once."""

    def watch(module: Any, name: str, constants: tuple[str, ...], entries: int, size: Callable[..., Any]) -> list[Any]:
        found: list[Any] = []
        function = getattr(module, name)

        def watched(*arguments: Any) -> Any:
            found.append(size(*arguments))
            return function(*arguments)

        monkeypatch.setattr(module, name, watched)
        for constant in constants:
            monkeypatch.setattr(module, constant, entries)
        return found

    return watch


@pytest.mark.parametrize(("groups", "expected"), [(3, [(2, 1), (1, 1)]), (2, [(2, 1), (1, 1)]), (1, [(1, 1)] * 3)])
def test_a_threshold_judges_some_columns_at_a_time(pieces: Any, groups: int, expected: list[tuple[int, int]]) -> None:
    keys = torch.arange(LENGTH) % 3 == 0
    given = make(LENGTH, heads=3)
    mask = sp.SparseMask.from_stripes(given, keys.view(1, 1, 1, -1).expand(1, 3, 1, -1), LENGTH // TILE, TILE)
    scores = sp.PriorityScores(columns=torch.rand(1, 3, 1, LENGTH))
    chosen, refiner = sp.Plan(mask, priority=scores), sp.RelativeThreshold(0.5, sink=0, local=0)
    whole = refiner.refine(given, chosen, sp.Memory())
    found = pieces(
        threshold,
        "column_worth",
        ("ENTRIES",),
        groups * LENGTH,
        lambda *a: (len(range(*a[3].indices(3))), a[2].shape[1]),
    )
    assert torch.equal(whole.mask.to_dense(), refiner.refine(given, chosen, sp.Memory()).mask.to_dense())
    if groups == 3:
        expected = [(3, 1)]
    assert found == expected


@pytest.mark.parametrize(
    ("groups", "expected"),
    [(8.0, [(2, 4)]), (7.999, [(1, 4)] * 2), (3.0, [(1, 3), (1, 1)] * 2), (2.999, [(1, 2)] * 4), (0.5, [(1, 1)] * 8)],
)
def test_scores_of_columns_are_summed_some_at_a_time(pieces: Any, groups: float, expected: list[Any]) -> None:
    given = call()
    scores = sp.PriorityScores(columns=torch.rand(1, HEADS, 4, LENGTH), rows=TILE)
    whole = priority.tiles_of_columns(scores, given, TILE, TILE, TILE)
    found = pieces(
        type(scores),
        "column_scores",
        (),
        0,
        lambda *a: (len(range(*a[3].indices(HEADS))), a[2].shape[1]),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priority, "ENTRIES", int(groups * LENGTH))
        assert torch.equal(whole, priority.tiles_of_columns(scores, given, TILE, TILE, TILE))
    assert found == expected


def test_a_plan_that_skips_is_the_papers() -> None:
    """BLASST's c is 587 where nothing is said (docs/methods/skip-softmax.md), over the prompt's length."""
    given = make(1000, heads=HEADS)
    chosen = sp.Plan(sp.SparseMask.full(given, TILE * 8))
    padded = evolve(given, lengths=torch.tensor([0], dtype=torch.int32))
    empty = sp.Plan(sp.SparseMask.full(padded, 128))
    for one, its, share in ((given, chosen, 0.587), (padded, empty, 0.0)):
        below = sp.SkipSoftmax().refine(one, its, sp.Memory()).skip_below
        assert below is not None
        assert below.tolist() == pytest.approx([share])


@pytest.mark.parametrize(
    ("pieces_of", "expected"),
    [(8.0, [(2, 4)]), (7.999, [(1, 4)] * 2), (3.0, [(1, 3), (1, 1)] * 2), (0.5, [(1, 1)] * 8)],
)
def test_a_budget_fits_some_heads_and_tiles_at_a_time(
    pieces: Any, monkeypatch: pytest.MonkeyPatch, pieces_of: float, expected: list[tuple[int, int]]
) -> None:
    given = call()
    scores = sp.PriorityScores(columns=torch.rand(1, HEADS, 4, LENGTH), rows=TILE)
    chosen, refiner = evolve(plan(given), priority=scores), sp.BudgetCeiling(share=0.4)
    whole = refiner.refine(given, chosen, sp.Memory()).mask.to_dense()
    monkeypatch.setattr(budget, "BLOCKS", 1)  # so that the keys are the most that a piece holds
    monkeypatch.setattr(budget, "ENTRIES", int(pieces_of * LENGTH))
    found = pieces(budget._Maker, "part", (), 0, lambda *a: (len(range(*a[1].indices(HEADS))), len(a[2])))
    assert torch.equal(whole, refiner.refine(given, chosen, sp.Memory()).mask.to_dense())
    assert found == expected
