"""The dense tail: a prompt's last rows get every key, whatever the method, the padding, the chunks and the parts."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.plugins.share_prefill.heads import NEVER

import sparseprefill as sp
from helpers.build import int32, make
from helpers.stubs import Estimate
from sparseprefill.stages import ALL_ROWS
from sparseprefill.testing import attention
from sparseprefill.testing.votes import computed
from sparseprefill.validate import MOST_ROWS

METHODS = sorted(sp.methods())
PADDED: dict[str, dict[str, Any]] = {
    "alone": {},
    "left": {"batch": 2, "starts": int32(0, 77)},
    "right": {"batch": 2, "lengths": int32(190, 101)},
    "both": {"batch": 2, "starts": int32(31, 5), "lengths": int32(120, 185)},
}
TAIL = 24


def small(name: str, **more: Any) -> sp.Pipeline:
    parameters = {**sp.default_registry().get(name).small, **more}
    if name == "share-prefill":
        parameters["clusters"] = "single"
    made = sp.build(name, **parameters)
    assert isinstance(made, sp.Pipeline)
    return made


def last_rows(call: sp.AttentionCall, number: int) -> torch.Tensor:
    """bool ``[B, 1, Nq, 1]``: so many last real rows of each batch row."""
    real = call.geometry.real_queries()
    return (real & (real.flip(1).cumsum(1).flip(1) <= number))[:, None, :, None]


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("name", METHODS)
def test_the_last_rows_see_every_key_with_every_method(name: str, padding: str) -> None:
    call = make(190, heads=4, kv_heads=2, dtype=torch.float64, **PADDED[padding])
    bare = small(name)
    tailed = bare.with_tail(TAIL)
    without, found = bare.run(call), tailed.run(call)
    visible = call.geometry.visible()[:, None]
    before, after = without.mask.to_dense(), found.mask.to_dense()
    rows = last_rows(call, TAIL)
    assert torch.equal((visible & rows).expand_as(after), after & rows)
    # Whole query tiles are rounded up, no more.
    away = ~last_rows(call, TAIL + 2 * found.mask.tile_q)
    assert torch.equal(before & away, after & away)
    out, lse = attention(call, computed(call, found))
    torch.testing.assert_close(out, found.out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, found.lse, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", METHODS)
def test_no_rows_leave_the_pipeline_as_it_is(name: str) -> None:
    bare = small(name)
    route = sp.Route.of(bare)
    assert bare is bare.with_tail(0)
    assert (bare,) == route.with_tail(0).pipelines
    assert 0 == bare.tail or bare is bare.with_tail(1)


def test_who_keeps_its_last_rows_itself_gets_none_added() -> None:
    dense = sp.build("dense")
    star = sp.build("star-attention", block_size=64, context_length=-200)
    own = evolve(small("streaming"), refiners=(sp.DenseRows(200),))
    for pipeline in (dense, star, own):
        assert isinstance(pipeline, sp.Pipeline)
        assert pipeline is pipeline.with_tail(200)
    for pipeline in (star, own):
        assert isinstance(pipeline, sp.Pipeline)
        assert sp.DenseRows(201) == pipeline.with_tail(201).refiners[-1]
    assert isinstance(dense, sp.Pipeline)
    assert ALL_ROWS == dense.tail
    narrowed = evolve(dense, refiners=(sp.BudgetCeiling(tiles=1),))
    assert 0 == narrowed.tail, "the last refiner has the last word"
    assert 200 == sp.Pipeline(sp.UnionEstimator(small("streaming"), star)).tail
    assert 0 == sp.build("star-attention", block_size=64, context_length=640).tail


def test_a_ceiling_does_not_cut_the_tail() -> None:
    call = make(190)
    pipeline = evolve(small("bfla"), refiners=(sp.BudgetCeiling(tiles=1),)).with_tail(16)
    mask = pipeline.run(call).mask.to_dense()
    assert torch.equal(call.geometry.visible()[0, -16:].expand(2, -1, -1), mask[0, :, -16:])
    assert 1 < 190 * 191 / 2 / int(mask[0, 0].sum())


def in_chunks(pipeline: sp.Pipeline, call: sp.AttentionCall, cuts: list[int], prompt: int | None) -> torch.Tensor:
    """The masks of chunks, one below the other."""
    rows, memory, bounds = [], sp.Memory(), [0, *cuts, call.q.shape[2]]
    for first, last in pairwise(bounds):
        k, v = call.k[:, :, :last], call.v[:, :, :last]
        part = sp.AttentionCall(call.q[:, :, first:last], k, v, prompt_lengths=prompt)
        mask = pipeline.run(part, memory).mask.to_dense()
        rows.append(torch.nn.functional.pad(mask, (0, call.kv_len - last)))
    return torch.cat(rows, 2)


@pytest.mark.parametrize("name", [one for one in METHODS if small(one).grain is not None])
def test_chunks_that_know_the_prompts_end_get_the_mask_of_the_whole(name: str) -> None:
    call, pipeline = make(190, heads=4, kv_heads=2), small(name).with_tail(TAIL)
    grain = pipeline.grain
    assert grain is not None
    assert grain == small(name).grain
    cuts = [cut for cut in (grain, 2 * grain, 96, 176) if cut < 190 and cut % grain == 0]
    cuts = sorted({*cuts, *((171, 185) if grain == 1 else ())})  # in the tail, and in a tile of it
    whole = pipeline.run(call).mask.to_dense()
    assert torch.equal(whole, in_chunks(pipeline, call, cuts, 190))
    bare = small(name).run(call).mask.to_dense()
    apart = in_chunks(pipeline, call, cuts, None)
    assert torch.equal(apart, apart | whole), "without it each chunk's last rows are dense, too"
    if not torch.equal(bare, whole):
        first = cuts[0]
        assert torch.equal(call.geometry.visible()[0, first - 1].expand(4, -1), apart[0, :, first - 1])


def test_each_batch_row_has_a_prompt_of_its_own() -> None:
    """One is complete, one goes on, of one the last tokens are behind it."""
    call = make(96, 96, batch=3, starts=int32(0, 16, 0), prompt_lengths=int32(96, 200, 64))
    mask = sp.Pipeline(Estimate(lambda call, _: sp.Plan(sp.SparseMask.from_rules(call, 16, band=0)))).with_tail(16)
    found, visible = mask.run(call).mask.to_dense()[:, 0], call.geometry.visible()
    dense = [(found[b] == visible[b]).all(-1).nonzero()[:, 0].tolist() for b in range(3)]
    assert [*range(16), *range(80, 96)] == dense[0]
    assert list(range(32)) == dense[1], "its first tile and padding"
    assert [*range(16), *range(48, 96)] == dense[2]


@pytest.mark.parametrize("name", ["anchor-attention", "streaming", "bfla", "vertical-slash"])
def test_parts_of_a_call_keep_the_tail_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseprefill.parts import split

    monkeypatch.setattr(split, "ROWS", 32)
    call, pipeline = make(190, heads=4, kv_heads=2, dtype=torch.float64), small(name).with_tail(TAIL)
    whole, cut = pipeline.run(call), evolve(pipeline, workspace=1).run(call)
    assert cut.parts is not None
    assert cut.parts.count > (4 if pipeline.grain else 3)
    torch.testing.assert_close(whole.out, cut.out, rtol=1e-11, atol=1e-11)
    assert torch.equal(whole.mask.to_dense(), cut.mask.to_dense())
    ends = [part.of(call).prompt_lengths for part in split.parts(evolve(pipeline, workspace=1), call, 1)]
    assert {190 if pipeline.grain else None} == set(ends)


def test_a_part_of_rows_knows_the_end_of_each_batch_row() -> None:
    from sparseprefill.parts.split import Part

    call = make(40, 60, batch=2, lengths=int32(60, 35))
    parted = Part((0, 2), (0, 16)).of(call)
    assert [60, 35] == parted.prompt_lengths.tolist()  # type: ignore[union-attr]
    assert [36, 35] == parted.lengths.tolist()  # type: ignore[union-attr]
    assert 99 == Part((0, 2), (0, 16)).of(evolve(call, prompt_lengths=99)).prompt_lengths
    assert Part((0, 1), (0, 40)).of(call).prompt_lengths is None


def test_a_mask_without_overlap_stays_so() -> None:
    """Of anchor-attention: executors then look for no key that is selected twice."""
    call, bare = make(190, heads=4, kv_heads=2), small("anchor-attention")
    plans = [one.plan(call, sp.Memory()) for one in (bare, bare.with_tail(TAIL))]
    assert [True, True] == [plan.mask.disjoint for plan in plans]
    mask = plans[1].mask
    tiles = sp.SparseMask(call.geometry, mask.tile_q, mask.tile_k, mask.tiles)
    stripes = sp.SparseMask(call.geometry, mask.tile_q, mask.tile_k, None, mask.group, mask.stripes)
    assert not bool((tiles.to_dense() & stripes.to_dense()).any())
    assert torch.equal(mask.to_dense(), tiles.to_dense() | stripes.to_dense())


def test_pivots_do_not_know_of_the_tail() -> None:
    """What share-prefill remembers of three layers of equal input is what it remembers without."""
    kept = []
    for tail in (0, TAIL):
        pipeline = small("share-prefill").with_tail(tail)
        memory = sp.Memory()
        for layer in range(3):
            pipeline.run(make(190, heads=4, kv_heads=2, layer=layer, seed=layer), memory)
        kept.append(list(memory._slots.values()))  # under a key of each pipeline's own
    (bare,), (tailed,) = kept
    for name in ("made", "last", "packed"):
        assert torch.equal(getattr(bare, name), getattr(tailed, name))
    assert (bare.made != NEVER).any()


def test_a_route_keeps_name_gate_and_gaps() -> None:
    from sparseprefill.breakeven.table import Verdict

    class Never:
        def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
            return Verdict(False, reason="too small")

    route = sp.Route("named", (None, small("streaming")), gate=Never())
    tailed = route.with_tail(8)
    assert ("named", route.gate, 8) == (tailed.name, tailed.gate, tailed.known[0].tail)
    assert (None, (sp.DenseRows(8),)) == (tailed.pipelines[0], tailed.known[0].refiners)
    assert 0 == route.known[0].tail


def test_longest_tails_make_dense_attention() -> None:
    call = make(70, 100)
    assert 1.0 == small("streaming").with_tail(MOST_ROWS).run(call).density
    assert 1.0 == small("streaming").with_tail(100).run(evolve(call, prompt_lengths=90)).density
