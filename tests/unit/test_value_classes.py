"""What holds tensors is itself alone, plain data compares by value, and what is named cannot be counted off."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from sparseprefill.adapters.session import ledger, session, watch
from sparseprefill.adapters.session.ledger import LayerRecord, Uncounted
from sparseprefill.adapters.session.report import LayerRecall, LayerReport, Report
from sparseprefill.adapters.session.session import Prefill
from sparseprefill.plugins.stem import values

import sparseprefill as sp
from helpers import tables
from helpers.build import make
from helpers.stubs import Estimate
from sparseprefill.breakeven.gate import AutoGate, Unmeasured
from sparseprefill.breakeven.points import DeviceKind, HeadShape, MethodTime, Point, Sizes
from sparseprefill.breakeven.table import BreakEven
from sparseprefill.executors import cpu
from sparseprefill.mask import count, export, samples
from sparseprefill.mask.lists import IndexLists
from sparseprefill.mask.priority import BestOf, PriorityScores
from sparseprefill.mask.samples import Stretches
from sparseprefill.mask.tile_map import TileMap
from sparseprefill.plan import Carry, Parts, Plan, Planned, Result, Skipped, SoftmaxState
from sparseprefill.refiners import budget, narrow
from sparseprefill.refiners.budget import Tiles, _Maker
from sparseprefill.refiners.recall import SampledRecall
from sparseprefill.route import Choice, Route
from sparseprefill.stages import ExecutorStage, Guard, Stage
from sparseprefill.union import UnionEstimator

CALL = make(8)
MASK = sp.SparseMask.full(CALL, 4)
LISTS = IndexLists.full(CALL.geometry, 4, 4)
PIPELINE = sp.Pipeline(Estimate())
ALL = torch.ones(1, 2, 2, 2) > 0
TILES = Tiles(4, 4, ALL, ALL, torch.ones(1, 2, 2, 2), torch.ones(1, 2, 2))
STATE = SoftmaxState.empty((1, 2, 8), 8, torch.float32, torch.device("cpu"))
PLAN = Plan(MASK)
MEMORY = sp.Memory()

ALONE: dict[str, Callable[[], Any]] = {
    "Geometry": lambda: attrs.evolve(CALL.geometry),
    "IndexLists": lambda: attrs.evolve(LISTS),
    "TileMap": lambda: TileMap(geometry=CALL.geometry, tile_q=4, tile_k=4, sink=1),
    "SparseMask": lambda: sp.SparseMask(CALL.geometry, 4, 4, LISTS),
    "Carry": lambda: Carry(STATE, MASK),
    "Plan": lambda: Plan(MASK),
    "Parts": lambda: Parts(CALL.geometry, 1, STATE.m),
    "Result": lambda: Result(STATE.acc, STATE.m, PLAN),
    "Pipeline": lambda: sp.Pipeline(PIPELINE.estimator, (), PIPELINE.executor),
    "UnionEstimator": lambda: UnionEstimator(PIPELINE),
    "Route": lambda: Route("one", (PIPELINE,)),
    "Choice": lambda: Choice(PIPELINE),
    "Stage": lambda: Stage.of(PIPELINE.estimator),
    "ExecutorStage": lambda: ExecutorStage.of(PIPELINE.executor),
    "AutoGate": AutoGate,
    "Prefill": lambda: attrs.evolve(Prefill(), serial=1, memory=MEMORY),
    "Uncounted": lambda: Uncounted(CALL.geometry),
    "LayerRecord": lambda: LayerRecord(1),
    "_Maker": lambda: _Maker(CALL, PLAN, TILES, 4, 4, 8),
}


@pytest.mark.parametrize("build", ALONE.values(), ids=ALONE)
def test_one_made_alike_is_another(build: Callable[[], Any]) -> None:
    """Values on a device are not compared, so that they serve as keys and in sets without a wait."""
    one, other = build(), build()
    assert one != other
    assert 2 == len({one, other, one})


KINDS = (
    *(count.Lists, count._Rows, export.Selection, export._Cells, export._Seen),
    *(values.WeightedPriority, values._Norms),
    *(samples.KeptKeys, cpu._Row, cpu._Entries, PriorityScores, BestOf),
    *(
        SampledRecall,
        Stretches,
        narrow.Choice,
        Tiles,
        budget._Order,
        budget._Table,
        values.WeightedPriority,
        values._Norms,
    ),
    *(Planned, Skipped, Guard, watch._Kept, watch._Coming, watch.RecallWatch, ledger.Room),
    session._Waiting,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_tensors_are_compared_by_nobody(kind: type) -> None:
    """Equality by value would ask the device, or fail for more than one number."""
    for name in ("__eq__", "__hash__"):
        assert getattr(object, name) is getattr(kind, name)


POINT = Point(queries=8, keys=8, dense=1.0)
NAMED: list[tuple[type, dict[str, Any]]] = [
    (DeviceKind, {"type": "cpu"}),
    (MethodTime, {"seconds": 1.0, "estimate": 0.5, "density": 0.5}),
    (Point, {"queries": 8, "keys": 8, "dense": 1.0}),
    (HeadShape, {"heads": 1, "kv_heads": 1, "head_dim": 8, "dtype": "float32", "points": (POINT,)}),
    (Sizes, {"heads": 1, "kv_heads": 1, "head_dim": 8, "dtype": "float32", "queries": 8, "keys": 8}),
    (BreakEven, {"device": DeviceKind(type="cpu"), "shapes": ()}),
    (sp.BudgetFloor, {"tiles": 1}),
    (sp.BudgetCeiling, {"tiles": 1}),
    (sp.PositionDecay, {"tiles": 1}),
    (LayerReport, {"layer": 1}),
    (Report, {"method": "m", "host": "h", "implementation": "i", "min_query": 16}),
]


@pytest.mark.parametrize(("kind", "fields"), NAMED, ids=lambda one: getattr(one, "__name__", ""))
def test_plain_data_is_equal_by_value_and_given_by_name(kind: type, fields: dict[str, Any]) -> None:
    assert kind(**fields) == kind(**fields)
    with pytest.raises(TypeError, match="positional"):
        kind(*fields.values())


@pytest.mark.parametrize("kind", [sp.LocalBand, sp.Sink, sp.StrideRescue, sp.DenseRows])
def test_the_tile_of_a_refiner_is_given_by_name(kind: Any) -> None:
    assert 16 == kind(2, tile=16).tile
    before = (2, 0) if kind is sp.StrideRescue else (2,)
    with pytest.raises(TypeError, match="positional"):
        kind(*before, 16)  # pyright: ignore[reportCallIssue]


def test_the_tile_of_a_random_rescue_is_given_by_name() -> None:
    assert sp.RandomRescue(0.5, tile=4).refine(CALL, PLAN, MEMORY).mask.tile_q == 4
    with pytest.raises(TypeError, match="positional"):
        sp.RandomRescue(0.5, 0, 16)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "build",
    [
        lambda: IndexLists(LISTS.counts, LISTS.offsets, LISTS.indices, True),  # type: ignore[call-arg]
        lambda: sp.SparseMask(CALL.geometry, 4, 4, LISTS, 1, None, True),  # type: ignore[call-arg]
        lambda: TileMap(CALL.geometry, 4, 4),  # type: ignore[call-arg]
        lambda: Plan(MASK, None, None),  # type: ignore[call-arg]
        lambda: Plan(MASK, None, None, None),  # type: ignore[call-arg]
        lambda: Result(STATE.acc, STATE.m, PLAN, None, None),  # type: ignore[call-arg]
        lambda: sp.Pipeline(Estimate(), (), PIPELINE.executor, (), "name", None),  # type: ignore[call-arg]
    ],
    ids=["IndexLists", "SparseMask", "TileMap", "Plan", "Plan of four", "Result", "Pipeline"],
)
def test_what_is_given_by_name(build: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match="positional"):
        build()


def test_figures_can_be_keys() -> None:
    """Mappings among them are left out of the hash."""
    table = BreakEven(device=DeviceKind(type="cpu"), shapes=(), versions={"torch": "2"}, measured={"repeats": 3})
    assert {POINT: 1, table: 2} == {attrs.evolve(POINT): 1, attrs.evolve(table): 2}


def test_what_is_kept_on_the_way_is_neither_given_nor_shown() -> None:
    found = tables.from_length(512)
    before = (repr(found), repr(PIPELINE), repr(AutoGate()))
    assert not [word for word in ("lines",) if word in before[0]]
    assert not [word for word in ("planning", "executing", "observing") if word in before[1]]
    assert "tables" not in before[2]
    assert AutoGate().judge(CALL, "streaming").reason
    assert found.judge(make(64, heads=4, kv_heads=2), "streaming").worth in (True, False)
    assert found._lines
    assert found == tables.from_length(512)
    for kind, names in (
        (BreakEven, ("lines",)),
        (sp.Pipeline, ("planning", "executing", "observing")),
        (AutoGate, ("tables",)),
    ):
        given = {one.alias for one in attrs.fields(kind) if one.init}
        assert not given & set(names)


@pytest.mark.parametrize("kind", [sp.AutoExecutor, sp.ReferenceExecutor])
def test_executors_are_equal_by_value_and_stay_as_they_are(kind: Any) -> None:
    assert kind() == kind()
    assert kind().unsupported(CALL) is None
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        kind().precise = True


def test_defaults() -> None:
    assert not MASK.disjoint
    assert not IndexLists.from_map(torch.ones(1, 2, 2, 2) > 0).same_heads
    assert not LayerRecord(1).lost
    assert "pipeline" == PIPELINE.name
    assert "auto" == PIPELINE.workspace


WORKING = (PriorityScores, values.WeightedPriority, AutoGate, BreakEven, sp.Pipeline, cpu._Row)


@pytest.mark.parametrize("kind", [*WORKING, watch.RecallWatch], ids=lambda kind: kind.__name__)
def test_private_fields_are_not_given(kind: Any) -> None:
    private = [one for one in attrs.fields(kind) if one.name.startswith("_")]
    assert private
    assert not [one.name for one in private if one.init]
    if kind in WORKING[:-1]:
        assert not [one.name for one in private if one.repr]


def test_counts_begin_at_nothing() -> None:
    for kind, names in ((watch.RecallWatch, {"prefills", "measured", "coming"}), (Prefill, {"watched"})):
        assert not names & {one.name for one in attrs.fields(kind) if one.init}
    found = watch.RecallWatch("m", 2)
    assert (0, 0, 0) == (found.prefills, found.measured, len(found.coming))
    assert Prefill().watched is None


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (sp.RecallFloor, {"target", "rows", "span"}),
        (LayerRecall, {"mean", "low_calls"}), (PriorityScores, {"tile_q", "tiles"}),
        (Unmeasured, {"keys", "work"}), (sp.RelativeThreshold, {"sink", "local"}), (sp.SkipSoftmax, {"grain"}),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)  # fmt: skip
def test_what_can_be_mixed_up_is_given_by_name(kind: Any, names: set[str]) -> None:
    assert names <= {one.name for one in attrs.fields(kind) if one.kw_only}
