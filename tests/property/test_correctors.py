"""Proxy and Delta against their oracles, and their laws on any plan."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.delta import corrector as delta
from sparseprefill.plugins.proxy import corrector as proxy
from torch import Tensor

import sparseprefill as sp
from helpers.build import int32, make
from helpers.examples import few_calls, few_of
from helpers.plans import KINDS, plans, whole
from oracles import correct as oracle
from sparseprefill.testing import calls, check_method, masks
from sparseprefill.testing.truth import attention, difference

DATA = st.data()
CALLS = calls(max_len=70, max_heads=4, groups=(1, 2, 4), head_dims=(2,), max_batch=2)
LENGTHS = (1, 2, 127, 128, 129, 131, 257)
REFERENCE = sp.ReferenceExecutor()
CORRECTORS = {"proxy": sp.Proxy(), "proxy of 4": sp.Proxy(tile=4), "delta": sp.Delta(gamma=4)}


def corrected(corrector: sp.Corrector, call: sp.AttentionCall, plan: sp.Plan) -> sp.Result:
    """What is made of the reference's result, whose LSE and plan stay."""
    before = REFERENCE.execute(call, plan)
    after = corrector.correct(call, plan, before, sp.Memory())
    assert after.lse is before.lse
    assert after.plan is before.plan
    assert after.out.dtype == call.q.dtype
    return after


def same(expected: Tensor, actual: Tensor) -> None:
    message = difference(expected, actual, torch.float32)
    assert message is None, message


def held_by_tiles(plan: sp.Plan) -> Tensor:
    """bool ``[B, Hq, Nq, Nkv]``: pairs of the tiles of all masks of a plan."""
    masks = [plan.mask] if plan.carry is None else [plan.mask, plan.carry.region]
    found = [evolve(mask, stripes=None, group=1).to_dense() for mask in masks]
    return found[0] if len(found) == 1 else found[0] | found[1]


def tile_of(plan: sp.Plan) -> int:
    """The key tile of all masks of a plan."""
    sizes = [plan.mask.tile_k] + ([] if plan.carry is None else [plan.carry.region.tile_k])
    return math.gcd(*sizes)


def drawn_plan(data: st.DataObject, call: sp.AttentionCall) -> sp.Plan:
    plan: sp.Plan = data.draw(plans(call, kinds=KINDS))
    return plan


@settings(max_examples=60)
@given(call=CALLS, data=DATA)
def test_proxy_is_its_oracle(call: sp.AttentionCall, data: st.DataObject) -> None:
    plan = drawn_plan(data, call)
    own = tile_of(plan)
    tile = data.draw(st.sampled_from([None, *(n for n in (1, 2, 4, 8) if own % n == 0)]))
    expected = oracle.proxy(call, whole(plan), held_by_tiles(plan), tile or own)
    same(expected, corrected(sp.Proxy(tile=tile), call, plan).out)


@settings(max_examples=60)
@given(call=CALLS, data=DATA, gamma=st.integers(1, 80))
def test_delta_is_its_oracle(call: sp.AttentionCall, data: st.DataObject, gamma: int) -> None:
    plan = drawn_plan(data, call)
    same(oracle.delta(call, whole(plan), gamma), corrected(sp.Delta(gamma=gamma), call, plan).out)


@pytest.mark.parametrize("corrector", [sp.Proxy(tile=1), sp.Delta(gamma=1)], ids=str)
@given(call=CALLS, data=DATA)
def test_one_key_a_tile_or_every_row_is_dense_attention(
    corrector: sp.Corrector, call: sp.AttentionCall, data: st.DataObject
) -> None:
    same(attention(call)[0], corrected(corrector, call, drawn_plan(data, call)).out)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("corrector", [sp.Proxy(tile=1), sp.Delta(gamma=1)], ids=str)
def test_the_same_at_lengths_around_a_tile(corrector: sp.Corrector, length: int) -> None:
    call = make(length, heads=4, kv_heads=2)
    for pipeline in (sp.build("streaming", sink=1, window=1, block=16), sp.build("vertical-slash")):
        result = pipeline.with_corrector(corrector).run(call)
        same(attention(call)[0], result.out)


@pytest.mark.parametrize("corrector", CORRECTORS.values(), ids=CORRECTORS)
@given(call=CALLS, data=DATA)
def test_a_full_mask_keeps_every_bit(corrector: sp.Corrector, call: sp.AttentionCall, data: st.DataObject) -> None:
    plan = sp.Plan(data.draw(masks(call, kinds=["full"])))
    assert torch.equal(REFERENCE.execute(call, plan).out, corrected(corrector, call, plan).out)


@given(call=CALLS, data=DATA)
def test_proxies_never_overstate_what_was_left_out(call: sp.AttentionCall, data: st.DataObject) -> None:
    """Jensen's inequality: beside a sink, values of one add up to a row's mass. It needs logits without a softcap."""
    sinks = torch.zeros(call.q.shape[1])
    call = evolve(call, softcap=None, sinks=sinks, v=torch.ones_like(call.v))
    plan = drawn_plan(data, call)
    mass = corrected(sp.Proxy(), call, plan).out
    assert bool((mass >= REFERENCE.execute(call, plan).out - 1e-5).all())
    assert bool((mass <= attention(call)[0] + 1e-5).all())


@pytest.mark.parametrize(
    "name", few_of(["streaming", "bfla", "vertical-slash", "anchor-attention"], ["anchor-attention"])
)
@pytest.mark.parametrize("corrector", [CORRECTORS["proxy of 4"], CORRECTORS["delta"]], ids=["proxy of 4", "delta"])
def test_methods_keep_their_contracts(corrector: sp.Corrector, name: str) -> None:
    """Padding, chunks at the grain, parts by heads, and dense at the full parameters; of the mask all others."""

    def build(full: bool = False) -> sp.Pipeline:
        method = sp.default_registry().get(name)
        return method.pipeline(**{**method.small, **(method.full if full else {})}).with_corrector(corrector)

    report = check_method(build, calls=few_calls(), full={"full": True})
    assert set(report.cases) >= {"causality", "batch rows independent", "full mask == dense", "no NaN for finite input"}


@pytest.mark.parametrize("corrector", CORRECTORS.values(), ids=CORRECTORS)
@given(call=CALLS, data=DATA)
def test_rows_do_not_feel_what_comes_after_them(
    corrector: sp.Corrector, call: sp.AttentionCall, data: st.DataObject
) -> None:
    """With one plan: other numbers, or NaN, in queries, keys and values from a token on."""
    plan = data.draw(plans(call, kinds=KINDS, carry=False))
    offset = call.kv_len - call.q.shape[2] if call.q_offset is None else call.q_offset
    row = data.draw(st.integers(0, call.q.shape[2]), label="first row that changes")
    value = data.draw(st.sampled_from([torch.nan, torch.inf, 7.0]))

    def changed(x: Tensor, first: int) -> Tensor:
        return torch.cat([x[:, :, :first], torch.full_like(x[:, :, first:], value)], 2)

    k, v = (changed(x, row + offset) for x in (call.k, call.v))
    after = evolve(call, q=changed(call.q, row), k=k, v=v)
    before = corrected(corrector, call, plan).out
    same(before[:, :, :row].double(), corrected(corrector, after, plan).out[:, :, :row])


@pytest.mark.parametrize("corrector", [sp.Proxy(), sp.Delta(gamma=64)], ids=str)
def test_chunks_at_the_grain_change_nothing(corrector: sp.Corrector) -> None:
    pipeline = sp.build("streaming", sink=64, window=64, block=32).with_corrector(corrector)
    grain = pipeline.grain
    assert grain is not None
    call = make(397, heads=4, kv_heads=2)
    together = pipeline.run(call).out
    assert not torch.equal(together, pipeline.with_corrector(None).run(call).out)
    for cut in (grain, 64, 192, 384):
        if cut % grain:
            continue
        first = evolve(call, q=call.q[:, :, :cut], k=call.k[:, :, :cut], v=call.v[:, :, :cut])
        second = evolve(call, q=call.q[:, :, cut:])
        same(together.double(), torch.cat([pipeline.run(first).out, pipeline.run(second).out], 2))


@pytest.mark.parametrize("corrector", CORRECTORS.values(), ids=CORRECTORS)
def test_recall_says_what_the_mask_kept(corrector: sp.Corrector) -> None:
    call, pipeline = make(300, heads=4, kv_heads=2), sp.build("streaming", sink=16, window=16, block=16)
    alone, result = pipeline.run(call), pipeline.with_corrector(corrector).run(call)
    assert not torch.equal(alone.out, result.out)
    assert torch.equal(sp.recall(call, alone), sp.recall(call, result))
    assert alone.density == result.density
    assert (alone.corrected, result.corrected) == ("", type(corrector).__name__)


@pytest.mark.parametrize("corrector", CORRECTORS.values(), ids=CORRECTORS)
@pytest.mark.parametrize("name", ["streaming", "vertical-slash", "anchor-attention"])
def test_parts_are_corrected_as_the_whole(corrector: sp.Corrector, name: str) -> None:
    pipeline = sp.build(name, **sp.default_registry().get(name).small).with_corrector(corrector)
    call = make(4200, heads=4, kv_heads=2)
    whole_, cut = (evolve(pipeline, workspace=limit).run(call) for limit in (None, 1 << 20))
    assert cut.parts is not None
    assert cut.parts.count > 1
    assert cut.corrected == whole_.corrected
    same(whole_.out.double(), cut.out)
    same(whole_.lse.double(), cut.lse)


@pytest.mark.parametrize("corrector", CORRECTORS.values(), ids=CORRECTORS)
def test_a_few_rows_at_a_time_are_the_whole(corrector: sp.Corrector, monkeypatch: pytest.MonkeyPatch) -> None:
    call = make(300, heads=4, kv_heads=2)
    pipeline = sp.build("vertical-slash", **sp.default_registry().get("vertical-slash").small).with_corrector(corrector)
    expected = pipeline.run(call).out
    for module in (delta, proxy):
        monkeypatch.setattr(module, "ENTRIES_ON_CPU", 3 * 4 * 304)
    same(expected.double(), pipeline.run(call).out)


def test_a_head_without_numbers_takes_nothing_from_another() -> None:
    """Delta of a row whose query is NaN in one head alone."""
    call, bare = make(100), sp.build("streaming", sink=8, window=8, block=8)
    pipeline = evolve(bare, executor=REFERENCE, corrector=sp.Delta(gamma=16))
    q = call.q.clone()
    q[0, 0, 48] = torch.nan
    expected, found = pipeline.run(call).out, pipeline.run(evolve(call, q=q)).out
    assert torch.equal(expected[0, 1], found[0, 1])
    assert bool(torch.isfinite(found[0, 0, 49:]).all())


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("corrector", CORRECTORS.values(), ids=CORRECTORS)
def test_what_is_not_finite_is_not_given_back(corrector: sp.Corrector, name: str) -> None:
    """Rows that leave it out stay finite, as they do without a corrector; so do rows that cannot see it."""
    call, pipeline = make(200), sp.build("streaming", sink=8, window=8, block=8)
    part = "k" if name == "keys" else "v"
    bad = getattr(call, part).clone()
    bad[:, :, 100] = torch.nan
    spoilt = evolve(call, **{part: bad})
    alone = pipeline.run(spoilt)
    assert not torch.equal(alone.out[:, :, :80], pipeline.with_corrector(corrector).run(spoilt).out[:, :, :80])
    assert torch.equal(torch.isfinite(alone.out), torch.isfinite(pipeline.with_corrector(corrector).run(spoilt).out))


@pytest.mark.parametrize("corrector", CORRECTORS.values(), ids=CORRECTORS)
@pytest.mark.parametrize("fields", [{"starts": int32(0, 33)}, {"lengths": int32(150, 97)}], ids=str)
def test_padding_is_never_seen(corrector: sp.Corrector, fields: dict[str, Any]) -> None:
    call = make(150, batch=2, heads=4, kv_heads=2, **fields)
    pipeline = sp.build("streaming", sink=8, window=8, block=8).with_corrector(corrector)
    together = pipeline.run(call).out
    first, behind = (33, 150) if "starts" in fields else (0, 97)
    alone = sp.AttentionCall(*(x[1:, :, first:behind] for x in (call.q, call.k, call.v)))
    same(pipeline.run(alone).out[0].double(), together[1, :, first:behind])
    padding = torch.cat([together[1, :, :first], together[1, :, behind:]], 1)
    assert not bool(padding.any())


def test_a_route_gives_its_corrector_to_every_pipeline() -> None:
    made = sp.Route.of(sp.build("streaming")).with_corrector(sp.Delta())
    assert made.corrects
    assert [one.corrector for one in made.known] == [sp.Delta()]
    assert made.with_corrector(None).corrects is False


def test_the_workspace_of_delta_has_room_for_the_values_that_it_widens() -> None:
    """The more KV heads and keys, the more; the queries are the same."""
    call, wider, longer = make(8, 4096, heads=8), make(8, 4096, heads=8, kv_heads=8), make(8, 8192, heads=8)
    found, wide, long = (sp.Delta().workspace(one) for one in (call, wider, longer))
    one = call.v[:, :1].numel() * 4
    assert found >= one
    assert wide - found >= 7 * one
    assert long - found >= one
