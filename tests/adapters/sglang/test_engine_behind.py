"""Prompts behind a prefix of the radix cache, in SGLang's real engine: they go on as that was computed."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest

from helpers.tables import point, shape_of, table

from ..vllm.models import save
from .engine import NEEDED, prompt, running

pytestmark = [NEEDED, pytest.mark.slow]
LONG, SHORT = prompt(700), prompt(300)
TIMES = (
    point(128, 128, streaming=4.0),
    *(point(256, n, streaming=r) for n, r in ((256, 3.0), (512, 0.5), (1024, 0.3))),
    point(1024, 1024, streaming=0.2),
)
"""In steps of 256 tokens 700 tokens gain on the whole; 300 do not, nor 420."""
ENGINE = {"chunked_prefill_size": 256}
JOBS: dict[str, list[dict[str, Any]]] = {
    "shared": [{"prompts": [LONG]}, {"prompts": [LONG[:330] + SHORT[:90]]}],
    "grown": [{"prompts": [SHORT], "params": {"max_new_tokens": 81}}, {"follow": prompt(400)}],
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is reported of each job, with what its last request found in the cache."""
    folder = tmp_path_factory.mktemp("behind")
    model, gate = str(save("qwen3", folder / "qwen3")), folder / "table.json"
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32}
    gate.write_text(table(shape_of(*TIMES, **sizes)).to_json(), encoding="utf-8")
    sparse = {"method": "streaming", "parameters": {"sink": 16, "window": 64}, "min_query": 32, "gate": str(gate)}
    jobs = {name: {"model": model, "table": sparse, "engine": ENGINE, "turns": turns} for name, turns in JOBS.items()}
    with running(jobs, folder) as answer:
        found = {name: answer(name) for name in jobs}
    for one in found.values():
        assert "failed" not in one, one["failed"][-4000:]
    return {name: {**one["reports"][0], "found": one["turns"][-1][0]["cached"]} for name, one in found.items()}


def test_a_short_prompt_goes_on_sparse_behind_the_beginning_of_a_long_one(reports: dict[str, Any]) -> None:
    report = reports["shared"]
    assert 330 == report["found"]
    assert {"sparse": 1, "sparse behind sparse": 1} == report["prompts"]
    assert {"sparse": 320, "unknown": 10} == report["cached"]
    (said,) = (note for note in report["notes"] if "behind cached tokens" in note)
    assert said.startswith("behind cached tokens (320 computed sparse by streaming; 10 nobody knows how: ")
    assert said.endswith(") the prompt goes on sparse")
    assert {} == report["fallbacks"]


def test_a_conversation_that_began_dense_stays_so(reports: dict[str, Any]) -> None:
    """780 tokens, of which 380 were there: prompts of that length run sparse where nothing is."""
    report = reports["grown"]
    assert 380 == report["found"]
    assert {"dense": 1, "dense behind dense": 1} == report["prompts"]
    assert {"dense": 380} == report["cached"]
    assert "behind cached tokens (380 computed dense) the prompt goes on dense" in report["fallbacks"]
    assert all(not layer["sparse_calls"] for layer in report["layers"])
