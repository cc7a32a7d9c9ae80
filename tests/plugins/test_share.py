"""Share: any method's masks, shared over clusters of heads and over layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from sparseprefill.plugins.share_prefill.stages import Share
from torch import Tensor

import sparseprefill as sp
from helpers.examples import few_calls, untied
from helpers.layers import Layers, calls, run
from helpers.stubs import Estimate
from oracles import share as oracle
from oracles.share_prefill import Parameters
from sparseprefill.testing import check_method, standard_calls
from sparseprefill.testing.inputs import tensors

ALL = {(layer, head): 0 for layer in range(3) for head in range(4)}
TABLES: list[dict[tuple[int, int], int]] = [
    ALL,
    {(layer, head): head % 2 for layer in range(3) for head in range(4)},
    {(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 2, (2, 0): 1, (2, 1): 0, (2, 2): 2, (1, 3): 2},
]
NOISE: dict[tuple[int, int], None] = dict.fromkeys(ALL)
SMALL = {name: dict(method.small) for name, method in sp.default_registry().methods().items()}
INNER: dict[str, dict[str, Any]] = {
    "tiles": {"method": "xattention", "parameters": {"stride": 4, "threshold": 0.5, "block": 16}},
    "finer tiles": {"method": "xattention", "parameters": {"stride": 4, "threshold": 0.5, "block": 8}},
    "coarser tiles": {"method": "bfla", "parameters": SMALL["bfla"] | {"block": 48, "tile": 48, "group": 8}},
    "tiles that do not divide": {"method": "streaming", "parameters": {"sink": 3, "window": 9, "block": 12}},
    "stripes": {"method": "vertical-slash", "parameters": {"gamma": 0.4, "block": 16}},
    "a carry": {"method": "anchor-attention", "parameters": SMALL["anchor-attention"]},
    "refined": {
        "method": "streaming",
        "parameters": {"sink": 4, "window": 8, "block": 8},
        "refiners": [{"name": "stride-rescue", "every": 3}, {"name": "gqa-union"}],
    },
    "a union": {"union": [{"method": "anchor-attention", "parameters": SMALL["anchor-attention"]},
                          {"method": "bfla", "parameters": SMALL["bfla"]}]},
}  # fmt: skip


def alike(seed: int, heads: tuple[int, int], q_len: int, kv_len: int, batch: int = 1, count: int = 3) -> Layers:
    """float64 q, k, v of some layers, whose heads look at one set of keys, some more and some less."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    topic, spots = random(8), torch.randint(kv_len, (max(1, kv_len // 8),), generator=generator)
    made = []
    for _ in range(count):
        q, k, v = (
            random(batch, heads[0], q_len, 8),
            random(batch, heads[1], kv_len, 8),
            random(batch, heads[1], kv_len, 6),
        )
        k[:, :, spots] += topic
        made.append((q + 3 * topic * torch.rand(heads[0], 1, 1, generator=generator), k, v))
    return made


CALLS = calls([(2, 1), (4, 2), (4, 4)], 130, 80, alike)


def masks(results: list[sp.Result]) -> list[Tensor]:
    return [result.mask.to_dense() for result in results]


def same(expected: list[sp.Result], found: list[sp.Result]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(masks(expected), masks(found), strict=True))


def shared(inner: Any, table: Any = "single", **more: Any) -> sp.Pipeline:
    made: sp.Pipeline = sp.build(
        "share-prefill",
        **({"clusters": table, "tau": 0.35, "delta": 0.6, "gamma": 0.6, "block": 16, "inner": inner} | more),
    )
    return made


PARAMETERS = st.builds(
    Parameters,
    gamma=st.floats(0.05, 0.99).filter(untied) | st.just(1.0),
    tau=st.sampled_from([0.2, 0.35, 0.6, 1.01]),
    delta=st.sampled_from([0.4, 0.6, 1.01]),
    block=st.sampled_from([8, 16, 24]),
)


@pytest.mark.parametrize("name", INNER)
@settings(max_examples=8, deadline=None)
@given(made=CALLS, p=PARAMETERS, table=st.sampled_from(TABLES))
def test_equals_the_oracle(name: str, made: tuple[Layers, dict[str, Any]], p: Parameters, table: Any) -> None:
    layers, options = made
    inner = masks(run(layers, sp.from_config(INNER[name]), **options))
    expected = oracle.share(layers, inner, table, p, **options)
    found = run(layers, shared(INNER[name], table, **vars(p)), **options)
    for truth, result in zip(expected, found, strict=True):
        assert torch.equal(truth.mask, result.mask.to_dense())
        torch.testing.assert_close(truth.out, result.out, rtol=1e-12, atol=1e-12)


def test_the_oracle_meets_every_pattern() -> None:
    """Else the comparison above would say little."""
    p = Parameters(gamma=0.6, tau=0.35, delta=0.6, block=16)
    found = set()
    for seed in range(4):
        layers = alike(seed, (4, 2), 130, 130)
        inner = masks(run(layers, sp.from_config(INNER["tiles"])))
        found |= {x for answer in oracle.share(layers, inner, TABLES[1], p) for x in answer.patterns[0]}
    assert found == {"dense", "shared", "vertical_slash"}


@settings(max_examples=25, deadline=None)
@given(made=CALLS, p=PARAMETERS, table=st.sampled_from(TABLES))
def test_share_prefill_is_share_over_vertical_slash(
    made: tuple[Layers, dict[str, Any]], p: Parameters, table: Any
) -> None:
    layers, options = made
    slash = {"method": "vertical-slash", "parameters": {"gamma": p.gamma, "block": p.block}}
    own, general = (run(layers, shared(inner, table, **vars(p)), **options) for inner in (None, slash))
    assert same(own, general)
    for a, b in zip(own, general, strict=True):
        torch.testing.assert_close(a.out, b.out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("more", [{"clusters": NOISE}, {"tau": 0.0}], ids=["noise", "tau=0"])
def test_without_sharing_the_plan_is_the_inner_methods_own(name: str, more: dict[str, Any]) -> None:
    layers = alike(1, (4, 2), 100, 100)
    expected, found = (run(layers, one) for one in (sp.from_config(INNER[name]), shared(INNER[name], **more)))
    assert same(expected, found)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a.out, b.out)
        assert (a.plan.carry is None) == (b.plan.carry is None)
        assert b.plan.probe is None


def test_noise_beside_a_cluster_keeps_the_inner_mask_and_its_carry() -> None:
    """Heads 2 and 3 belong to no cluster: nothing changes for them, and their carry is not computed again."""
    layers = alike(3, (4, 2), 130, 130)
    inner = run(layers, sp.from_config(INNER["a carry"]))
    table = {(layer, head): 0 for layer in range(3) for head in range(2)}
    found = run(layers, shared(INNER["a carry"], table, tau=1.01, delta=1.01))
    for layer, (a, b) in enumerate(zip(inner, found, strict=True)):
        assert torch.equal(a.mask.to_dense()[:, 2:], b.mask.to_dense()[:, 2:])
        assert a.plan.carry is not None
        assert b.plan.carry is not None
        region = b.plan.carry.region.to_dense()
        assert torch.equal(a.plan.carry.region.to_dense()[:, 2:], region[:, 2:])
        assert bool(region[:, layer == 0 : 2].any()) is (layer == 0 and bool(region[:, 1].any()))
        assert not region[:, 0].any()


def test_pivots_go_from_layer_to_layer_and_no_further() -> None:
    """Layer 0 runs one head dense; layers 1 and 2 share its tiles. Another chunk, or another memory, begins anew."""
    layers = alike(5, (2, 1), 128, 128)
    pipeline = shared("streaming", tau=1.01, delta=1.01)
    first, second, third = run(layers, pipeline)
    assert first.mask.head(0, 0).density == 1.0
    assert torch.equal(second.mask.to_dense(), third.mask.to_dense())
    assert torch.equal(second.mask.to_dense()[:, 0], second.mask.to_dense()[:, 1])
    memory = sp.Memory()
    for start, end in ((0, 64), (64, 128)):
        made = [
            pipeline.run(sp.AttentionCall(q[:, :, start:end], k[:, :, :end], v[:, :, :end], layer=i), memory)
            for i, (q, k, v) in enumerate(layers)
        ]
        assert made[0].mask.head(0, 0).density == 1.0
        assert made[1].density < 1.0


@pytest.mark.parametrize("name", INNER)
def test_parts_by_heads_decide_as_the_whole_layer(name: str) -> None:
    """Heads of a later part do not take the pivot that an earlier part of their own layer made."""
    layers = alike(7, (8, 4), 96, 96)
    pipeline = shared(INNER[name], tau=0.6, delta=1.01)
    whole, parts = run(layers, pipeline), run(layers, evolve(pipeline, workspace=1))
    assert all(result.parts is not None and result.parts.count > 1 for result in parts)
    assert same(whole, parts)
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a.out, b.out, rtol=1e-12, atol=1e-12)


NARROWING: dict[str, tuple[Any, ...]] = {
    "ceiling": (sp.BudgetCeiling(share=0.8),),
    "decay": (sp.PositionDecay(share=0.5),),
    "threshold": (sp.RelativeThreshold(0.5),),
    "threshold and tail": (sp.RelativeThreshold(0.5), sp.DenseRows(20)),
}


def united(*ones: sp.Pipeline, observed: bool = True) -> sp.Pipeline:
    observers = tuple(x for one in ones for x in one.observers) if observed else ()
    return sp.Pipeline(sp.UnionEstimator(*ones), observers=observers)


@pytest.mark.parametrize("inside", ["alone", "a union", "a union's part"])
@pytest.mark.parametrize("name", NARROWING)
@pytest.mark.parametrize("table", [TABLES[2], "single"], ids=["clusters", "single"])
def test_parts_by_heads_decide_as_the_whole_layer_where_refiners_narrow(name: str, inside: str, table: Any) -> None:
    """A head that ran dense and was narrowed makes no pivot; a later part of its layer still takes none for it."""
    layers, refiners = alike(7, (4, 2), 128, 128), NARROWING[name]
    pipeline, streaming = shared(None, table, tau=0.6, delta=1.01), sp.build("streaming", sink=4, window=8, block=16)
    if inside == "a union's part":
        pipeline = united(evolve(pipeline, refiners=refiners), streaming)
    else:
        pipeline = evolve(united(pipeline, streaming) if inside == "a union" else pipeline, refiners=refiners)
    assert pipeline.head_scope == "head"
    memories = sp.Memory(), sp.Memory()
    for start, end in ((0, 64), (64, 128)):
        chunk = [(q[:, :, start:end], k[:, :, :end], v[:, :, :end]) for q, k, v in layers]
        whole, parts = (
            run(chunk, evolve(pipeline, workspace=limit), memory)
            for limit, memory in zip((None, 1), memories, strict=True)
        )
        assert [result.parts.count for result in parts if result.parts is not None] == [4] * 3
        assert same(whole, parts)
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a.out, b.out, rtol=1e-12, atol=1e-12)


def test_without_its_observer_a_call_is_not_cut_by_heads() -> None:
    """Nothing would tell a part which heads before it ran dense."""
    layers, share, streaming = alike(7, (4, 2), 96, 96), shared(None, delta=1.01), sp.build("streaming")
    unobserved = united(share, streaming, observed=False)
    strange = evolve(unobserved, observers=shared(None).observers)
    for pipeline in (unobserved, strange, evolve(share, observers=()), shared(unobserved)):
        assert pipeline.head_scope is None
        assert same(run(layers, pipeline), run(layers, evolve(pipeline, workspace=1)))
    stage = share.estimator
    assert isinstance(stage, Share)
    assert sp.Pipeline(sp.UnionEstimator(stage, streaming), observers=(stage.observer,)).head_scope == "head"


def build(full: bool = False, **inner: Any) -> sp.Pipeline:
    """With every key: no head shares, and the inner method keeps all."""
    method = sp.default_registry().get("xattention")
    parameters = {**method.small, **((full and method.full) or {})}
    return shared({"method": "xattention", "parameters": parameters} | inner, tau=0.0 if full else 0.6)


@pytest.mark.parametrize("inner", [{}, {"refiners": [{"name": "stride-rescue", "every": 3}]}], ids=["plain", "refined"])
def test_every_law(inner: dict[str, Any]) -> None:
    report = check_method(partial(build, **inner), full={"full": True}, calls=few_calls())
    assert set(report.skipped) <= {"chunk invariance at the grain", "repeated == plain"}


def test_the_laws_meet_heads_that_share() -> None:
    call = max(standard_calls(), key=lambda one: one.q.shape[2])
    memory, pipeline, shares = sp.Memory(), build(), []
    stage = pipeline.estimator
    assert isinstance(stage, Share)
    for layer in range(2):
        result = pipeline.run(evolve(call, layer=layer), memory)
        shares.append(bool(result.plan.notes[stage.key].choice.share.any()))
    assert shares == [False, True]


def test_inner_is_a_name_a_table_a_pipeline_or_an_estimator() -> None:
    layers = alike(2, (4, 2), 110, 110)
    parameters = INNER["tiles"]["parameters"]
    pipeline = sp.build("xattention", **parameters)
    options: dict[str, Any] = {"clusters": ALL, "tau": 0.35, "delta": 0.6, "gamma": 0.6, "block": 16}
    expected = run(layers, shared(INNER["tiles"], ALL))
    for inner in (pipeline, pipeline.estimator, INNER["tiles"]):
        share = Share(inner=inner, **options)
        assert same(expected, run(layers, share.pipeline()))
        assert same(expected, run(layers, sp.Pipeline(share, observers=(share.observer,))))
    assert same(run(layers, shared(sp.build("dense"), ALL)), run(layers, shared("dense", ALL)))


def test_two_that_share_may_unite() -> None:
    """Each keeps its own pivots in one memory, under tables of different clusters."""
    layers = alike(4, (4, 2), 130, 130)
    ones = [shared(INNER["tiles"], TABLES[1]), shared(None, TABLES[2])]
    united = sp.Pipeline(sp.UnionEstimator(*ones), observers=tuple(x for one in ones for x in one.observers))
    alone = [masks(run(layers, one)) for one in ones]
    for a, b, found in zip(*alone, masks(run(layers, united)), strict=True):
        assert torch.equal(a | b, found)
    inner = Estimate(lambda call, memory: sp.UnionEstimator(ones[1]).estimate(call, memory))
    assert masks(run(layers, shared(sp.UnionEstimator(ones[1]), NOISE)))[0].any()
    assert run(layers, shared(inner, TABLES[1]))[2].density <= 1.0


def test_what_the_inner_method_objects_to_is_objected_to() -> None:
    q, k, v = alike(1, (2, 1), 40, 40, count=1)[0]
    pipeline = shared(Estimate(objection="no such calls"))
    with pytest.raises(sp.UnsupportedCallError, match="inner Estimate: Estimate: no such calls"):
        pipeline.run(sp.AttentionCall(q, k, v))


def test_the_scope_is_the_inner_methods() -> None:
    assert [shared(inner).head_scope for inner in (None, "streaming")] == ["head", "head"]
    grouped = {"method": "streaming", "refiners": [{"name": "gqa-union"}]}
    assert shared(grouped).head_scope == "group"
    assert shared(Estimate()).head_scope is None
    assert shared("streaming").grain is None


def test_each_head_has_the_scores_of_its_pattern() -> None:
    """A ceiling takes the inner method's worth for its heads, and the sample's for those that share."""
    layers = alike(3, (4, 2), 130, 130)
    table = {(layer, head): 0 for layer in range(3) for head in range(2)}
    inner = sp.from_config(INNER["tiles"])
    assert isinstance(inner, sp.Pipeline)
    call, memory = sp.AttentionCall(*layers[0]), sp.Memory()
    plain, mixed, own = (one.plan(call, memory).priority for one in (inner, shared(inner, table), shared(None, table)))
    assert plain is not None
    assert mixed is not None
    assert own is not None
    scores = [one.tile_scores(call, 16, 16) for one in (plain, mixed, own)]
    assert torch.equal(scores[0][:, 1:], scores[1][:, 1:])
    assert torch.equal(scores[2][:, 0], scores[1][:, 0])
    at = torch.tensor([[20, 100]])
    columns = [one.column_scores(call, at, slice(0, 4)) for one in (plain, mixed, own)]
    assert torch.equal(columns[0][:, 1:], columns[1][:, 1:])
    assert torch.equal(columns[2][:, 0], columns[1][:, 0])
    unknown = shared(Estimate(), table).plan(call, memory).priority
    assert unknown is not None
    assert bool(unknown.tile_scores(call, 16, 16)[:, 1:].isnan().all())


def on_the_gpu(inner: Any, dtype: torch.dtype, more: dict[str, Any]) -> tuple[sp.Pipeline, list[sp.AttentionCall]]:
    """A pipeline whose heads all share, and two layers of one prompt."""
    shape: dict[str, Any] = {"batch": 1, "heads": 8, "kv_heads": 2, "head_dim": 64} | more
    q, k, v = tensors("sink", dtype=dtype, **shape)
    return shared(inner, tau=1.01, delta=1.01), [sp.AttentionCall(q, k, v, layer=layer) for layer in range(2)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in INNER if name not in ("coarser tiles", "tiles that do not divide")])
def test_masks_on_the_gpu_are_those_of_the_cpu(name: str) -> None:
    pipeline, calls = on_the_gpu(INNER[name], torch.float32, {"q_len": 290, "kv_len": 353, "batch": 2})
    pipeline = evolve(pipeline, executor=sp.ReferenceExecutor())  # of tiles of any size
    here, there = sp.Memory(), sp.Memory()
    for call in calls:
        expected = pipeline.run(call, here).mask.to_dense()
        moved = evolve(call, q=call.q.cuda(), k=call.k.cuda(), v=call.v.cuda())
        found = pipeline.run(moved, there).mask.to_dense().cpu()
        assert int((expected ^ found).sum()) <= 1e-2 * int(expected.sum())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*[Ss]ynchroniz.*:UserWarning")
@pytest.mark.parametrize("inner", [None, "xattention", "anchor-attention", "vertical-slash", "streaming"])
def test_the_host_waits_for_nothing(inner: str | None) -> None:
    pipeline, calls = on_the_gpu(
        inner, torch.bfloat16, {"q_len": 4096, "kv_len": 4096, "head_dim": 128, "device": "cuda"}
    )
    for mode in ("default", "error"):
        memory = sp.Memory()
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode(mode)
            for call in calls:
                pipeline.run(call, memory)
        finally:
            torch.cuda.set_sync_debug_mode("default")
