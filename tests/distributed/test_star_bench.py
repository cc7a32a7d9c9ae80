"""The benchmark's table over processes: what was measured stands, whatever happens to a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sparseprefill.adapters.star.layout import Sizes

import sparseprefill as sp
from distributed import bench_jobs, world
from helpers.build import make, one_lookup
from lab.star.cost import Cost
from lab.star.inner import Seen
from sparseprefill.metrics import sample_rows


def rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["row"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def test_a_note_tells_the_lowest_rows_of_the_last_block() -> None:
    call = one_lookup(1000, int(sample_rows(make(1000), 64)[20]), key=100)
    seen = Seen(sp.build("streaming", sink=16, window=64, block=16))
    seen(call, sp.Memory())
    assert seen.note().endswith(", recall 0.992 (rows: 1st percentile 1.000, lowest 0.000)")


def test_rows_that_fail_in_step_cost_no_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    outcomes = world.shared(2).run(bench_jobs.survives, str(path))
    assert [outcome.error for outcome in outcomes] == ["", ""]
    assert outcomes[0].value == outcomes[1].value > 0
    found = rows(path)
    assert list(found) == ["first", "refused everywhere", "refused by one", "stumbles everywhere", "last"]
    assert "rank 0: MemoryError: no room for this row" in found["refused everywhere"]["failed"]
    assert "rank 1: MemoryError: no room for this row" in found["refused by one"]["failed"]
    assert "rank 0: MemoryError: no room in this row" in found["stumbles everywhere"]["failed"]
    assert found["last"]["against"] == "first"
    assert found["last"]["speed_up"] > 0


def test_a_row_that_fails_on_one_rank_ends_all_and_leaves_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for outcome in world.run(bench_jobs.ends, 2, str(path)):
        assert "rank 1 failed: MemoryError: no room in this row" in outcome.value, outcome
        assert outcome.seconds < 0.75 * bench_jobs.LONG
    assert "ms" in rows(path)["first"]
    assert "no room in this row" in rows(path)["stumbles"]["failed"]


def test_rows_are_chosen_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    assert [outcome.error for outcome in world.shared(2).run(bench_jobs.chosen, str(path))] == ["", ""]
    assert list(rows(path)) == ["a"]


def test_every_kind_of_row_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    outcomes = world.shared(2).run(bench_jobs.every, str(path))
    assert [outcome.error for outcome in outcomes] == ["", ""]
    found = rows(path)
    assert set(outcomes[0].value) < set(found)
    assert all(row.get("ms", 0) > 0 for row in found.values()), found
    assert "speed_up" in found["star decode, 50 steps"]


@pytest.mark.parametrize(("block", "ratio"), [(262144, 4 / 3), (32768, 64 / 6)])
def test_costs_follow_the_pairs_of_queries_and_keys(block: int, ratio: float) -> None:
    cost, tokens = Cost(bench_jobs.SHAPE), 1048576
    assert cost.dense(tokens, 4) / cost.star(Sizes(block).layout(tokens, 4)) == pytest.approx(ratio)
