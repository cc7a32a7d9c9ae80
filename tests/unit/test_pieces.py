"""What works a piece at a time: as much at once as its module's `ENTRIES` allow and no more, with the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.plugins.delta import corrector as delta
from sparseprefill.plugins.flashprefill import threshold
from sparseprefill.plugins.proxy import corrector as proxy

import sparseprefill as sp
from helpers.build import make
from sparseprefill.mask import priority
from sparseprefill.refiners import budget

LENGTH, HEADS, TILE, DIM = 64, 2, 16, 8


def call() -> sp.AttentionCall:
    """64 tokens, two query heads of one KV head."""
    return make(LENGTH, heads=HEADS)


def plan(given: sp.AttentionCall, stripes: bool) -> sp.Plan:
    """The diagonal tiles, and a few columns for all rows together."""
    none = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    mask = sp.SparseMask.from_tiles(given, none, TILE)
    if stripes:
        keys = torch.arange(LENGTH) % 9 == 0
        mask |= sp.SparseMask.from_stripes(given, keys.view(1, 1, 1, -1), 1, TILE, diagonal=False)
    return sp.Plan(mask)


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


def corrected(corrector: sp.Corrector, given: sp.AttentionCall, chosen: sp.Plan) -> torch.Tensor:
    return corrector.correct(given, chosen, sp.ReferenceExecutor().execute(given, chosen), sp.Memory()).out


@pytest.mark.parametrize(("rows", "expected"), [(3.0, [3] * 5 + [1]), (2.999, [2] * 8), (0.5, [1] * 16), (99.0, [16])])
def test_delta_looks_at_some_rows_at_a_time(pieces: Any, rows: float, expected: list[int]) -> None:
    given, corrector = call(), sp.Delta(gamma=4)
    whole = corrected(corrector, given, plan(given, False))
    entries = int(rows * HEADS * LENGTH)
    found = pieces(delta, "_differences", ("ENTRIES", "ENTRIES_ON_CPU"), entries, lambda *a: a[5].shape[1])
    assert torch.allclose(whole, corrected(corrector, given, plan(given, False)), atol=1e-6)
    assert found == expected


def test_delta_is_the_papers() -> None:
    """Every 64th row is dense where nothing is said (Delta Attention, section 4)."""
    assert sp.Delta().gamma == sp.Delta().grain == 64


def test_delta_counts_its_rows_from_the_first_token() -> None:
    """Padding of more rows than lie between two dense ones changes nothing."""
    given, corrector, padding = call(), sp.Delta(gamma=4), 13
    whole = corrected(corrector, given, sp.Plan(sp.SparseMask.from_rules(given, TILE, band=0)))
    q, k, v = (torch.cat([torch.randn_like(x[:, :, :padding]), x], 2) for x in (given.q, given.k, given.v))
    padded = sp.AttentionCall(q, k, v, starts=torch.tensor([padding], dtype=torch.int32))
    shifted = corrected(corrector, padded, sp.Plan(sp.SparseMask.from_rules(padded, TILE, band=0)))[:, :, padding:]
    assert torch.allclose(whole, shifted, atol=1e-6)


@pytest.mark.parametrize("stripes", [False, True])
@pytest.mark.parametrize(("tiles", "expected"), [(2.0, [2, 2]), (1.999, [1] * 4), (3.0, [3, 1]), (0.1, [1] * 4)])
def test_proxies_enter_some_query_tiles_at_a_time(
    pieces: Any, stripes: bool, tiles: float, expected: list[int]
) -> None:
    given, corrector = call(), sp.Proxy()
    whole = corrected(corrector, given, plan(given, stripes))
    each = (LENGTH // TILE) * HEADS * (TILE + (TILE + DIM + DIM if stripes else 0))  # logits, and means of its own
    found = pieces(proxy, "_corrected", ("ENTRIES", "ENTRIES_ON_CPU"), int(tiles * each), lambda *a: a[4].shape[1])
    assert torch.allclose(whole, corrected(corrector, given, plan(given, stripes)), atol=1e-6)
    assert found == expected


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
    chosen, refiner = evolve(plan(given, True), priority=scores), sp.BudgetCeiling(share=0.4)
    whole = refiner.refine(given, chosen, sp.Memory()).mask.to_dense()
    monkeypatch.setattr(budget, "BLOCKS", 1)  # so that the keys are the most that a piece holds
    monkeypatch.setattr(budget, "ENTRIES", int(pieces_of * LENGTH))
    found = pieces(budget._Maker, "part", (), 0, lambda *a: (len(range(*a[1].indices(HEADS))), len(a[2])))
    assert torch.equal(whole, refiner.refine(given, chosen, sp.Memory()).mask.to_dense())
    assert found == expected
