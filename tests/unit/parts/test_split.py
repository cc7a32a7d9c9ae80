"""How calls are cut into parts, what runs, and what is left of the plans."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve, frozen

import sparseprefill as sp
from helpers.build import int32, make
from helpers.stubs import Estimate, Observe, Refine
from sparseprefill.parts import split
from sparseprefill.parts.split import Part

GIB = 1 << 30


@frozen
class Needs:
    """An estimator of the full mask that asks for some bytes per query head and row."""

    each: int
    head_scope: sp.HeadScope | None = "head"
    grain: int | None = None

    def workspace(self, call: sp.AttentionCall) -> int:
        return self.each * call.q.shape[1] * call.q.shape[2]

    def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
        return sp.Plan(sp.SparseMask.full(call, 16))


@frozen
class Free:
    """The reference, which asks for nothing."""

    def workspace(self, call: sp.AttentionCall) -> int:
        return 0

    def execute(self, call: sp.AttentionCall, plan: sp.Plan) -> sp.Result:
        return sp.ReferenceExecutor().execute(call, plan)

    def accumulate(self, call: sp.AttentionCall, plan: sp.Plan) -> sp.SoftmaxState:
        return sp.ReferenceExecutor().accumulate(call, plan)


def needing(each: int = 1, **fields: Any) -> sp.Pipeline:
    return sp.Pipeline(Needs(each, **fields), executor=Free())


def cut(pipeline: sp.Pipeline, call: sp.AttentionCall, limit: int) -> list[tuple[int, ...]]:
    return [(*part.heads, *part.rows) for part in split.parts(pipeline, call, limit)]


CALL = make(64, heads=12, kv_heads=3)


@pytest.fixture(autouse=True)
def nothing_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that stages meet exactly are easier to read."""
    monkeypatch.setattr(split, "SPARE", 1 << 62)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (64 * 12, [(0, 12, 0, 64)]),
        (64 * 11, [(0, 4, 0, 64), (4, 12, 0, 64)]),
        (64 * 7, [(0, 4, 0, 64), (4, 8, 0, 64), (8, 12, 0, 64)]),
        (64 * 3, [(a, a + 2, 0, 64) for a in range(0, 12, 2)]),
        (64 * 2, [(a, a + 2, 0, 64) for a in range(0, 12, 2)]),
        (1, [(a, a + 1, 0, 64) for a in range(12)]),
    ],
)
def test_heads_of_a_kv_head_stay_together_while_they_fit(limit: int, expected: list[tuple[int, ...]]) -> None:
    assert expected == cut(needing(), CALL, limit)


def test_a_scope_of_groups_never_cuts_a_group() -> None:
    assert [(a, a + 4, 0, 64) for a in (0, 4, 8)] == cut(needing(head_scope="group"), CALL, 1)


def test_no_scope_is_never_cut_by_heads() -> None:
    assert [(0, 12, 0, 64)] == cut(needing(head_scope=None), CALL, 1)


@pytest.mark.parametrize("stage", ["refiners", "observers"])
def test_every_stage_must_declare_a_scope(stage: str) -> None:
    more: dict[str, Any] = {stage: ({"refiners": Refine(), "observers": Observe()}[stage],)}
    assert evolve(needing(), **more).head_scope is None


def test_rows_are_cut_before_a_group_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "ROWS", 16)
    found = cut(needing(grain=8), CALL, 4 * 40)
    assert [(a, a + 4, *rows) for rows in ((0, 32), (32, 64)) for a in (0, 4, 8)] == found
    assert [(0, 12, row, row + 16) for row in range(0, 64, 16)] == cut(needing(grain=8, head_scope=None), CALL, 1)
    assert 12 * 4 == len(cut(needing(grain=8), CALL, 1))


def test_rows_are_cut_at_absolute_multiples_of_the_grain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "ROWS", 4)
    call = make(20, 40, heads=1, q_offset=7)
    assert [(0, 1, 0, 5), (0, 1, 5, 17), (0, 1, 17, 20)] == cut(needing(grain=12), call, 1)


def test_a_quarter_of_the_limit_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "SPARE", 4)
    whole, wanted = needing(), 12 * 64
    assert 1 == len(cut(whole, CALL, wanted))
    assert 2 == len(cut(whole, CALL, wanted - 1))  # three quarters hold 9 heads, two of three KV groups
    assert 3 == len(cut(whole, CALL, 6 * 64))


def test_rows_of_left_padded_batches_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "ROWS", 16)
    call = make(64, heads=2, kv_heads=2, batch=2, starts=int32(0, 3))
    assert [(0, 1, 0, 64), (1, 2, 0, 64)] == cut(needing(grain=8), call, 1)


def test_a_part_is_a_view_that_knows_its_place() -> None:
    sinks = torch.arange(12.0)
    call = make(64, heads=12, kv_heads=3, layer=5, sinks=sinks, lengths=int32(50), first_head=24)
    part = Part((6, 8), (16, 48)).of(call)
    assert (1, 2, 32, 8) == part.q.shape
    assert (1, 1, 48, 8) == part.k.shape
    assert (16, 30, 5) == (part.q_offset, part.first_head, part.layer)
    assert part.q.data_ptr() == call.q[:, 6, 16].data_ptr()
    assert part.k.data_ptr() == call.k[:, 1].data_ptr()
    assert [6.0, 7.0] == (part.sinks.tolist() if part.sinks is not None else [])
    assert [48] == (part.lengths.tolist() if part.lengths is not None else [])


def test_auto_is_no_limit_on_a_cpu_and_three_gib_on_cuda() -> None:
    auto = sp.build("dense")
    assert auto.limit(torch.device("cpu")) is None
    assert 3 * GIB == auto.limit(torch.device("cuda"))
    assert 7 == evolve(auto, workspace=7).limit(torch.device("cpu"))
    assert auto.run(CALL).parts is None


def test_parts_run_in_order_with_one_memory_and_observers_see_each() -> None:
    seen: list[Any] = []

    @frozen
    class Watch:
        head_scope: ClassVar[sp.HeadScope] = "head"

        def workspace(self, call: Any) -> int:
            return 0

        def observe(self, call: Any, plan: Any, result: Any, memory: sp.Memory) -> None:
            seen.append((call.first_head, tuple(result.out.shape), result.plan is plan, len(memory)))
            memory.put(call.first_head, None)

    pipeline = evolve(needing(), observers=(Watch(),), workspace=64 * 4)
    assert pipeline.run(CALL).parts is not None
    assert [(a, (1, 4, 64, 8), True, i) for i, a in enumerate((0, 4, 8))] == seen


def test_a_result_in_parts_has_pairs_and_a_plan_of_all_masks() -> None:
    result = evolve(sp.build("streaming", sink=16, window=16, block=16), workspace=1).run(CALL)
    whole = sp.build("streaming", sink=16, window=16, block=16).run(CALL)
    assert result.parts is not None
    assert (12, None, 0) == (result.parts.count, result.plan.carry, len(result.plan.notes))
    assert whole.mask.to_dense().sum((2, 3)).tolist() == result.parts.pairs.tolist()
    assert whole.density == result.density
    result.mask.check()
    assert torch.equal(whole.mask.to_dense(), result.mask.to_dense())


def test_large_masks_are_dropped_and_the_density_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "KEPT", 100)
    result = evolve(needing(), workspace=1).run(CALL)
    with pytest.raises(sp.MaskError, match=r"12 parts, and their masks were not kept.*workspace=None"):
        _ = result.mask
    assert 1.0 == result.density


def test_masks_that_a_cut_tears_apart_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "ROWS", 8)
    result = evolve(needing(grain=8), workspace=1).run(CALL)
    with pytest.raises(sp.MaskError, match="cannot be joined"):
        _ = result.mask
    assert 1.0 == result.density


def test_an_executor_may_write_into_the_output() -> None:
    @frozen
    class Into(Free):
        def execute_into(self, call: Any, plan: Any, out: Any, lse: Any) -> sp.Result:
            out.fill_(call.first_head)
            lse.zero_()
            return sp.Result(out, lse, plan)

    result = sp.Pipeline(Needs(1), executor=Into(), workspace=64 * 4).run(CALL)
    assert [0.0, 4.0, 8.0] == result.out[0, ::4, 5, 3].tolist()


def test_an_executor_that_returns_nonsense_is_named() -> None:
    @frozen
    class Wrong(Free):
        def execute(self, call: Any, plan: Any) -> Any:
            return 3

    with pytest.raises(sp.StageError, match=r"Wrong.execute\(\) returned int"):
        sp.Pipeline(Needs(1), executor=Wrong(), workspace=1).run(CALL)


def test_bounds_of_the_built_in_methods_are_numbers_and_grow_with_heads() -> None:
    for name in sp.methods():
        parameters: dict[str, Any] = {"clusters": "single"} if name == "share-prefill" else {}
        pipeline = sp.build(name, **parameters)
        assert pipeline.head_scope == ("group" if name in ("kascade", "rowmax") else "head")
        whole, part = (pipeline.bound(call) for call in (CALL, Part((0, 4), (0, 64)).of(CALL)))
        assert 0 < part <= whole


def test_union_profile_and_star_pass_the_scope_on() -> None:
    anchor, groups = sp.build("anchor-attention"), evolve(sp.build("bfla"), refiners=(sp.GqaUnion(),))
    assert "head" == sp.UnionEstimator(anchor, sp.build("streaming")).head_scope
    assert "group" == sp.UnionEstimator(anchor, groups).head_scope
    assert sp.UnionEstimator(anchor, sp.Pipeline(Estimate())).head_scope is None
    star = sp.build("star-attention", block_size=64, inner="anchor-attention")
    assert "head" == star.head_scope
    assert star.bound(CALL) > anchor.bound(CALL)


def test_values_may_be_as_wide_as_the_call_is_long() -> None:
    """And wider than keys: the output is as wide as they are."""
    base = make(16, heads=4, kv_heads=2)
    call = evolve(base, v=torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(0)))
    whole = sp.Pipeline(Needs(1), executor=Free())
    cut = evolve(whole, workspace=16 * 2)
    result = cut.run(call)
    assert result.parts is not None
    assert (1, 4, 16, 16) == tuple(result.out.shape)
    torch.testing.assert_close(whole.run(call).out, result.out)
