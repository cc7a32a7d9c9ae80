"""Prefill in one engine and decode in another: the keys of a prompt go from one to the other by a store of vLLM's."""

from __future__ import annotations

from typing import Any

import pytest

from . import engine, models

pytestmark = [engine.NEEDED, pytest.mark.slow]
PROMPTS = [models.prompt(500, seed=1), models.prompt(401, seed=2)]
EVERY_KEY = {"method": "dense", "min_query": 128}
SPARSE = {"method": "streaming", "parameters": {"sink": 32, "window": 64, "block": 32}, "min_query": 128, "tail": 128}


def job(folder: str = "", role: str = "", sparse: dict[str, Any] | None = None, tokens: int = 8) -> dict[str, Any]:
    """An engine that answers the prompts. folder: of the store, by its role there; none where it does both."""
    given: dict[str, Any] = {"rounds": [PROMPTS], "tokens": tokens}
    if sparse is not None:
        given["sparse"] = sparse
    if folder:
        more = {"shared_storage_path": folder}
        store = {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": more}
        given["options"] = {"kv_transfer_config": store}
    return given


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every engine's answers, by name; a prefill engine comes before the decode engine that reads from it."""
    folder = tmp_path_factory.mktemp("machines")
    stores = {name: str(folder / name) for name in ("every key", "sparse", "stock")}
    jobs = {
        "stock alone": job(),
        "sparse alone": job(sparse=SPARSE),
        **{
            f"{name} to {end}": job(where, f"kv_{end}", how, 1 if end == "producer" else 8)
            for name, where in stores.items()
            for end, how in (
                ("producer", {"every key": EVERY_KEY, "sparse": SPARSE, "stock": None}[name]),
                ("consumer", SPARSE if name == "stock" else None),
            )
        },
    }
    model = str(models.save("llama", folder / "llama"))
    found = engine.run([{"model": model, **one} for one in jobs.values()], folder)
    return {**dict(zip(jobs, found, strict=True)), "log": (folder / "log.txt").read_text()}


def test_keys_of_a_prefill_machine_are_the_decode_machine_s(answers: dict[str, Any]) -> None:
    """At every key tokens are those of one engine that does both."""
    assert engine.tokens(answers["stock alone"]) == engine.tokens(answers["every key to consumer"])
    assert 3 * len(PROMPTS) <= answers["log"].count("External Cache Hit!")


def test_a_sparse_prefill_is_decoded_as_in_one_engine(answers: dict[str, Any]) -> None:
    assert engine.tokens(answers["sparse alone"]) == engine.tokens(answers["sparse to consumer"])
    assert engine.tokens(answers["sparse alone"]) != engine.tokens(answers["stock alone"])
    report = answers["sparse to producer"]["report"]
    assert len(PROMPTS) == report["layers"][0]["sparse_calls"]


def test_a_decode_machine_with_the_adapter_reads_a_stock_prefill(answers: dict[str, Any]) -> None:
    """What is left of a prompt there is too short for a method."""
    assert engine.tokens(answers["stock alone"]) == engine.tokens(answers["stock to consumer"])
    report = answers["stock to consumer"]["report"]
    assert sum(layer["sparse_calls"] for layer in report["layers"]) == 0
