"""Break-even tables: what sizes get which ratio, what is read from a file, and how a wrong one is refused."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import sparseprefill as sp
from helpers.tables import SHAPE, altered, from_length, point, shape_of, table, whole
from sparseprefill.breakeven.points import GAIN, HeadShape, Sizes
from sparseprefill.breakeven.table import BELOW, BreakEven

CHUNKED = shape_of(
    *(point(128, 512, streaming=1.2), point(128, 1024, streaming=0.8)),
    *(point(256, 256, streaming=2.0), point(512, 512, streaming=1.0), point(1024, 1024, streaming=0.5)),
)


def ratio(of: HeadShape, queries: int, keys: int, method: str = "streaming", **changes: Any) -> float:
    found = table(of).ratio(method, Sizes(**{**SHAPE, **changes}, queries=queries, keys=keys))
    assert found is not None
    return found


def call(queries: int, keys: int | None = None, **options: Any) -> sp.AttentionCall:
    keys = queries if keys is None else keys
    q, k = torch.zeros(1, 4, queries, 8), torch.zeros(1, 2, keys, 8)
    return sp.AttentionCall(q, k, k, **options)


def test_measured_sizes_have_their_measured_ratio() -> None:
    for one in CHUNKED.points:
        assert pytest.approx(one.methods["streaming"].seconds) == ratio(CHUNKED, one.queries, one.keys)


def test_between_lengths_the_ratio_is_a_power_of_the_length() -> None:
    assert pytest.approx(2.0**0.5, rel=1e-3) == ratio(CHUNKED, 362, 362)
    assert pytest.approx(0.5**0.5, rel=1e-3) == ratio(CHUNKED, 724, 724)


def test_chunks_lie_between_the_measured_rows() -> None:
    assert pytest.approx((0.8 * 0.8 * 0.5) ** (1 / 3)) == ratio(CHUNKED, 256, 1024)
    assert ratio(CHUNKED, 128, 1024) > ratio(CHUNKED, 400, 1024) > ratio(CHUNKED, 1024, 1024)
    assert ratio(CHUNKED, 128, 512) > ratio(CHUNKED, 128, 700) > ratio(CHUNKED, 128, 1024)


def test_less_work_than_measured_is_charged_the_whole_sparse_time() -> None:
    assert pytest.approx(8.0, rel=0.02) == ratio(CHUNKED, 128, 128)  # a quarter of the pairs of 256 x 256
    assert pytest.approx(1.6, rel=0.04) == ratio(CHUNKED, 64, 1024)  # half of the rows of 128
    assert pytest.approx(4.0) == ratio(CHUNKED, 256, 256, heads=2, kv_heads=1)
    assert pytest.approx(4.0) == ratio(CHUNKED, 256, 256, head_dim=4)


def test_more_work_than_measured_keeps_the_ratio() -> None:
    assert pytest.approx(0.5) == ratio(CHUNKED, 10**6, 10**6)
    assert pytest.approx(0.8) == ratio(CHUNKED, 128, 10**6)
    assert pytest.approx(0.5) == ratio(CHUNKED, 1024, 1024, batch=4)
    assert pytest.approx(0.5) == ratio(CHUNKED, 1024, 1024, head_dim=128)


def test_without_chunks_a_chunk_gets_its_share_of_the_whole_prompt() -> None:
    only = whole({512: 1.0, 1024: 0.1})
    assert pytest.approx(0.1 * 524800 / 122944) == ratio(only, 128, 1024)


def test_the_nearest_shape_of_the_same_kind_of_number_judges() -> None:
    wide: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    shapes = (
        *(whole({512: 0.2}, **wide), whole({512: 0.3}, **{**wide, "heads": 64})),
        *(whole({512: 0.4}, **{**wide, "head_dim": 64}), whole({512: 0.5})),
    )
    found = table(*shapes)

    def of(**changes: Any) -> float | None:
        return found.ratio("streaming", Sizes(**{**wide, **changes}, queries=512, keys=512))

    assert pytest.approx(0.2) == of()
    assert pytest.approx(0.2 * 32 / 28) == of(heads=28, kv_heads=4, dtype="float16")
    assert pytest.approx(0.3) == of(batch=2)
    assert pytest.approx(0.4) == of(head_dim=80)
    assert pytest.approx(0.5) == of(dtype="float32")
    assert of(dtype="float64") is None


def test_a_method_without_figures_is_judged_by_the_executor_alone() -> None:
    assert pytest.approx(0.1) == ratio(CHUNKED, 512, 512, method="mine")
    bare = shape_of(evolve(point(512, 512), executor=()))
    assert table(bare).ratio("mine", Sizes(**SHAPE, queries=512, keys=512)) is None


COMMAND = "sparseprefill calibrate --method mine --heads 4 --kv-heads 2 --head-dim 8 --dtype float32"
LACKING = (
    "the break-even table of test (cpu) has no figures of mine; "
    f"{COMMAND} measures it where it is installed: pass its table as gate"
)


def test_a_verdict_on_a_method_without_figures_says_so_and_what_measures_it() -> None:
    """Such as a plugin's."""
    found = table(CHUNKED)
    short, long = found.judge(call(512), "mine"), found.judge(call(128), "mine")
    assert short.worth
    assert pytest.approx(0.1) == short.ratio
    assert (
        f"judged by the executor alone, so a prompt too short for the method may run sparse: {LACKING}" == short.reason
    )
    assert (True, short.reason) == (long.worth, long.reason)
    few = found.judge(call(32), "mine")
    assert (False, f"{BELOW}, even for the executor alone: {LACKING}") == (few.worth, few.reason)
    bare = table(shape_of(evolve(point(512, 512), executor=()))).judge(call(512), "mine")
    assert (True, None, f"not gated: {LACKING}") == (bare.worth, bare.ratio, bare.reason)
    assert "--method 'my own'" in found.judge(call(512), "my own").reason
    assert "" == found.judge(call(1024), "streaming").reason


def test_a_method_measured_for_other_heads_alone_is_judged_by_those() -> None:
    found = table(whole({512: 0.3}, "mine", heads=8, kv_heads=4), whole({512: 0.5}))
    assert (True, "") == (found.judge(call(512), "mine").worth, found.judge(call(512), "mine").reason)
    assert pytest.approx(0.3 * 8 / 4) == found.ratio("mine", Sizes(**SHAPE, queries=512, keys=512))
    assert ("break-even table of test (cpu)", "break-even table of test (cpu), without figures of mine, yours") == (
        found.called("mine", "streaming"),
        table(CHUNKED).called("mine", "streaming", "yours"),
    )


def test_a_method_measured_at_some_sizes_is_judged_by_those() -> None:
    some = shape_of(point(256, 256), point(512, 512, streaming=0.6), point(1024, 1024))
    assert pytest.approx(0.6) == ratio(some, 1024, 1024)
    assert pytest.approx(2.4, rel=0.01) == ratio(some, 256, 256)


def test_inputs_too_dense_to_win_at_any_length_count_with_half_of_the_pairs() -> None:
    short, long = (point(n, n, density=0.9, streaming=1.2) for n in (1024, 65536))
    assert pytest.approx(0.4 + 0.5) == ratio(shape_of(short, long), 65536, 65536)
    wins = evolve(short, methods={**short.methods, "streaming": evolve(short.methods["streaming"], seconds=0.5)})
    assert pytest.approx(1.2) == ratio(shape_of(wins, long), 65536, 65536)
    assert pytest.approx(1.2) == ratio(shape_of(short), 1024, 1024)
    assert pytest.approx(1.2) == ratio(shape_of(point(65536, 65536, density=0.4, streaming=1.2)), 65536, 65536)
    thin = point(65536, 65536, density=0.4, streaming=1.2)
    assert pytest.approx(1.2) == ratio(shape_of(short, thin), 65536, 65536), "the longest tells"


@given(
    ratios=st.lists(st.floats(0.05, 20.0), min_size=2, max_size=6).map(lambda found: sorted(found, reverse=True)),
    lengths=st.lists(st.integers(1, 20000), min_size=2, max_size=40),
    rows=st.integers(1, 4096),
)
def test_falling_ratios_stay_falling_at_every_length(ratios: list[float], lengths: list[int], rows: int) -> None:
    made = whole({256 * 2**i: one for i, one in enumerate(ratios)})
    found = [ratio(made, n, n) for n in sorted(lengths)]
    assert all(a >= b * (1 - 1e-9) for a, b in pairwise(found))
    chunks = [ratio(made, min(rows, n), n) for n in sorted(lengths) if n >= rows]
    assert all(0 < one < float("inf") for one in chunks)


@given(
    ratios=st.lists(st.floats(0.05, 20.0), min_size=1, max_size=6).map(lambda found: sorted(found, reverse=True)),
    queries=st.integers(1, 9000),
    keys=st.integers(1, 9000),
    heads=st.sampled_from([1, 2, 4, 8, 32]),
)
def test_fewer_rows_or_heads_never_look_better(ratios: list[float], queries: int, keys: int, heads: int) -> None:
    queries = min(queries, keys)
    made = whole({256 * 2**i: one for i, one in enumerate(ratios)})
    more = ratio(made, keys, keys, heads=2 * heads, kv_heads=1)
    assert ratio(made, queries, keys, heads=heads, kv_heads=1) >= more * (1 - 1e-9)


@given(
    ratios=st.lists(st.floats(0.05, 20.0), min_size=1, max_size=6).map(lambda found: sorted(found, reverse=True)),
)
def test_the_least_length_is_where_the_judgement_turns(ratios: list[float]) -> None:
    made = whole({256 * 2**i: one for i, one in enumerate(ratios)})
    least = table(made).length("streaming", made)
    if least is None:
        assert ratios[-1] > GAIN
        return
    assert ratio(made, least, least) <= GAIN * (1 + 1e-6)
    assert least == 1 or ratio(made, least - 1, least - 1) > GAIN * (1 - 1e-6)


def test_a_call_below_break_even_is_not_worth_it() -> None:
    found = from_length(512)
    verdict = found.judge(call(256), "streaming")
    assert (False, BELOW) == (verdict.worth, verdict.reason)
    assert verdict.ratio == pytest.approx(4.0)
    assert found.judge(call(512), "streaming").worth


def test_queries_and_the_place_of_the_queries_count() -> None:
    found = table(CHUNKED)
    assert found.judge(call(128, 1024), "streaming").worth
    assert not found.judge(call(128, 512), "streaming").worth
    assert not found.judge(call(128, 1024, q_offset=256), "streaming").worth


def test_what_the_table_does_not_know_runs_sparse_and_says_why() -> None:
    other = table(CHUNKED, kind="cuda", capability=(9, 0))
    verdict = other.judge(call(64), "streaming")
    assert (True, None) == (verdict.worth, verdict.ratio)
    assert "the break-even table of test (cuda 9.0) has nothing for cpu" in verdict.reason
    x = torch.zeros(1, 4, 64, 8, dtype=torch.float64)
    verdict = table(CHUNKED).judge(sp.AttentionCall(x, x, x), "streaming")
    assert verdict.worth
    assert "no figures for float64" in verdict.reason
    assert sp.Verdict(True) == table(CHUNKED).judge(call(64, window=8), "streaming")


def test_a_table_survives_its_file(tmp_path: Path) -> None:
    made = evolve(table(CHUNKED, whole({64: 1.5}, heads=8)), versions={"torch": "2"}, measured={"repeats": 3})
    path = tmp_path / "one.json"
    path.write_text(made.to_json(), encoding="utf-8")
    assert made == BreakEven.load(path)
    gpu = table(CHUNKED, kind="cuda", capability=(9, 0))
    assert gpu == BreakEven.of(json.loads(gpu.to_json()))


def test_a_table_with_a_number_that_json_does_not_know_is_not_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        evolve(table(CHUNKED), measured={"noise": float("nan")}).to_json()


FAULTS: list[tuple[tuple[Any, ...], Any, str]] = [
    (("schema",), "sparseprefill.profile", "schema is 'sparseprefill.profile': this library reads"),
    (("version",), 2, "version is 2: this library reads 1; calibrate again"),
    (("version",), True, "version is True"),
    (("more",), 1, "more is unknown"),
    (("device", "type"), 3, "device.type is 3"),
    (("device", "capability"), [9], r"device.capability is \[9\]: pass two integers"),
    (("versions",), [], r"versions is \[\]: give a table"),
    (("shapes",), [], r"shapes is \[\]: pass a list with at least one"),
    (("shapes", 0, "heads"), 3, r"shapes\[0\].heads is 3: pass a multiple of the 2 kv_heads"),
    (("shapes", 0, "head_dim"), 8.0, r"shapes\[0\].head_dim is 8.0"),
    (("shapes", 0, "dtype"), "int8", r"shapes\[0\].dtype is 'int8': pass 'float16' or"),
    (("shapes", 0, "points"), {}, r"shapes\[0\].points is {}"),
    (("shapes", 0, "points"), [], "pass a list with at least one entry"),
    (("device", "capability"), [9, -1], "pass two integers"),
    (("device", "capability"), [9, 0, 0], "pass two integers"),
    (("device", "capability"), 9, "pass two integers"),
    (("device", "name"), None, "device.name is None: pass a string"),
    (("shapes", 0, "points", 0, "executor", 2, "density"), 0.5, "densities must ascend, and 0.5 comes before"),
    (("shapes", 0, "points", 1, "queries"), 4096, r"shapes\[0\].points\[1\].queries is 4096: there cannot be more"),
    (("shapes", 0, "points", 1, "keys"), 512, r"shapes\[0\].points has 128 x 512 after 128 x 512: sizes must ascend"),
    (("shapes", 0, "points", 2, "dense"), 0, r"points\[2\].dense is 0: pass seconds"),
    (("shapes", 0, "points", 2, "dense"), float("nan"), r"points\[2\].dense is nan: pass seconds"),
    (("shapes", 0, "points", 2, "dense"), 10**400, r"points\[2\].dense is 1000.*: pass seconds"),
    (("shapes", 0, "points", 2, "dense"), 1e300, r"points\[2\].dense is 1e\+300: pass seconds"),
    (
        ("shapes", 0, "points", 2, "queries"),
        10**400,
        r"points\[2\].queries is 1000.*: pass an integer from 1 to 109",
    ),
    (
        ("shapes", 0, "points", 2, "keys"),
        10**400,
        r"points\[2\].keys is 1000.*: pass an integer from 1 to 109",
    ),
    (("shapes", 0, "heads"), 10**400, r"heads is 1000.*: pass an integer from 1 to 109"),
    (("shapes", 0, "points", 2, "methods", "streaming", "density"), 10**400, r"streaming.density is 1000.*: pass a"),
    (("shapes", 0, "points", 2, "executor"), None, r"points\[2\].executor is None: pass a list"),
    (
        ("shapes", 0, "points", 2, "executor", 1, "density"),
        0.05,
        r"executor\[1\].density is 0.05: densities must ascend",
    ),
    (("shapes", 0, "points", 2, "executor", 0, "seconds"), "1", r"executor\[0\].seconds is '1'"),
    (("shapes", 0, "points", 2, "methods"), [], r"points\[2\].methods is \[\]: give a table"),
    (("shapes", 0, "points", 2, "methods", "streaming", "density"), 1.5, r"methods.streaming.density is 1.5: pass a"),
    (("shapes", 0, "points", 2, "methods", "streaming", "estimate"), float("inf"), r"streaming.estimate is inf"),
    (("shapes", 0, "points", 2, "note"), "x", r"shapes\[0\].points\[2\].note is unknown"),
]


@pytest.mark.parametrize(("at", "value", "message"), FAULTS, ids=[message[:40] for _, _, message in FAULTS])
def test_a_wrong_file_is_refused_by_field(at: tuple[Any, ...], value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(altered(table(CHUNKED).to_json(), at, value)), encoding="utf-8")
    with pytest.raises(sp.ParameterError, match=f"wrong.json: .*{message}"):
        BreakEven.load(path)


@pytest.mark.parametrize("name", ["schema", "version", "device", "versions", "measured", "shapes"])
def test_a_missing_field_is_named(name: str) -> None:
    facts = json.loads(table(CHUNKED).to_json())
    del facts[name]
    with pytest.raises(sp.ParameterError, match=name):
        BreakEven.of(facts)


def test_a_file_that_is_not_there_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(sp.ParameterError, match=r"No such file.*sparseprefill calibrate"):
        BreakEven.load(tmp_path / "none.json")


def test_a_table_without_whole_prompts_is_refused() -> None:
    with pytest.raises(sp.ParameterError, match="add whole prompts"):
        shape_of(point(128, 512))


TABLES = sorted((Path(sp.__file__).parent / "breakeven" / "tables").glob("*.json"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_shipped_table_is_for_the_device_in_its_name(path: Path) -> None:
    found = BreakEven.load(path).device
    kind = found.type if found.capability is None else "{}-{}.{}".format(found.type, *found.capability)
    assert path.name == f"breakeven-{kind}.json"


def test_what_is_remembered_of_a_call_knows_its_kv_heads() -> None:
    """Two calls of the same queries, judged by shapes of their own, in either order."""
    found = table(whole({64: 0.2}, kv_heads=4), whole({64: 3.0}, kv_heads=1))
    q = torch.zeros(1, 4, 64, 8)
    wide, narrow = (sp.AttentionCall(q, k, k) for k in (torch.zeros(1, 4, 64, 8), torch.zeros(1, 1, 64, 8)))
    for calls in ((wide, narrow), (narrow, wide)):
        fresh = evolve(found)
        assert {id(one): one is wide for one in calls} == {
            id(one): fresh.judge(one, "streaming").worth for one in calls
        }
