"""Options, registration and the other parts of SGLang's adapter that need no SGLang."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sparseprefill.adapters.sglang import known, plugin
from sparseprefill.adapters.sglang.backend import make
from sparseprefill.adapters.sglang.narrow import Rows
from sparseprefill.adapters.sglang.options import VARIABLE, given
from sparseprefill.adapters.sglang.pages import pages_of, scale_of, table_of
from sparseprefill.adapters.sglang.runtime import make_runtime

import sparseprefill as sp
from sparseprefill.errors import AttachError


def test_the_table_stands_in_the_variable_or_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"method": "streaming", "tail": 7}
    (tmp_path / "t.json").write_text(json.dumps(held))
    (tmp_path / "t.toml").write_text('method = "streaming"\ntail = 7\n')
    for text in (json.dumps(held), str(tmp_path / "t.json"), str(tmp_path / "t.toml")):
        monkeypatch.setenv(VARIABLE, text)
        assert 7 == given().tail


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", 'no method: set SPARSEPREFILL_SGLANG=\'{"method": "bfla"}\''),
        ("{", "SPARSEPREFILL_SGLANG is '{': is not JSON"),
        ("nowhere.json", "is 'nowhere.json': No such file or directory; give a table in JSON, or the path"),
        ('{"methud": "bfla"}', "sparseprefill.methud is unknown; did you mean 'method'?"),
        (
            '{"method": "bfla", "chunk": 64}',
            "sparseprefill.chunk is for vLLM: SGLang cuts prompts by --chunked",
        ),
        ('{"method": "bfla", "skip_unread": true}', "skip_unread is for vLLM: SGLang's backend computes all rows"),
        ('{"method": "bfla", "tail": -1}', "sparseprefill.tail is -1: pass an integer from 0 to"),
    ],
)
def test_wrong_options_are_named(text: str, said: str) -> None:
    with pytest.raises(sp.SparsePrefillError) as error:
        given(text)
    assert said in str(error.value)


def test_a_model_with_latent_attention_is_refused_by_name() -> None:
    runner: Any = SimpleNamespace(use_mla_backend=True, model_config=SimpleNamespace(model_path="DeepSeek"))
    with pytest.raises(AttachError, match=r"MLA.* has its own backends: use one of SGLang's for DeepSeek"):
        make_runtime(runner, given('{"method": "streaming"}'), "fa3")


@pytest.mark.parametrize(
    ("decoding", "graph", "hooked", "said"),
    [
        ("sparseprefill", "disabled", True, "is 'sparseprefill': pass one of SGLang's own by --decode-attention-"),
        ("fa9", "disabled", True, "is 'fa9': pass one of SGLang's own by"),
        ("fa3", "full", True, "--cuda-graph-backend-prefill is 'full', whose graphs record attention: use"),
        ("fa3", "disabled", False, "SGLang did not apply the hook on Req.__init__"),
    ],
)
def test_what_cannot_be_is_refused_at_start(
    decoding: str, graph: str, hooked: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Req:
        def __init__(self) -> None:
            """As SGLang's."""

    if hooked:
        Req.__init__.__wrapped__ = None  # type: ignore[attr-defined]
    config = SimpleNamespace(
        graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend=graph)))
    )
    fakes = {
        "sglang.srt.layers.attention.attention_registry": {"ATTENTION_BACKENDS": {"fa3": None, "sparseprefill": None}},
        "sglang.srt.managers.schedule_batch": {"Req": Req},
        "sglang.srt.runtime_context": {"get_exec": lambda: config},
    }
    for path, content in fakes.items():
        module: Any = ModuleType(path)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setenv(VARIABLE, json.dumps({"method": "streaming"}))
    with pytest.raises(AttachError) as error:
        make(SimpleNamespace(decode_attention_backend_str=decoding))
    assert said in str(error.value)


def test_where_the_backend_is_not_selected_requests_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_listeners", set())
    request = SimpleNamespace(
        rid="a", cache_salt=None, sampling_params=SimpleNamespace(custom_params={"sparseprefill": "x"})
    )
    known.meet(None, request)
    assert None is request.cache_salt
    assert None is known.find("a")


@pytest.mark.parametrize("page", [1, 16])
def test_pages_are_views_of_the_pool(page: int) -> None:
    k, v = torch.randn(2, 128 + page, 2, 8)
    row = (torch.randperm(128 // page)[:, None] * page + torch.arange(page)).flatten().int()
    table = table_of(row, 50, page)
    found = pages_of(k, v, table, 50, page=page, dtype=torch.float32)
    assert found.k.data_ptr() == k.data_ptr()
    assert page > 1 or table.data_ptr() == row.data_ptr()
    assert torch.equal(k[row[:50].long()].transpose(0, 1)[None], found.keys())
    assert torch.equal(v[row[:50].long()].transpose(0, 1)[None], found.values())


def test_a_scale_of_one_is_none() -> None:
    assert None is scale_of(SimpleNamespace(k_scale=None), "k_scale", torch.device("cpu"))
    assert None is scale_of(SimpleNamespace(k_scale=torch.ones(()), k_scale_float=1.0), "k_scale", torch.device("cpu"))
    found = scale_of(SimpleNamespace(k_scale=torch.tensor(0.5)), "k_scale", torch.device("cpu"))
    assert found is not None
    assert [0.5] == found.tolist()


def test_rows_are_taken_and_put_back() -> None:
    rows = Rows.of([(0, 1), (2, 3)], [0, 2, 5, 6])
    x = torch.arange(6)
    assert [0, 1, 5] == rows.take_tokens(x).tolist()
    into = torch.zeros(6, dtype=torch.int64)
    rows.put_tokens(rows.take_tokens(x), into)
    assert [0, 1, 0, 0, 0, 5] == into.tolist()
    one = Rows.of([(1, 2)], [0, 2, 5])
    assert x[2:].data_ptr() == one.take_tokens(x).data_ptr()


@pytest.mark.parametrize(
    ("args", "asked", "said"),
    [
        ({"prefill_attention_backend": "sparseprefill"}, {"sparseprefill": "x"}, "is 'x', which is not a profile"),
        ({"attention_backend": "sparseprefill"}, {"sparse_prefil": "off"}, "did you mean 'sparseprefill'?"),
        ({"prefill_attention_backend": "fa3"}, {"sparseprefill": "x"}, None),
        ({"prefill_attention_backend": "sparseprefill"}, {"sparseprefill": "off"}, None),
        ({"prefill_attention_backend": "sparseprefill"}, {"thinking_budget": 3}, None),
        ({"prefill_attention_backend": "sparseprefill"}, None, None),
    ],
)
def test_requests_are_looked_at_where_they_come_in(
    args: dict[str, str], asked: Any, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, '{"method": "streaming"}')
    manager: Any = SimpleNamespace(server_args=SimpleNamespace(**args))
    for params in ({"custom_params": asked}, SimpleNamespace(custom_params=asked)):
        one: Any = SimpleNamespace(sampling_params=params)
        if said is None:
            known.refuse(manager, one, [1])
            continue
        with pytest.raises(ValueError, match="sparseprefill") as error:
            known.refuse(manager, one, [1])
        assert said in str(error.value)


class FakeSGLang:
    """As much of SGLang as registration asks for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str = "0.5.23") -> None:
        self.choices, self.backends, self.hooks = ["fa3"], dict[str, Any](), dict[str, str]()

        def offer(name: str) -> Any:
            return lambda make: self.backends.setdefault(name, make)

        registry = SimpleNamespace(register=lambda target, hook, kind: self.hooks.setdefault(target, kind))
        named: dict[str, dict[str, Any]] = {
            "sglang": {"__version__": version},
            "sglang.srt.arg_groups.choices": {
                "ATTENTION_BACKEND_CHOICES": self.choices,
                "add_attention_backend_choices": self.choices.extend,
            },
            "sglang.srt.layers.attention.attention_registry": {
                "ATTENTION_BACKENDS": self.backends,
                "register_attention_backend": offer,
            },
            "sglang.srt.plugins.hook_registry": {
                "HookRegistry": registry,
                "HookType": {"AFTER": "after", "BEFORE": "before"},
            },
        }
        for path, content in named.items():
            module: Any = ModuleType(path)
            module.__dict__.update(content)
            monkeypatch.setitem(sys.modules, path, module)


def test_registration(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    host = FakeSGLang(monkeypatch)
    plugin.register()
    assert ["fa3", "sparseprefill"] == host.choices
    assert {"sparseprefill"} == set(host.backends)
    assert {
        "sglang.srt.managers.schedule_batch.Req.__init__": "after",
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request": "before",
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state": "after",
    } == host.hooks
    assert not caplog.text


@pytest.mark.parametrize(
    ("version", "said"), [("0.5.9", "it is too old, 0.5.23 or later"), ("dev", "says nothing about its interfaces")]
)
def test_a_version_that_is_not_supported(version: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeSGLang(monkeypatch, version)
    with pytest.raises(AttachError) as error:
        plugin.register()
    assert said in str(error.value)
    assert not host.backends


def test_a_later_version_is_used_and_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = FakeSGLang(monkeypatch, "0.6.0")
    plugin.register()
    assert host.backends
    assert "SGLang 0.6.0 is not the version that ran (0.5.23)" in caplog.text


def test_a_registration_that_does_not_hold_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeSGLang(monkeypatch)
    host.backends["sparseprefill"] = "somebody else's"
    with pytest.raises(AttachError, match="it does not keep the backend under its name"):
        plugin.register()
    del sys.modules["sglang.srt.plugins.hook_registry"]
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", None)
    with pytest.raises(AttachError, match="its interfaces are different: ModuleNotFoundError"):
        plugin.register()
