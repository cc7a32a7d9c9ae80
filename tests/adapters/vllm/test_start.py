"""Every flag that names us has our options read when an engine starts, whatever its model is. No engine."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from sparseprefill.adapters.cli.servers import EXTENSION as SHOWN
from sparseprefill.adapters.vllm import start
from sparseprefill.adapters.vllm.options import SCHEDULER
from sparseprefill.adapters.vllm.start import EXTENSION, check, install

import sparseprefill as sp

OURS, OTHER = SimpleNamespace(name="CUSTOM"), SimpleNamespace(name="FLASH_ATTN")
LLAMA = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "model_type": "llama", "architectures": ["M"]
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "attends": LLAMA,
    "latent": {**LLAMA, "model_type": "deepseek_v2", "kv_lora_rank": 16},
    "never attends": {"num_hidden_layers": 2, "hidden_size": 64, "model_type": "mamba", "architectures": ["N"]},
}
FLAGS: dict[str, dict[str, Any]] = {
    "--attention-backend": {"backend": OURS},
    "one kind of layers": {"backend": OTHER, "backend_per_kind": {"full": OURS}},
    "--attention-config.mla_prefill_backend": {"mla_prefill_backend": OURS},
    "--scheduler-cls": {"scheduler": SCHEDULER},
    "--worker-extension-cls": {"extension": EXTENSION},
}
WRONG = [
    ({"method": "streeming"}, "sparseprefill.method: no method is named 'streeming'"),
    ({"methd": "streaming"}, "sparseprefill.methd is unknown"),
    ({"method": "streaming", "strict": "yes"}, "sparseprefill.strict is 'yes': pass true or false"),
    ({"method": "streaming", "parameters": {"sink": -1}}, "sparseprefill.parameters.sink is -1"),
    ({"profile": "nowhere.json"}, "sparseprefill.profile is 'nowhere.json'"),
    ({"method": "streaming", "gate": "nowhere.json"}, "sparseprefill.gate: break-even table is 'nowhere.json'"),
    ({"method": "streaming", "profiles": {"a": {"method": "streeming"}}}, "sparseprefill.profiles.a.method: no method"),
    ("streaming", "sparseprefill is 'streaming': give a table"),
]


def config(model: str, flags: dict[str, Any], additional: Any) -> Any:
    text = SimpleNamespace(**MODELS[model])
    flags = dict(flags)
    scheduler, extension = flags.pop("scheduler", None), flags.pop("extension", "")
    return SimpleNamespace(
        additional_config=additional,
        attention_config=SimpleNamespace(**{"backend": None, **flags}),
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler, max_num_batched_tokens=512, max_num_seqs=4),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, worker_extension_cls=extension),
        model_config=SimpleNamespace(model="m", hf_config=text, hf_text_config=text),
    )


def needed(flags: dict[str, Any]) -> dict[str, Any]:
    return {"chunk": 256} if "scheduler" in flags else {}


def right(flags: dict[str, Any]) -> dict[str, Any]:
    return {"method": "streaming", **needed(flags)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_wrong_options_end_the_start_of_every_model(flags: dict[str, Any], model: str) -> None:
    check(config(model, flags, {"sparseprefill": right(flags)}))
    for table, said in WRONG:
        given = {**needed(flags), **table} if isinstance(table, dict) else table
        with pytest.raises(sp.SparsePrefillError) as caught:
            check(config(model, flags, {"sparseprefill": given}))
        assert said in str(caught.value)
    with pytest.raises(sp.ParameterError, match="'sparsprefill' is no key of --additional-config"):
        check(config(model, flags, {"sparsprefill": right(flags)}))


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_what_only_a_model_decides(flags: dict[str, Any]) -> None:
    table = {"sparseprefill": {**right(flags), "layers": [2]}}
    with pytest.raises(sp.ParameterError, match=r"sparseprefill.layers names 2: M has 2 layers"):
        check(config("attends", flags, table))
    check(config("never attends", flags, table))


def test_options_are_missed_by_what_needs_them() -> None:
    for name, flags in FLAGS.items():
        if name == "--worker-extension-cls":
            check(config("attends", flags, {}))
            check(config("attends", flags, {"another": {"method": 3}}))
        else:
            with pytest.raises(sp.ParameterError, match="but no method: add --additional-config"):
                check(config("attends", flags, {}))


def test_where_no_flag_names_us_nothing_is_read() -> None:
    for flags in ({}, {"backend": OTHER}, {"scheduler": "a.b"}, {"extension": "a.b"}):
        check(config("attends", flags, {"sparseprefill": {"method": "streeming"}}))


def test_a_scheduler_may_be_given_as_it_is() -> None:
    module, _, name = SCHEDULER.rpartition(".")
    given = type(name, (), {"__module__": module, "__qualname__": name})
    with pytest.raises(sp.ParameterError, match="chunk is missing"):
        check(config("attends", {"scheduler": given}, {"sparseprefill": {"method": "streaming"}}))


def test_the_flag_of_the_report_is_that_of_its_class() -> None:
    module, _, name = EXTENSION.rpartition(".")
    assert isinstance(getattr(import_module(module), name), type)
    assert SHOWN == EXTENSION


def test_an_executor_is_made_of_right_options_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Executor:
        def __init__(self, vllm_config: Any, more: int = 0) -> None:
            seen.append((vllm_config, more))

    class Workers(Executor):
        def __init__(self, vllm_config: Any) -> None:
            super().__init__(vllm_config, more=3)

    def refuse(config: Any) -> None:
        if config == "wrong":
            raise sp.ParameterError(config)

    monkeypatch.setattr(start, "check", refuse)
    assert install(Executor) is None
    once = vars(Executor)["__init__"]
    assert install(Executor) is None
    assert once is vars(Executor)["__init__"], "not twice"
    Workers("right")
    with pytest.raises(sp.ParameterError):
        Workers("wrong")
    assert [("right", 3)] == seen
    assert "Made" in str(install(type("Made", (), {})))
