"""Options, registration and the other parts of SGLang's adapter that need no SGLang."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sparseprefill.adapters.sglang import doors, known, plugin
from sparseprefill.adapters.sglang.backend import make
from sparseprefill.adapters.sglang.hooks import HOOKS, REQUESTS, missing
from sparseprefill.adapters.sglang.narrow import Rows
from sparseprefill.adapters.sglang.options import VARIABLE, given
from sparseprefill.adapters.sglang.pages import pages_of, scale_of, table_of
from sparseprefill.adapters.sglang.runtime import check_model, make_runtime
from sparseprefill.adapters.sglang.start import check
from sparseprefill.adapters.sglang.stores import unsalted

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
        (
            '{"sparseprefill": {"method": "bfla"}}',
            "SPARSEPREFILL_SGLANG has the key 'sparseprefill': that is vLLM's form; give what stands inside of it",
        ),
        (
            '{"sparsprefill": {"method": "bfla"}}',
            "SPARSEPREFILL_SGLANG has the key 'sparsprefill': that is vLLM's form",
        ),
        ("nowhere.json", "is 'nowhere.json': No such file or directory; give a table in JSON, or the path"),
        ('{"methud": "bfla"}', "sparseprefill.methud is unknown; did you mean 'method'?"),
        (
            '{"method": "bfla", "chunk": 64}',
            "sparseprefill.chunk is for vLLM: SGLang cuts prompts by --chunked",
        ),
        ('{"method": "bfla", "skip_unread": true}', "skip_unread is for vLLM: SGLang's backend computes all rows"),
        ('{"method": "bfla", "tail": -1}', "sparseprefill.tail is -1: pass a number of query rows from"),
    ],
)
def test_wrong_options_are_named(text: str, said: str) -> None:
    with pytest.raises(sp.SparsePrefillError) as error:
        given(text)
    assert said in str(error.value)


def test_a_variable_of_nearly_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("SPARSEPREFIL_SGLANG", "{}")
    with pytest.raises(sp.ParameterError, match="SPARSEPREFIL_SGLANG is set, did you mean SPARSEPREFILL_SGLANG"):
        given()


def test_a_model_with_latent_attention_is_refused_by_name() -> None:
    runner: Any = SimpleNamespace(use_mla_backend=True, model_config=SimpleNamespace(model_path="DeepSeek"))
    for made in (make_runtime, check_model):
        with pytest.raises(AttachError, match=r"MLA.* has its own backends: use one of SGLang's for DeepSeek"):
            made(runner, given('{"method": "streaming"}'), "fa3")


def hooked(original: Any, hook: Any, of_another: bool = False) -> Any:
    """As SGLang's registry wraps a method; by another plugin as well."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return original(*args, **kwargs)

    return hooked(wrapper, print) if of_another else wrapper


class Host:
    """As much of SGLang as the backend's factory asks for. without: the targets of hooks that were not applied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, graph: str = "disabled", without: Sequence[str] = ()) -> None:
        prefill = SimpleNamespace(prefill=SimpleNamespace(backend=graph))
        config = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=prefill))
        srt = "sglang.srt"
        fakes: dict[str, dict[str, Any]] = {
            f"{srt}.layers.attention.attention_registry": {
                "ATTENTION_BACKENDS": {"fa3": lambda _: "SGLang's", "sparseprefill": None}
            },
            f"{srt}.runtime_context": {"get_exec": lambda: config},
            f"{srt}.model_executor.model_runner_components.attention_backend_setup": {
                "resolve_attention_backend_strs": lambda model_runner: SimpleNamespace(decode=model_runner.decoding)
            },
        }
        for hook in HOOKS:
            path, name, method = hook.target.rsplit(".", 2)
            plain = lambda *_: None  # noqa: E731
            made = plain if hook.target in without else hooked(plain, hook.call, of_another=True)
            fakes.setdefault(path, {}).setdefault(name, type(name, (), {}))
            setattr(fakes[path][name], method, made)
        packages = {path.rsplit(".", n)[0] for path in fakes for n in range(1, path.count(".") + 1)}
        for path, content in [*((one, {}) for one in packages if one not in fakes), *fakes.items()]:
            module: Any = ModuleType(path)
            module.__dict__.update(content, __path__=[])
            monkeypatch.setitem(sys.modules, path, module)
        monkeypatch.setenv(VARIABLE, json.dumps({"method": "streaming"}))


@pytest.mark.parametrize(
    ("decoding", "graph", "said"),
    [
        ("sparseprefill", "disabled", "is 'sparseprefill': pass one of SGLang's own by --decode-attention-"),
        ("fa9", "disabled", "is 'fa9': pass one of SGLang's own by"),
        ("fa3", "full", "--cuda-graph-backend-prefill is 'full', whose graphs record attention: use"),
    ],
)
def test_what_cannot_be_is_refused_at_start(
    decoding: str, graph: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Host(monkeypatch, graph)
    args = SimpleNamespace(prefill_attention_backend="sparseprefill")
    runner = SimpleNamespace(
        decode_attention_backend_str=decoding, decoding=decoding, server_args=args, is_draft_worker=False
    )
    for start in (make, check):  # when the backend is made, and ahead of the weights
        with pytest.raises(AttachError) as error:
            start(runner)
        assert said in str(error.value)


def test_hooks_that_sglang_did_not_apply_are_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = SimpleNamespace(decode_attention_backend_str="fa3", is_draft_worker=True)
    Host(monkeypatch)
    assert "SGLang's" == make(runner)
    assert "hook" not in caplog.text
    for hook in HOOKS:
        Host(monkeypatch, without=[hook.target])
        said = f"{hook.without}: SGLang did not apply the hook on {'.'.join(hook.target.split('.')[-2:])}"
        caplog.clear()
        if hook is REQUESTS:
            with pytest.raises(AttachError, match=re.escape(said)):
                make(runner)
        else:
            make(runner)
            assert [f"sparseprefill: {said}"] == [one.message for one in caplog.records if "hook" in one.message]
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", None)
    assert "Scheduler" in "".join(hook.target for hook in missing()), "one whose place is not there"


MODEL = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "model_type": "llama", "architectures": ["M"]
}  # fmt: skip


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"method": "streeming"}, "sparseprefill.method: no method is named 'streeming'"),
        ({"method": "streaming", "tial": 3}, "sparseprefill.tial is unknown; did you mean 'tail'"),
        ({"method": "streaming", "layers": [2]}, "sparseprefill.layers names 2: M has 2 layers"),
        ({"method": "streaming", "parameters": {"sink": -1}}, "sparseprefill.parameters.sink is -1"),
        ({"profile": "nowhere.json"}, "sparseprefill.profile is 'nowhere.json'"),
        ({"method": "streaming"}, None),
    ],
)
def test_wrong_options_end_the_start_ahead_of_the_weights(
    table: dict[str, Any], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner has no model yet."""
    Host(monkeypatch)
    monkeypatch.setenv(VARIABLE, json.dumps(table))
    text = SimpleNamespace(**MODEL)
    model = SimpleNamespace(hf_config=text, hf_text_config=text, model_path="m")
    args = SimpleNamespace(prefill_attention_backend="sparseprefill", model_path="m")
    given = {"use_mla_backend": False, "model_config": model, "decoding": "fa3"}
    if said is None:
        check(SimpleNamespace(**given, server_args=args, is_draft_worker=False))
        return
    with pytest.raises(sp.SparsePrefillError) as error:
        check(SimpleNamespace(**given, server_args=args, is_draft_worker=False))
    assert said in str(error.value)
    check(SimpleNamespace(**given, server_args=args, is_draft_worker=True))
    check(SimpleNamespace(**given, server_args=SimpleNamespace(attention_backend="fa3"), is_draft_worker=False))


@pytest.mark.parametrize("flag", ["prefill_attention_backend", "decode_attention_backend", "attention_backend"])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": None}], ids=["attends", "never attends"])
def test_wrong_options_are_named_whatever_the_model(
    flag: str, latent: bool, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every flag that names us, and ahead of what the model, or another backend, has against ours."""
    Host(monkeypatch)
    monkeypatch.setenv(VARIABLE, json.dumps({"method": "streaming", "parameters": {"sink": -1}}))
    text = SimpleNamespace(**{name: value for name, value in {**MODEL, **changes}.items() if value is not None})
    runner = SimpleNamespace(
        use_mla_backend=latent,
        model_config=SimpleNamespace(hf_config=text, hf_text_config=text, model_path="m"),
        decoding="fa3",
        server_args=SimpleNamespace(**{flag: "sparseprefill"}, model_path="m"),
        is_draft_worker=False,
    )
    with pytest.raises(sp.ParameterError, match=r"sparseprefill\.parameters\.sink is -1"):
        check(runner)
    monkeypatch.setenv(VARIABLE, '{"methd": "streaming"}')
    with pytest.raises(sp.ParameterError, match=r"sparseprefill\.methd is unknown"):
        check(runner)


def test_where_the_backend_is_not_selected_requests_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_listeners", set())
    request = SimpleNamespace(
        rid="a", cache_salt=None, sampling_params=SimpleNamespace(custom_params={"sparseprefill": "x"})
    )
    known.meet(None, request)
    assert None is request.cache_salt
    assert None is known.find("a")


SELECTED = {"prefill_attention_backend": "sparseprefill"}


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({}, ()),
        ({"hicache_storage_backend": "dynamic", "enable_hierarchical_cache": True}, ()),
        ({"enable_lmcache": True}, ()),
        ({"enable_flexkv": True}, ("--enable-flexkv",)),
        ({"radix_cache_backend": "flexkv", "enable_flexkv": True}, ("--radix-cache-backend flexkv",)),
        ({"radix_cache_backend": "mine"}, ("--radix-cache-backend mine",)),
        (
            {"enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "dynamic"},
            ("--unified-cache-external-linker-backend dynamic",),
        ),
        ({"enable_unified_cache_external_linker": True, "unified_cache_external_linker_backend": "mooncake"}, ()),
        ({"unified_cache_external_linker_backend": "dynamic"}, ()),
    ],
)
def test_what_a_store_would_mix_up_is_refused_and_said_at_start(
    flags: dict[str, Any], found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Host(monkeypatch)
    args: Any = SimpleNamespace(**SELECTED, model_path="m", **flags)
    assert found == unsalted(args)
    manager: Any = SimpleNamespace(server_args=args)
    for asked, said in (({"sparseprefill": "off"}, "'off'"), ({"sparseprefill": "quick"}, "'quick'"), ({"x": 1}, "")):
        one: Any = SimpleNamespace(sampling_params={"custom_params": asked})
        monkeypatch.setenv(VARIABLE, '{"method": "streaming", "profiles": {"quick": {"method": "streaming"}}}')
        if not (found and said):
            known.refuse(manager, one, [1])
            continue
        with pytest.raises(ValueError, match=f"sparseprefill is {said}, but {found[0]} is not known to keep apart"):
            known.refuse(manager, one, [1])
    text = SimpleNamespace(**MODEL)
    model = SimpleNamespace(hf_config=text, hf_text_config=text, model_path="m")
    check(
        SimpleNamespace(
            use_mla_backend=False, model_config=model, decoding="fa3", server_args=args, is_draft_worker=False
        )
    )
    warned = [one.message for one in caplog.records if "not known to keep apart" in one.message]
    assert [f"sparseprefill: {one} is" for one in found] == [one.split(" not known")[0] for one in warned]


def test_a_guard_stands_in_front_of_sglang_s_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[Any] = []
    monkeypatch.setattr(doors, "guard", lambda app, doors: put.append((app, doors({}))))
    chosen, another = (
        SimpleNamespace(server_args=SimpleNamespace(attention_backend=n)) for n in ("sparseprefill", "x")
    )
    monkeypatch.delitem(sys.modules, doors.SERVER, raising=False)
    doors.watch(None, chosen)  # an engine without a server
    monkeypatch.setitem(sys.modules, doors.SERVER, SimpleNamespace(app="the application"))
    doors.watch(None, another)
    assert [] == put
    doors.watch(None, chosen, "port")
    assert [("the application", doors.DOORS)] == put


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
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.__init__": "after",
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request": "before",
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state": "after",
        "sglang.srt.model_executor.model_runner.ModelRunner.load_model": "before",
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
