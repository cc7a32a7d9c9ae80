"""What requests ask for in vLLM: kept apart by salts, stores that do not heed them, and places that nobody reads."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sparseprefill.adapters.serving.wishes import salt
from sparseprefill.adapters.sglang import doors as sglang
from sparseprefill.adapters.vllm import doors, register, stores
from sparseprefill.adapters.vllm.admission import bar, install
from sparseprefill.adapters.vllm.runtime import make_runtime
from sparseprefill.adapters.vllm.stores import unsalted

import sparseprefill as sp

from .test_units import Core, Registry, Taker, asking

MODEL = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "model_type": "llama", "architectures": ["M"]
}  # fmt: skip


@pytest.mark.parametrize("name", ["a" * 130, "a/b", "a@b", "a\\b", "a\0b", "\u00e9'\""])
def test_a_salt_is_one_that_every_store_takes(name: str) -> None:
    """LMCache takes no more than 128 characters, and none that part its keys."""
    own = ("", "b" * 128)
    found = {salt({"sparseprefill": name}, one) for one in own}
    assert len(own) == len(found)
    for one in found:
        assert one is not None
        assert len(one) <= 128
        assert not set("@/\\\0") & set(one)
        assert one not in (salt({}, one), salt({"sparseprefill": name + "x"}, "")), "nobody else's"


def storing(*children: Any, name: str | None = "MultiConnector", module: str | None = None) -> Any:
    """vLLM's configuration of a store. children: of a connector to several."""
    more = {"connectors": [one if isinstance(one, dict) else {"kv_connector": one} for one in children]}
    return SimpleNamespace(kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=more)


NESTED = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{"kv_connector": "Mine"}]}}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, ()),
        (storing(name=None), ()),
        (storing(name="OffloadingConnector"), ()),
        (storing(name="LMCacheMPConnector"), ()),
        (storing(name="NixlConnector"), ()),
        (storing(name="ExampleConnector"), ("ExampleConnector",)),
        (storing(name="LMCacheConnectorV1"), ("LMCacheConnectorV1",)),
        (storing(name="Mine", module="mine.store"), ("mine.store.Mine",)),
        (storing(name="OffloadingConnector", module="mine.store"), ("mine.store.OffloadingConnector",)),
        (storing(name="OffloadingConnector", module="vllm.distributed.x"), ()),
        (storing("NixlConnector", "OffloadingConnector"), ()),
        (storing("NixlConnector", "ExampleConnector", NESTED, "ExampleConnector"), ("ExampleConnector", "Mine")),
        (storing({"kv_connector": "A", "kv_connector_module_path": "b"}), ("b.A",)),
    ],
)
def test_stores_that_may_mix_up_requests_are_named(given: Any, found: tuple[str, ...]) -> None:
    assert found == unsalted(SimpleNamespace(kv_transfer_config=given))


def test_the_pages_list_what_the_code_knows() -> None:
    """Connectors by what becomes of wishes with them, and the endpoints that carry wishes."""
    pages = Path(__file__).parents[3] / "docs"
    page = (pages / "vllm-operate.md").read_text(encoding="utf-8")
    rows = [row.split(" | ") for row in section(page, "### Stores of keys").splitlines() if row.startswith("| `")]
    for kind, names in KINDS.items():
        found = [name for first, *_, last in rows if last.startswith(kind) for name in quoted(first)]
        assert sorted(names) == sorted(found)
    for text, known in ((page, doors), ((pages / "sglang.md").read_text(encoding="utf-8"), sglang)):
        listed = quoted(section(text, "### Where it stands"))
        whole = {path.removesuffix("/render").removesuffix("/batch") for path in known.DOORS.places}
        assert whole <= set(listed)


LMCACHE = "LMCacheMPConnector"
KINDS: dict[str, list[str]] = {
    "kept apart |": [*(name for name in stores.BY_SALT if name != LMCACHE), "--kv-offloading-size"],
    "kept apart, if": [LMCACHE],
    "kept apart: send": list(stores.BY_REQUEST),
    "nothing to keep apart |": list(stores.NO_STORE),
    "refused |": list(stores.BY_TOKENS),
}


def section(page: str, title: str) -> str:
    """What stands below a heading."""
    return page.split(f"{title}\n")[1].split("\n#")[0]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def started(**more: Any) -> Any:
    """As much of a VllmConfig as a runtime is made of."""
    text = SimpleNamespace(**MODEL)
    return SimpleNamespace(
        additional_config={"sparseprefill": {"method": "dense", "gate": False}},
        model_config=SimpleNamespace(model="m", hf_config=text, hf_text_config=text),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        **more,
    )


def test_what_a_store_would_mix_up_is_refused_and_said_at_start(caplog: pytest.LogCaptureFixture) -> None:
    """By the front end, and by the engine for front ends that look at nothing."""
    kind: Any = type("InputProcessor", (Taker,), {})
    engine: Any = type("EngineCore", (Core,), {})
    assert [None, None, None] == [install(kind, RuntimeError), bar(engine), bar(engine)]
    taker, core = (one(profiles={"quick": {"method": "streaming"}}) for one in (kind, engine))
    plain, asked = (SimpleNamespace(sampling_params=asking(**more)) for more in ({}, {"sparseprefill": "off"}))
    pooled = SimpleNamespace(sampling_params=None)
    assert (asked, 7) == core.preprocess_add_request(asked)
    for one in (taker, core):
        one.vllm_config.kv_transfer_config = storing("OffloadingConnector", "ExampleConnector")
    said = "ExampleConnector is not known to keep apart what requests ask for"
    for name in ("off", "quick"):
        with pytest.raises(RuntimeError, match=f"sparseprefill is '{name}', but {said}.*: leave sparseprefill out, or"):
            taker.process_inputs("a", "", asking(sparseprefill=name))
    with pytest.raises(sp.ParameterError, match=said):
        core.preprocess_add_request(asked)
    with pytest.raises(sp.ParameterError, match=said):
        core.preprocess_add_request(SimpleNamespace(sampling_params=asking(sparsprefill="off")))
    assert [(plain, 7), (pooled, 7)] == [core.preprocess_add_request(one) for one in (plain, pooled)]
    assert "a" == taker.process_inputs("a", "", asking(other=3)).request_id
    core.vllm_config.attention_config.backend = None
    assert (asked, 7) == core.preprocess_add_request(asked), "no business of ours"
    caplog.clear()
    for chosen in (None, storing("Mine", "ExampleConnector")):
        make_runtime(started(kv_transfer_config=chosen), "FLASH_ATTN")
    (text,) = (one.message for one in caplog.records if "known" in one.message)
    assert "sparseprefill: Mine, ExampleConnector are not known to keep apart what requests ask for: those that" in text


def test_a_pooling_request_that_asks_for_something_is_refused() -> None:
    kind: Any = type("InputProcessor", (Taker,), {})
    install(kind, RuntimeError)
    for key in ("sparseprefill", "sparse_prefill"):
        with pytest.raises(RuntimeError, match="among extra_kwargs of PoolingParams, where nobody reads it"):
            kind().process_inputs("a", "", SimpleNamespace(extra_kwargs={key: "off"}))
    assert "a" == kind().process_inputs("a", "", SimpleNamespace(extra_kwargs={"x": 1})).request_id


def test_a_guard_stands_in_front_of_vllm_s_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Registry(monkeypatch, "0.32.0")
    for _ in range(2):
        register()
    another, ours = there.plugins.load_endpoint_plugins(("generate",))
    assert ("another's", "sparseprefill-doors") == (another, ours.name)
    config = Taker().vllm_config
    config.model_config = SimpleNamespace(runner_type="generate")
    scope = {"app": SimpleNamespace(state=SimpleNamespace(vllm_config=config))}
    assert doors.DOORS is doors.doors_of(scope)
    config.model_config.runner_type = "pooling"
    assert doors.POOLING is doors.doors_of(scope)
    config.attention_config.backend = None
    assert doors.doors_of(scope) is None
    assert doors.doors_of({"app": SimpleNamespace(state=SimpleNamespace())}) is None, "of a server without an engine"
