"""The engine with stores of keys beside its prefix cache: what requests ask for is kept apart, or refused."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from sparseprefill.adapters.vllm import stores

from . import engine, models

pytestmark = [engine.NEEDED, pytest.mark.slow]
STREAMING = {"method": "streaming", "parameters": {"sink": 32, "window": 64, "block": 32}, "min_query": 32, "tail": 0}
PROMPT = models.prompt(500, seed=1)
BY_TOKENS = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
SEVERAL = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [BY_TOKENS]},
}
JOBS: dict[str, dict[str, Any]] = {
    "stored": {
        "rounds": [[PROMPT], [PROMPT]],
        "refused": ["off", "all"],
        "sparse": {**STREAMING, "profiles": {"all": {"method": "dense", "gate": False}}},
        "options": {"kv_transfer_config": BY_TOKENS},
    },
    "unseen": {
        "unseen": True,
        "rounds": [[PROMPT], [PROMPT]],
        "asked": [[None], ["off"]],
        "sparse": STREAMING,
        "options": {"kv_transfer_config": SEVERAL},
    },
    "stock": {"rounds": [[PROMPT]], "asked": [["off"]], "options": {"kv_transfer_config": BY_TOKENS}},
}
SAID = "sparseprefill is 'off', but ExampleConnector is not known to keep apart what requests ask for"


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every job by name, all in one process; each has a folder of its own."""
    folder = tmp_path_factory.mktemp("stores")
    model = str(models.save("llama", folder / "llama"))
    jobs = [kept({"model": model, "tokens": 4, **job}, str(folder / f"store-{name}")) for name, job in JOBS.items()]
    found = engine.run(jobs, folder)
    return {**dict(zip(JOBS, found, strict=True)), "log": (folder / "log.txt").read_text()}


def kept(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """A job whose store writes to a folder."""
    given = job["options"]["kv_transfer_config"]
    one = {**BY_TOKENS, "kv_connector_extra_config": {"shared_storage_path": folder}}
    made = {**given, "kv_connector_extra_config": {"connectors": [one]}} if given == SEVERAL else one
    return {**job, "options": {**job["options"], "kv_transfer_config": made}}


def test_every_connector_of_this_vllm_is_in_the_table() -> None:
    factory = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    assert set(factory._registry) <= {*stores.APART, *stores.BY_TOKENS, stores.MULTI}


def test_nothing_is_asked_for_with_a_store_that_goes_by_tokens(answers: dict[str, Any]) -> None:
    sparse = engine.tokens(answers["stored"])
    assert sparse == engine.tokens(answers["stored"], 1), "from the store, which all that may be asked for share"
    assert "External Cache Hit!" in answers["log"]
    off, profile = answers["stored"]["refusals"]
    assert f"VLLMValidationError: {SAID}" in off
    assert "sparseprefill is 'all', but ExampleConnector" in profile
    assert "sparseprefill: ExampleConnector is not known to keep apart what requests ask for: those" in answers["log"]


def test_a_front_end_that_looks_at_nothing_gets_no_such_request_past_the_engine(answers: dict[str, Any]) -> None:
    assert SAID in answers["unseen"]["error"]


def test_where_the_backend_is_not_selected_nothing_is_refused(answers: dict[str, Any]) -> None:
    assert engine.tokens(answers["stock"]) != engine.tokens(answers["stored"])
