"""Prompts behind a cached prefix in the engine: they go on as that was computed."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from typing import Any

import pytest

from helpers.tables import point, shape_of, table

from . import engine, models
from .test_engine_sparse import STREAMING, TIMES

pytestmark = [engine.NEEDED, pytest.mark.slow]
LONG, SHORT, MORE = (models.prompt(length, seed=length) for length in (700, 300, 400))
"""In steps of 256 tokens 700 tokens gain on the whole; 300 do not, nor 420."""
OPTIONS = {"max_num_batched_tokens": 256, "enable_prefix_caching": True, "block_size": 32}
TIGHT = {**OPTIONS, "num_gpu_blocks_override": 26, "max_model_len": 768}
"""Room for one long prompt and little else."""
JOBS: dict[str, dict[str, Any]] = {
    "shared": {"rounds": [[LONG], [LONG[:330] + SHORT[:90]]]},
    "grown": {"rounds": [[SHORT], [{"follow": MORE}]], "tokens": 85},
    "sent again": {"rounds": [], "replaced": [LONG, LONG]},
    "evicted": {"rounds": [[LONG], [MORE], [MORE[:330] + SHORT[:90]]], "options": TIGHT},
    "a store": {"rounds": [[LONG], [LONG[:500] + SHORT[:90]]]},
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is reported of each job, all in one process."""
    folder = tmp_path_factory.mktemp("behind")
    model, gate = str(models.save("llama", folder / "llama")), folder / "table.json"
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32}
    gate.write_text(table(shape_of(*TIMES, point(1024, 1024, streaming=0.2), **sizes)).to_json(), encoding="utf-8")
    sparse = {**STREAMING, "gate": str(gate)}
    store = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    kept = {**store, "kv_connector_extra_config": {"shared_storage_path": str(folder / "store")}}
    JOBS["a store"]["options"] = {**OPTIONS, "kv_transfer_config": kept}
    jobs = [{"model": model, "tokens": 6, "options": OPTIONS, "sparse": sparse, **job} for job in JOBS.values()]
    found = dict(zip(JOBS, engine.run(jobs, folder), strict=True))
    assert [] == [one["error"] for one in found.values() if "error" in one]
    return {name: one["report"] for name, one in found.items()}


def test_a_short_prompt_goes_on_sparse_behind_the_beginning_of_a_long_one(reports: dict[str, Any]) -> None:
    report = reports["shared"]
    assert {"sparse": 1, "sparse behind sparse": 1} == report["prompts"]
    assert {"sparse": 320} == report["cached"]
    assert "behind cached tokens (320 computed sparse by streaming) the prompt goes on sparse" in report["notes"]
    assert {} == report["fallbacks"]
    assert "cached tokens before them: 320 sparse" in report["text"]


def test_a_conversation_that_began_dense_stays_so(reports: dict[str, Any]) -> None:
    """785 tokens, of which 384 were there, a quarter of those as an answer; without them so many would run sparse."""
    report = reports["grown"]
    assert {"dense": 1, "dense behind dense": 1} == report["prompts"]
    assert {"dense": 384} == report["cached"]
    assert "behind cached tokens (384 computed dense) the prompt goes on dense" in report["fallbacks"]


def test_a_request_that_was_aborted_and_sent_again_goes_on_with_its_own(reports: dict[str, Any]) -> None:
    report = reports["sent again"]
    assert {"sparse": 1, "sparse behind sparse": 1} == report["prompts"]
    assert {"sparse": 256} == report["cached"]
    assert {} == report["fallbacks"]


def test_blocks_that_others_got_are_theirs(reports: dict[str, Any]) -> None:
    """The second prompt has blocks of the first one's end, which ran sparse."""
    report = reports["evicted"]
    assert {"sparse": 1, "dense": 1, "dense behind dense": 1} == report["prompts"]
    assert {"dense": 320} == report["cached"]


def test_what_a_store_may_have_brought_is_judged_by_its_length(reports: dict[str, Any]) -> None:
    report = reports["a store"]
    assert {"sparse": 1, "dense behind unknown": 1} == report["prompts"]
    (tokens,) = report["cached"].values()
    said = f"{tokens} nobody knows how: ExampleConnector may have brought them"
    assert any(f"as a prompt of {tokens} tokens would have been; {said})" in why for why in report["fallbacks"])
