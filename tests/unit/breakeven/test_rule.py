"""The rule from measured sizes to any size, figure by figure, and what tables and points say."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from attrs import evolve

import sparseprefill as sp
from helpers.build import make
from helpers.tables import SHAPE, point, shape_of, table, whole
from sparseprefill.breakeven import points as rule
from sparseprefill.breakeven.gate import NOTHING_KNOWN, RULES
from sparseprefill.breakeven.points import (
    GAIN,
    MOST,
    TELLING,
    UNSURE,
    DeviceKind,
    Line,
    MethodTime,
    Point,
    Sizes,
    between,
    nearest,
    pairs,
    ratio_of,
    too_dense,
)
from sparseprefill.breakeven.table import BELOW, BreakEven, Verdict, device_kind
from sparseprefill.structure import structure

WHOLE = Line(None, (100, 400), (2.0, 0.5))
CHUNK = Line(50, (100, 400), (3.0, 1.0))


def test_constants_that_pages_and_tables_rely_on() -> None:
    assert (0.95, 0.5, 32768, 2**40) == (GAIN, UNSURE, TELLING, MOST)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (4, 9), (9, 9)])
def test_pairs_are_those_of_the_last_queries(queries: int, keys: int) -> None:
    assert sum(range(keys - queries + 1, keys + 1)) == pairs(queries, keys)


def test_a_power_law_meets_its_points_and_their_geometric_middle() -> None:
    assert pytest.approx(3.0) == between(2, 2, 8, 3, 12)
    assert pytest.approx(12.0) == between(8, 2, 8, 3, 12)
    assert pytest.approx(6.0) == between(4, 2, 8, 3, 12)
    assert pytest.approx(24.0) == between(16, 2, 8, 3, 12)


@pytest.mark.parametrize(
    ("line", "keys", "expected"),
    [
        (WHOLE, 400, 0.5),
        (WHOLE, 9999, 0.5),
        (WHOLE, 100, 2.0),
        (WHOLE, 200, 1.0),
        (WHOLE, 50, 2.0 / (1275 / 5050)),
        (WHOLE, 99, 2.0 / (4950 / 5050)),
        (CHUNK, 80, 3.0 / ((80 * 50 - 50 * 49 / 2) / (100 * 50 - 50 * 49 / 2))),
        (CHUNK, 200, 3.0**0.5),
    ],
)
def test_a_line_at_any_length(line: Line, keys: int, expected: float) -> None:
    assert pytest.approx(expected) == line.at(keys)


@pytest.mark.parametrize(
    ("queries", "keys", "expected"),
    [
        (50, 400, 1.0),
        (400, 400, 0.5),
        (25, 400, pairs(50, 400) / pairs(25, 400)),
        (200, 400, math.exp(math.log(0.5) * math.log(200 / 50) / math.log(400 / 50))),
        (50, 50, 2.0 * pairs(100, 100) / pairs(50, 50)),
        (20, 40, 2.0 * pairs(100, 100) / pairs(40, 40) * pairs(40, 40) / pairs(20, 40)),
    ],
)
def test_rows_between_the_lines(queries: int, keys: int, expected: float) -> None:
    assert pytest.approx(expected) == rule._by_rows((CHUNK, WHOLE), queries, keys)


def test_a_chunk_as_long_as_the_prompt_is_the_prompt() -> None:
    assert pytest.approx(WHOLE.at(50)) == rule._by_rows((CHUNK, WHOLE), 50, 50)
    assert pytest.approx(CHUNK.at(101) * pairs(50, 101) / pairs(1, 101)) == rule._by_rows((CHUNK, WHOLE), 1, 101)


def test_chunks_count_from_the_keys_on_that_they_were_measured_with() -> None:
    """Below, a call lies between fewer rows and whole prompts; and without either it is charged the whole prompt."""
    longer = Line(150, (300, 400), (2.0, 0.6))
    along = (CHUNK, longer, WHOLE)
    for queries in (60, 150, 200):
        assert rule._by_rows((CHUNK, WHOLE), queries, 299) == rule._by_rows(along, queries, 299)
    assert pytest.approx(2.0) == rule._by_rows(along, 150, 300)
    assert pytest.approx(between(100, 50, 150, CHUNK.at(300), 2.0)) == rule._by_rows(along, 100, 300)
    assert pytest.approx(between(200, 150, 400, 0.6, 0.5)) == rule._by_rows(along, 200, 400)
    assert pytest.approx(WHOLE.at(99) * pairs(99, 99) / pairs(60, 99)) == rule._by_rows(along, 60, 99)


def test_a_line_of_fewer_rows_that_begins_later_is_not_taken_for_another() -> None:
    """As where two runs of `calibrate` were joined, with other chunks behind other contexts."""
    along = (Line(20, (300, 400), (9.0, 8.0)), CHUNK, WHOLE)
    assert pytest.approx(CHUNK.at(200)) == rule._by_rows(along, 50, 200)
    for queries in (30, 50, 120):
        assert rule._by_rows((CHUNK, WHOLE), queries, 299) == rule._by_rows(along, queries, 299)


def test_a_smaller_call_is_charged_the_measured_heads() -> None:
    shape = shape_of(point(100, 100, streaming=0.5))
    for sizes, factor in (
        ({}, 1.0),
        ({"heads": 2, "kv_heads": 1}, 2.0),
        ({"heads": 8, "kv_heads": 4}, 1.0),
        ({"heads": 2, "kv_heads": 1, "batch": 2}, 1.0),
        ({"heads": 1, "kv_heads": 1, "batch": 2, "head_dim": 4}, 4.0),
    ):
        found = ratio_of(shape, rule.lines(shape, "streaming"), sized(**sizes))
        assert pytest.approx(0.5 * factor) == found
    assert ratio_of(shape, (), sized()) is None


def sized(**changes: Any) -> Sizes:
    return Sizes(**{**SHAPE, "queries": 100, "keys": 100, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0),
        ({"heads": 8, "kv_heads": 4}, 1),
        ({"head_dim": 32}, 2),
        ({"kv_heads": 4}, 3),
        ({"dtype": "float64"}, 4),
        ({"dtype": "float16"}, None),
        ({"dtype": "int8"}, None),
        ({"batch": 2}, 1),
        ({"heads": 6, "kv_heads": 3}, 1),  # 4 and 8 are not as near: log2(8 / 6) < log2(6 / 4)
        ({"head_dim": 16}, 0),
    ],
)
def test_the_nearest_shape(changes: dict[str, Any], expected: int | None) -> None:
    shapes = [
        shape_of(point(100, 100), **more)
        for more in ({}, {"heads": 8, "kv_heads": 4}, {"head_dim": 32}, {"kv_heads": 4}, {"dtype": "float64"})
    ]
    found = nearest(shapes, sized(**changes))
    assert (None if expected is None else shapes[expected]) is found


def test_a_shape_that_knows_the_method_goes_before_a_nearer_one() -> None:
    """A table may hold shapes of which a few methods alone were timed."""
    near, far = shape_of(point(100, 100, one=0.7)), shape_of(point(100, 100, one=0.7, other=0.7), heads=64, kv_heads=8)
    found = [nearest([near, far], sized(), method) for method in ("one", "other", "nobody knows it")]
    assert [one is near for one in found] == [True, False, True]


def test_of_two_as_near_the_smaller_judges() -> None:
    small, large = (shape_of(point(100, 100), heads=heads, kv_heads=heads // 2) for heads in (4, 16))
    for order in ([small, large], [large, small]):
        assert nearest(order, sized(heads=8, kv_heads=4)) is small


def test_head_width_counts_with_heads_and_half_of_the_group() -> None:
    """Distances in powers of two: width 1 + heads 0, against heads 1, against group 1 / 2."""
    base = {"heads": 8, "kv_heads": 8, "head_dim": 8, "dtype": "float32"}
    by_group, by_heads, by_width = (
        shape_of(point(100, 100), **{**base, **more})
        for more in ({"kv_heads": 4}, {"heads": 16, "kv_heads": 16}, {"head_dim": 32})
    )
    assert nearest([by_width, by_heads, by_group], sized(**base)) is by_group
    assert nearest([by_width, by_heads], sized(**base)) is by_heads
    assert (2.0, 0.0) == rule._distance(by_width, sized(**base))
    assert (1.0, 1.0) == rule._distance(by_heads, sized(**base))
    assert (0.5, 0.0) == rule._distance(by_group, sized(**base))
    assert (1.0, 0.0) == rule._distance(by_heads, sized(**{**base, "batch": 4}))
    assert (1.0, 0.0) == rule._distance(shape_of(point(100, 100), **base), sized(**{**base, "kv_heads": 2}))


def test_kinds_of_number() -> None:
    assert [16, 16, 32, 64] == [rule.BITS[x] for x in ("float16", "bfloat16", "float32", "float64")]


def test_lines_of_a_method() -> None:
    """Chunks by their rows, then whole prompts; without whole prompts nothing is known."""
    made = shape_of(
        *(point(64, 128, streaming=1.5), point(64, 512, streaming=1.0), point(128, 128, streaming=2.0)),
        *(point(128, 512, streaming=0.9), point(512, 512, streaming=0.5)),
    )
    chunks = (Line(64, (128, 512), (1.5, 1.0)), Line(128, (512,), (0.9,)))
    assert (*chunks, Line(None, (128, 512), (2.0, 0.5))) == rule.lines(made, "streaming")
    sparsest = (Line(64, (128, 512), (0.1, 0.1)), Line(128, (512,), (0.1,)), Line(None, (128, 512), (0.1, 0.1)))
    assert sparsest == rule.lines(made, "unmeasured")
    only = shape_of(point(64, 128, streaming=1.5), point(128, 128))
    assert () == rule.lines(only, "streaming")


@pytest.mark.parametrize(
    ("keys", "ratios", "density", "expected"),
    [
        ((1024, TELLING), (1.0, 1.0), 0.6, True),
        ((1024, TELLING - 1), (1.0, 1.0), 0.6, False),
        ((1024, TELLING), (1.0, 1.0), UNSURE, False),
        ((1024, TELLING), (1.0, GAIN), 0.6, False),
        ((1024, TELLING), (GAIN, 1.0), 0.6, False),
        ((1024, TELLING), (0.951, 0.951), 0.6, True),
    ],
)
def test_inputs_that_were_too_dense(
    keys: tuple[int, int], ratios: tuple[float, float], density: float, expected: bool
) -> None:
    points = [point(n, n, density=density, streaming=one) for n, one in zip(keys, ratios, strict=True)]
    chunk = point(16, 2048, density=density, streaming=0.1)
    made = shape_of(chunk, *points)
    assert expected == too_dense(made, "streaming")
    assert not too_dense(made, "unmeasured")


def test_doubtful_figures_count_with_half_of_the_pairs_or_less() -> None:
    long = point(TELLING, TELLING, dense=2.0, density=0.8, streaming=1.2)
    assert pytest.approx(0.8 + 1.0) == rule._seconds(long, "streaming", doubtful=True)
    sparse = evolve(long, methods={"streaming": MethodTime(seconds=2.4, estimate=0.8, density=0.3)})
    assert pytest.approx(0.8 + 0.6) == rule._seconds(sparse, "streaming", doubtful=True)
    quick = evolve(long, methods={"streaming": MethodTime(seconds=1.1, estimate=0.8, density=0.8)})
    assert pytest.approx(1.1) == rule._seconds(quick, "streaming", doubtful=True)
    assert pytest.approx(2.4) == rule._seconds(evolve(long, executor=()), "streaming", doubtful=True)
    assert pytest.approx(2.4) == rule._seconds(long, "streaming", doubtful=False)
    assert pytest.approx(0.2) == rule._seconds(long, "unmeasured", doubtful=False)
    assert rule._seconds(evolve(long, executor=()), "unmeasured", doubtful=False) is None


@pytest.mark.parametrize(
    ("density", "seconds"), [(0.05, 1.0), (0.1, 1.0), (0.2, 2.0), (0.3, 3.0), (0.65, 6.5), (1.0, 10.0), (1.5, 10.0)]
)
def test_the_executor_between_measured_densities(density: float, seconds: float) -> None:
    one = Point(queries=8, keys=8, dense=1.0, executor=((0.1, 1.0), (0.3, 3.0), (1.0, 10.0)))
    assert pytest.approx(seconds) == one.executor_at(density)
    assert evolve(one, executor=()).executor_at(density) is None
    assert 1.0 == evolve(one, executor=((0.1, 1.0),)).executor_at(density)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ({100: 2.0, 400: 0.5}, math.ceil(100 * 4 ** (math.log(GAIN / 2) / math.log(0.25)))),
        ({100: 2.0, 200: 1.5, 800: 0.6}, math.ceil(200 * 4 ** (math.log(GAIN / 1.5) / math.log(0.4)))),
        ({100: 0.5, 200: 2.0, 800: 0.5}, math.ceil(200 * 4 ** (math.log(GAIN / 2) / math.log(0.25)))),
        ({100: 2.0}, None),
        ({100: 0.5, 200: 0.96}, None),
        ({100: 2.0, 200: GAIN}, 200),
    ],
)
def test_the_least_length(ratios: dict[int, float], expected: int | None) -> None:
    made = whole(ratios)
    assert expected == table(made).length("streaming", made)


@pytest.mark.parametrize(("keys", "ratio"), [(100, 0.5), (100, 0.9), (1000, 0.1), (7, 0.95)])
def test_the_least_length_below_the_shortest(keys: int, ratio: float) -> None:
    """The least n whose pairs are so few that dense attention's share of the time is that of the method."""
    made = whole({keys: ratio})
    least = next(n for n in range(1, keys + 1) if pairs(n, n) >= pairs(keys, keys) * ratio / GAIN * (1 - 1e-12))
    assert least == table(made).length("streaming", made)


def test_nothing_known_has_no_least_length() -> None:
    bare = shape_of(evolve(point(100, 100), executor=()))
    assert table(bare).length("streaming", bare) is None


def judged(made: BreakEven, **sizes: Any) -> Verdict:
    return made.judge(make(**{"q_len": 100, "heads": 4, "kv_heads": 2, **sizes}), "streaming")


def test_the_gain_itself_is_worth_it() -> None:
    assert Verdict(True, GAIN) == judged(table(shape_of(point(100, 100, streaming=GAIN))))
    slower = judged(table(shape_of(point(100, 100, streaming=0.951))))
    assert (False, BELOW) == (slower.worth, slower.reason)


def test_lines_are_made_once_a_shape_and_method() -> None:
    made = table(shape_of(point(100, 100, streaming=0.5)))
    one = made._along(made.shapes[0], "streaming")
    assert made._along(made.shapes[0], "streaming") is one
    made._along(made.shapes[0], "other")
    assert 2 == len(made._lines)


def test_devices_as_people_read_them() -> None:
    assert "cpu" == str(DeviceKind(type="cpu")) == str(device_kind(torch.device("cpu")))
    assert "cuda 9.0" == str(DeviceKind(type="cuda", capability=(9, 0)))
    assert "one (cuda 9.1)" == str(DeviceKind(type="cuda", capability=(9, 1), name="one"))
    assert "one (cpu)" == str(DeviceKind(type="cpu", name="one"))
    assert "break-even table of test (cpu)" == str(table(shape_of(point(8, 8))))
    assert "4 / 2 heads, d 8, float32" == str(shape_of(point(8, 8)))


def test_the_kind_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 1))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    expected = DeviceKind(type="cuda", capability=(9, 1), name="name of cuda:1")
    assert expected == device_kind(torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("kind", "capability"), [("cuda", (9, 0)), ("cpu", (9, 0)), ("mps", None)], ids=["both", "capability", "type"]
)
def test_a_table_of_another_device_says_nothing(kind: str, capability: tuple[int, int] | None) -> None:
    made = table(shape_of(point(100, 100, streaming=9.0)), kind=kind, capability=capability)
    verdict = judged(made)
    assert (True, None) == (verdict.worth, verdict.ratio)
    assert f"not gated: the {made} has nothing for cpu" == verdict.reason


def test_points_ascend_by_queries_then_keys() -> None:
    shape_of(point(8, 8), point(8, 9), point(9, 9))
    for wrong in ((point(8, 9), point(8, 8)), (point(9, 9), point(8, 8)), (point(8, 8), point(8, 8))):
        with pytest.raises(sp.ParameterError, match=r"points has .* after .*: sizes must ascend"):
            shape_of(*wrong)
    assert (True, False) == (point(8, 8).whole, point(7, 8).whole)


def timed(**figures: Any) -> MethodTime:
    """One method's figures, read as of a file."""
    made: MethodTime = structure(MethodTime, {"seconds": 1.0, "estimate": 1.0, "density": 0.5, **figures}, "x")
    return made


@pytest.mark.parametrize("value", [1e-12, 1, 1e12])
def test_seconds_within_bounds(value: float) -> None:
    found = timed(seconds=value).seconds
    assert (float(value), float) == (found, type(found))


@pytest.mark.parametrize("value", [0.9e-12, 1.1e12, 0, -1, None, "1", True])
def test_seconds_out_of_bounds(value: object) -> None:
    with pytest.raises(sp.ParameterError, match=r"x.seconds is .*: pass seconds"):
        timed(seconds=value)


def test_densities_within_bounds() -> None:
    assert (1.0, 1e-9) == (timed(density=1).density, timed(density=1e-9).density)
    for wrong in (0, -0.1, 1.0001, True, None):
        with pytest.raises(sp.ParameterError, match=r"x.density is .*: pass a share of the causal pairs"):
            timed(density=wrong)


def test_whole_numbers_within_bounds() -> None:
    assert [1, 2**40] == [Point(queries=1, keys=keys, dense=1.0).keys for keys in (1, 2**40)]
    wrong: tuple[Any, ...] = (0, 2**40 + 1, True, 1.0)
    for keys in wrong:
        with pytest.raises(sp.ParameterError, match=r"keys is .*: pass an integer from 1 to 1099511627776"):
            Point(queries=1, keys=keys, dense=1.0)


def test_what_a_file_may_hold_at_its_bounds() -> None:
    facts: Any = json.loads(table(shape_of(point(8, 8, streaming=0.5))).to_json())
    facts["device"]["capability"] = [0, 0]
    facts["shapes"][0].update(heads=1, kv_heads=1, head_dim=1)
    facts["shapes"][0]["points"][0].update(queries=1, keys=1)
    found = BreakEven.of(facts)
    assert ((0, 0), 1, 1) == (found.device.capability, found.shapes[0].heads, found.shapes[0].points[0].keys)
    assert "\n" == found.to_json()[-1]
    assert '\n "schema": "sparseprefill.breakeven",\n "version": 1,' in found.to_json()


def test_the_built_in_rules_in_numbers() -> None:
    """Pairs of a causal prompt of 32,768 tokens, and of 2,048 rows up to 65,536 keys."""
    whole, chunk = 32768 * 32769 // 2, sum(range(65536 - 2047, 65537))
    assert not RULES["cpu"].judge(make(64), "no table").worth
    assert (32768, 4 * 64 * whole) == (RULES["cpu"].keys, RULES["cpu"].work)
    assert (32768, 32 * 128 * chunk) == (RULES["cuda"].keys, RULES["cuda"].work)
    assert (0, None) == (NOTHING_KNOWN.keys, NOTHING_KNOWN.work)
