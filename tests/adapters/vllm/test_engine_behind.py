"""Prompts behind a cached prefix in the engine: they go on as that was computed."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest

from helpers.tables import shape_of, table

from . import engine, models
from .test_engine_sparse import STREAMING, TIMES, point

pytestmark = [engine.NEEDED, pytest.mark.slow]
LONG, SHORT, LOST = (models.prompt(length, seed=length) for length in (700, 300, 690))
"""In steps of 256 tokens 700 tokens gain on the whole; 300 do not."""
OPTIONS = {"max_num_batched_tokens": 256, "enable_prefix_caching": True, "block_size": 32}
JOBS: dict[str, dict[str, Any]] = {
    "shared": {"rounds": [[LONG], [LONG[:330] + SHORT[:90]]]},
    "grown": {"rounds": [[SHORT], [SHORT + LONG[:440]]]},
    "sent again": {"rounds": [], "replaced": [LOST, LOST]},
    "answered": {"rounds": [[SHORT]], "tokens": 100, "again": True},
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every job by name, all in one process."""
    folder = tmp_path_factory.mktemp("behind")
    model, gate = str(models.save("llama", folder / "llama")), folder / "table.json"
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32}
    gate.write_text(table(shape_of(*TIMES, point(1024, 1024, streaming=0.2), **sizes)).to_json(), encoding="utf-8")
    sparse = {**STREAMING, "gate": str(gate)}
    jobs = [{"model": model, "tokens": 6, "options": OPTIONS, "sparse": sparse, **job} for job in JOBS.values()]
    return dict(zip(JOBS, engine.run(jobs, folder), strict=True))


def test_x(answers: dict[str, Any]) -> None:
    for name, one in answers.items():
        print(name, one.get("error"), one.get("report", {}).get("text"), {k: v for k, v in one["state"]["counters"].items() if "prompts" in k or "cached" in k})
    raise AssertionError
