"""Attaching and detaching: what is restored, what models share, threads, errors in the middle; versions."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import subprocess
import sys
import threading
import tomllib
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers
from sparseprefill.adapters.huggingface import attach, attention, compiling, detach, hooks, inspection, state, versions
from transformers import LlamaForCausalLM

import sparseprefill as sp
from helpers import hf_models
from helpers.hf_models import STREAMING, logits


@pytest.fixture
def model() -> Any:
    return hf_models.build("llama")


def test_detach_restores_to_the_bit(model: Any) -> None:
    wanted, implementation = logits(model), model.config._attn_implementation
    hooks = len(model.model._forward_hooks), len(model.model._forward_pre_hooks)
    handle = attach(model, "streaming", tail=0, **STREAMING)
    assert "attached: streaming on LlamaForCausalLM" in repr(handle)
    assert not torch.equal(logits(model), wanted)
    handle.detach()
    handle.detach()
    assert "detached" in repr(handle)
    assert torch.equal(logits(model), wanted)
    assert model.config._attn_implementation == implementation
    assert (len(model.model._forward_hooks), len(model.model._forward_pre_hooks)) == hooks
    with attach(model, "dense", block=16):
        pass
    assert torch.equal(logits(model), wanted)


def test_a_layers_class_is_read_once_however_many_layers_there_are(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[type] = []
    monkeypatch.setattr(inspection, "_branches", read.append)
    with attach(model, "streaming", verify=False, tail=0, **STREAMING):
        pass
    assert type(model.model.layers[0].self_attn) in read
    assert len(model.model.layers) > 1
    assert len(set(read)) == len(read)


def test_two_models_have_two_methods(model: Any) -> None:
    other = hf_models.build("qwen3", seed=3)
    stock = logits(model), logits(other)
    with attach(model, "dense", block=16) as first, attach(other, "streaming", tail=0, **STREAMING) as second:
        torch.testing.assert_close(logits(model), stock[0], atol=2e-5, rtol=1e-4)
        assert not torch.allclose(logits(other), stock[1], atol=1e-2)
    assert (first.report().method, second.report().method) == ("dense", "streaming")
    assert (first.report().density, first.report().layers[0].calls) == (1.0, 1)
    assert torch.equal(logits(other), stock[1])


def test_models_that_share_a_config(model: Any) -> None:
    torch.manual_seed(9)
    other = LlamaForCausalLM(model.config).eval()
    stock = logits(other)
    with attach(model, "streaming", tail=0, **STREAMING) as handle:
        torch.testing.assert_close(logits(other), stock)
        with pytest.raises(sp.AttachError, match="shares its config"):
            attach(other, "dense")
    assert handle.report().layers[0].calls == 0
    with attach(model, "dense"), pytest.raises(sp.AttachError, match="already attached"):
        attach(model, "dense")


def rebuilt(model: Any) -> Any:
    """Another model from a copy of the configuration."""
    return transplanted(model, LlamaForCausalLM(copy.deepcopy(model.config)))


def shallow(model: Any) -> Any:
    """The same from a shallow copy, which shares what the configuration holds."""
    return transplanted(model, LlamaForCausalLM(copy.copy(model.config)))


def transplanted(model: Any, other: Any) -> Any:
    other.load_state_dict(model.state_dict())
    return other.eval()


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = [copy.deepcopy, pickled, saved, rebuilt, shallow]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("make", COPIES, ids=lambda make: make.__name__)
def test_copies_are_stock_models_that_can_be_attached(model: Any, make: Any, implementation: str) -> None:
    model.set_attn_implementation(implementation)
    wanted = logits(model)
    notes: MappingProxyType[str, list[int]] = MappingProxyType(
        {"mine": []}
    )  # what cannot be pickled is not part of the model
    with attach(
        model, "streaming", observe=lambda call, _: notes["mine"].append(call.layer), gate=None, tail=0, **STREAMING
    ) as handle:
        sparse = logits(model)
        twin = make(model)
        assert torch.equal(logits(twin), wanted)
        with attach(twin, "streaming", tail=0, gate=None, **STREAMING) as other:
            assert torch.equal(logits(twin), sparse)
            assert torch.equal(logits(model), sparse)
        assert torch.equal(logits(twin), wanted)
        assert twin.config._attn_implementation == implementation
        assert torch.equal(logits(model), sparse), "the copy leaves its model alone"
    assert torch.equal(logits(twin), wanted)
    assert torch.equal(logits(model), wanted)
    assert handle.report().layers[0].sparse_calls == 3
    assert other.report().layers[0].sparse_calls == 1


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_saved_model_does_not_name_us(model: Any, implementation: str, tmp_path: Path) -> None:
    model.set_attn_implementation(implementation)
    wanted = logits(model)
    model.save_pretrained(tmp_path / "stock")
    with attach(model, "streaming", tail=0, gate=None, **STREAMING):
        model.save_pretrained(tmp_path / "attached")
        assert "sparseprefill" not in model.config.to_json_string(use_diff=False)
    for file in sorted((tmp_path / "stock").glob("*.json")):
        assert (tmp_path / "attached" / file.name).read_text() == file.read_text()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "attached", attn_implementation=implementation)
    assert torch.equal(logits(loaded), wanted)


def test_another_implementation_set_while_attached_stays(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    model.set_attn_implementation("eager")
    with (
        attach(model, "streaming", tail=0, gate=None, **STREAMING) as handle,
        caplog.at_level("WARNING", "sparseprefill"),
    ):
        logits(model)
        model.set_attn_implementation("sdpa")
        stock = logits(model)
        logits(model)
        with pytest.raises(sp.AttachError, match="already attached"):
            attach(model, "dense")
        notes = handle.report().notes
    assert [(text, count) for text, count in notes.items() if "'sdpa' after it was attached" in text and count == 2]
    assert sum("after it was attached" in record.message for record in caplog.records) == 1
    assert [layer.sparse_calls for layer in handle.report().layers] == [1, 1]
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model), stock)


@torch.no_grad()
def test_another_implementation_set_in_mid_forward(model: Any) -> None:
    """The layers after that run it, with the mask that it wants."""
    model.set_attn_implementation("eager")
    inputs = hf_models.padded(60, (0, 9))
    wanted = model(**inputs).logits

    def choose(call: sp.AttentionCall, result: sp.Result) -> None:
        model.set_attn_implementation("sdpa" if call.layer == 0 else "eager")

    with attach(model, "dense", block=16, observe=choose, gate=None):
        torch.testing.assert_close(
            model(**inputs).logits[inputs["attention_mask"].bool()],
            wanted[inputs["attention_mask"].bool()],
            atol=2e-5,
            rtol=1e-4,
        )
    assert model.config._attn_implementation == "sdpa"


def test_a_handle_can_be_entered_again(model: Any) -> None:
    stock, handle = logits(model), attach(model, "streaming", tail=0, gate=None, **STREAMING)
    with handle:
        wanted = logits(model)
    assert torch.equal(logits(model), stock)
    model.set_attn_implementation("eager")
    eager = logits(model)
    with handle as again:
        assert again is handle
        assert handle.active
        torch.testing.assert_close(logits(model), wanted, atol=2e-5, rtol=1e-4)
        assert handle.report().implementation == "eager"
    assert torch.equal(logits(model), eager)
    assert [layer.sparse_calls for layer in handle.report().layers] == [2, 2]
    with attach(model, "dense"), pytest.raises(sp.AttachError, match="already attached"), handle:
        pass
    assert torch.equal(logits(model), eager)


def test_an_option_that_is_misspelt_is_named(model: Any) -> None:
    with pytest.raises(
        sp.ParameterError, match=r"no parameter 'strickt'.*Or did you mean 'strict', an option of attach"
    ):
        attach(model, "streaming", strickt=True)
    with pytest.raises(sp.ParameterError, match=r"no parameter 'windov'; did you mean 'window'\? Known: [a-z, ]*$"):
        attach(model, "streaming", windov=3)


def test_blocks_of_one_handle_may_be_nested(model: Any) -> None:
    with attach(model, "streaming", tail=0, gate=None, **STREAMING) as handle:
        sparse = logits(model)
        with handle:
            assert torch.equal(sparse, logits(model))
        assert handle.active
        assert torch.equal(sparse, logits(model))
    assert not handle.active


def test_names_do_not_grow_with_attachments(model: Any) -> None:
    def names() -> set[str]:
        return {*transformers.AttentionInterface._global_mapping, *transformers.AttentionMaskInterface._global_mapping}

    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        with attach(model, "dense"):
            pass
    before, other = names(), hf_models.build("qwen3", seed=3)
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        other.set_attn_implementation("eager")
        for _ in range(3):
            with attach(model, "dense"), attach(other, "streaming", tail=0, **STREAMING):
                pass
    assert names() == before


def test_a_dropped_model_takes_its_handle_along(model: Any) -> None:
    fresh = hf_models.build("llama")
    handle = weakref.ref(attach(fresh, "dense"))
    gone = weakref.ref(fresh)
    del fresh
    gc.collect()
    assert gone() is None
    assert handle() is None


@torch.no_grad()
def test_an_error_inside_the_forward_closes_it(model: Any) -> None:
    wanted = logits(model)

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    with attach(model, "dense", block=32) as handle:
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            logits(model)
        hook.remove()
        assert state.current(handle) is None
        torch.testing.assert_close(logits(model), wanted, atol=2e-5, rtol=1e-4)
    assert not handle.report().fallbacks


def test_an_observer_that_fails_is_heard(model: Any) -> None:
    def fail(call: sp.AttentionCall, result: sp.Result) -> None:
        raise KeyError("mine")

    with attach(model, "dense", observe=fail) as handle, pytest.raises(KeyError, match="mine"):
        logits(model)
    assert state.current(handle) is None


def test_threads_share_a_model(model: Any) -> None:
    prompts = [hf_models.prompt(60 + 7 * i, seed=i) for i in range(6)]

    @torch.no_grad()
    def run(ids: torch.Tensor) -> Any:
        return model.generate(ids, max_new_tokens=4, do_sample=False)

    with attach(model, "streaming", tail=0, **STREAMING) as handle:
        wanted = [run(ids) for ids in prompts]
        got: dict[int, torch.Tensor] = {}
        jobs = [threading.Thread(target=lambda i=i: got.update({i: run(prompts[i])})) for i in range(6)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
    assert all(torch.equal(got[i], wanted[i]) for i in range(6))
    assert handle.report().layers[0].sparse_calls == 12
    assert not handle.report().fallbacks


@pytest.mark.parametrize("whole", [False, True])
def test_a_layer_that_is_replaced_while_attached_runs_like_the_one_before(
    model: Any, whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    layer = model.model.layers[0]
    with attach(model, "streaming", tail=0, gate=None, strict=True, **STREAMING) as handle:
        wanted = logits(model)
        if whole:
            model.model.layers[0] = transplanted(layer, type(layer)(model.config, 0))
        else:
            layer.self_attn = transplanted(layer.self_attn, type(layer.self_attn)(model.config, 0))
        assert torch.equal(logits(model), wanted)
        assert torch.equal(logits(model), wanted)
    report = handle.report()
    assert [layer.sparse_calls for layer in report.layers] == [3, 3]
    assert report.notes == {f"the attention of layer 0 {attention.REPLACED}": 1}
    assert sum(attention.REPLACED in record.getMessage() for record in caplog.records) == 1


class Own(torch.nn.Module):
    """Attention that asks nobody."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> Any:
        return hidden_states, None


@pytest.mark.parametrize("make", [lambda _: Own(), copy.deepcopy], ids=["own attention", "own configuration"])
def test_a_layer_that_no_longer_asks_is_noted(model: Any, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with attach(model, "streaming", tail=0, gate=None, **STREAMING) as handle:
        logits(model)
        assert not handle.report().notes
        model.model.layers[1].self_attn = make(model.model.layers[1].self_attn)
        logits(model)
        logits(model)
    report = handle.report()
    assert [layer.sparse_calls for layer in report.layers] == [3, 1]
    assert report.notes == {f"layer 1 {hooks.UNREACHED}": 2}
    assert sum(hooks.UNREACHED in record.getMessage() for record in caplog.records) == 1


def ends_early(model: Any) -> Any:
    """As assisted decoding with `assistant_early_exit` does it."""
    model.config.num_hidden_layers = 3


def taken_out(model: Any) -> Any:
    model.model.layers = model.model.layers[:3]


def one_replaced(model: Any) -> Any:
    model.model.layers[4].self_attn = Own()


def own_forward(model: Any) -> Any:
    model.model.layers[4].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


class Passing(torch.nn.Module):
    """A layer that does nothing."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return hidden_states


def layer_replaced(model: Any) -> Any:
    model.model.layers[4] = Passing()


def skipped(model: Any) -> Any:
    """As layer skipping does it: the module is there, and is not called."""
    layer = model.model.layers[1]
    layer.forward = lambda hidden_states, *_, **__: hidden_states


LEFT: dict[Any, str] = {
    ends_early: hooks.EARLY.format(last=2, first=3, end=4),
    taken_out: hooks.EARLY.format(last=2, first=3, end=4),
    skipped: hooks.SKIPPED.format(layer=1),
    one_replaced: f"layer 4 {hooks.UNREACHED}",
    own_forward: f"layer 4 {hooks.UNREACHED}",
    layer_replaced: f"layer 4 {hooks.UNREACHED}",
}


@pytest.mark.parametrize("change", LEFT)
@pytest.mark.parametrize("strict", [False, True])
def test_layers_that_did_not_run_and_layers_that_were_replaced_are_told_apart(change: Any, strict: bool) -> None:
    """A layer that does not run is no fallback; one that computes something else is, and `strict` raises for it."""
    model = hf_models.build("llama", num_hidden_layers=5)
    raises = strict and LEFT[change].startswith("layer 4")
    with attach(model, "streaming", tail=0, gate=None, strict=strict, **STREAMING) as handle:
        logits(model)
        change(model)
        with pytest.raises(sp.UnsupportedCallError, match="layer 4") if raises else nullcontext():
            logits(model)
    assert [LEFT[change]] == list(handle.report().notes)
    assert {} == handle.report().fallbacks


def test_generating_with_an_early_exit_is_told_as_such() -> None:
    model = hf_models.build("llama", num_hidden_layers=5)
    with attach(model, "streaming", tail=0, gate=None, **STREAMING) as handle:
        model.generate(hf_models.prompt(90), max_new_tokens=6, do_sample=False, assistant_early_exit=2)
    assert not [note for note in handle.report().notes if "replaced" in note]
    assert any("the forward ended behind layer 1: layers 2 to 4 did not run" in note for note in handle.report().notes)


def test_strict_raises_for_whatever_runs_without_the_method(model: Any) -> None:
    ids = hf_models.prompt()
    with attach(model, "streaming", tail=0, gate=None, strict=True, **STREAMING), torch.no_grad():
        with pytest.raises(sp.UnsupportedCallError, match="called outside the attached decoder's forward"):
            model.model.forward(ids)
        old, model.model = model.model, transplanted(model.model, transformers.LlamaModel(model.config))
        with pytest.raises(sp.UnsupportedCallError, match="put in the place of the attached one"):
            model(ids)
        model.model = old
        hf_models.build("llama")(ids)  # another model is none of ours
        model.set_attn_implementation("eager")
        with pytest.raises(sp.UnsupportedCallError, match="was set to 'eager' after it was attached"):
            model(ids)
    model.set_attn_implementation("sdpa")
    with attach(model, "streaming", layers=[0], tail=0, gate=None, strict=True, **STREAMING) as handle:
        logits(model)
        model.model.layers[1].self_attn = Own()
        logits(model)
    assert [f"layer 1 {hooks.UNREACHED}"] == list(handle.report().notes)


def test_a_model_whose_handle_is_lost(model: Any) -> None:
    stock = logits(model)
    attach(model, "streaming", tail=0, gate=None, **STREAMING)
    with pytest.raises(sp.AttachError, match=r"already attached.*detach\(model\).*attach\(\.\.\., replace=True\)"):
        attach(model, "streaming", tail=0, gate=None, **STREAMING)
    assert not torch.equal(logits(model), stock)
    handle = detach(model)
    assert handle is not None
    assert not handle.active
    assert [1, 1] == [layer.sparse_calls for layer in handle.report().layers]
    assert torch.equal(logits(model), stock)
    assert "sdpa" == model.config._attn_implementation
    assert detach(model) is None
    with pytest.raises(sp.AttachError, match="not a torch module"):
        detach("llama")  # type: ignore[arg-type]


def test_detaching_by_a_part_or_a_wrapper(model: Any) -> None:
    """Whatever holds the decoder will do."""
    for given in (model.model, torch.nn.Sequential(model)):
        first = attach(model, "dense")
        assert first is detach(given)
        second = attach(given, "dense", verify=False)
        assert second is detach(model)


def test_a_cell_that_runs_again_replaces(model: Any) -> None:
    stock = logits(model)
    first = attach(model, "dense", gate=None, replace=True)
    second = attach(model, "streaming", tail=0, gate=None, replace=True, **STREAMING)
    assert (False, True) == (first.active, second.active)
    sparse = logits(model)
    assert not torch.equal(sparse, stock)
    wrong: list[tuple[str, dict[str, Any], type[Exception]]] = [
        ("streaming", {"layers": [9]}, sp.ParameterError),
        ("share-prefill", {}, sp.AttachError),
        ("streaming", {"sink": -1}, sp.ParameterError),
        ("no-method", {}, sp.UnknownMethodError),
    ]
    for method, options, error in wrong:
        with pytest.raises(error):
            attach(model, method, replace=True, **options)
        assert second.active, "what fails leaves the model as it was"
        assert torch.equal(logits(model), sparse)
    second.detach()
    assert torch.equal(logits(model), stock)
    with attach(model, "dense"), pytest.raises(sp.AttachError, match="shares its config object with another model"):
        attach(type(model)(model.config).eval(), "dense", replace=True)


def test_a_decoder_that_is_replaced_is_noted(model: Any) -> None:
    stock = logits(model)
    with attach(model, "streaming", tail=0, gate=None, **STREAMING) as handle:
        old, model.model = model.model, transplanted(model.model, transformers.LlamaModel(model.config))
        assert torch.equal(logits(model), stock)
        assert handle.report().notes == {attention.SHARED: 2}
        model.model = old
        assert not torch.equal(logits(model), stock)
        assert handle.report().notes == {attention.SHARED: 2}


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_an_export_is_the_stock_model_and_says_so(model: Any) -> None:
    ids = hf_models.prompt()
    wanted = model(ids).logits
    with attach(model, "streaming", tail=0, gate=None, **STREAMING) as handle:
        program = torch.export.export(model, (ids,), kwargs={"use_cache": False})
        assert handle.report().fallbacks == {compiling.EXPORT: 2}
        assert not torch.allclose(model(ids).logits, wanted, atol=1e-2)
    torch.testing.assert_close(program.module()(ids, use_cache=False).logits, wanted)
    with (
        attach(model, "streaming", tail=0, gate=None, strict=True, **STREAMING),
        pytest.raises(sp.UnsupportedCallError, match="exported"),
    ):
        torch.export.export(model, (ids,), kwargs={"use_cache": False})


def test_the_dry_run_leaves_no_trace() -> None:
    model = hf_models.build("llama").train()
    model.model.layers[0].eval()
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    with attach(model, "dense"):
        assert torch.equal(torch.rand(3), wanted)
        assert model.training
        assert not model.model.layers[0].training


def test_without_transformers_the_adapter_imports_and_the_error_says_what_to_install() -> None:
    code = """
import sys
from sparseprefill.adapters.huggingface import attach
assert "transformers" not in sys.modules
sys.modules["transformers"] = None
try:
    attach(None, "dense")
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 'pip install -e ".[hf]" in a clone' in done.stdout


@pytest.mark.parametrize(
    ("name", "version", "tried"),
    [
        *(("transformers", version, True) for version in ("5.16.1", "5.19.0", "5.24.7")),
        *(("transformers", version, False) for version in ("5.15.1", "5.25.0", "6.0.0", "4.57.6", "unknown")),
        *(("torch", version, True) for version in ("2.11.0+cu130", "2.13.0", "2.14.1")),
        *(("torch", version, False) for version in ("2.15.0+cpu", "3.0.0a0+git1", "2.9.1")),
    ],
)
def test_untested_versions_are_told(name: str, version: str, tried: bool) -> None:
    text = versions.untested(name, version)
    assert (text is None) == tried
    assert text is None or text.startswith(f"{name} {version} is untested (tried: ")


def test_an_untested_version_is_logged_once_and_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.99.0")
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    versions.warn_of_untested.cache_clear()
    for _ in range(2):
        with attach(hf_models.build("llama"), "dense", verify=False) as handle:
            assert handle.active
    said = [record.getMessage() for record in caplog.records if "is untested" in record.getMessage()]
    assert len(said) == 2
    assert "torch 2.99.0 is untested (tried: 2.11 to 2.14)" in said[0]
    assert "transformers 5.99.0 is untested (tried: 5.16 to 5.24)" in said[1]


def test_every_version_of_the_extra_can_be_installed_and_the_first_was_tried() -> None:
    """No cap: what is newer is used, and told."""
    metadata = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = metadata["optional-dependencies"]["hf"]
    assert re.fullmatch(r"transformers>=5\.16\.\d+", wanted)
    assert versions.TRIED["transformers"][0] == (5, 16)
    assert "torch>=2.11" in metadata["dependencies"]
    assert versions.TRIED["torch"][0] == (2, 11)
