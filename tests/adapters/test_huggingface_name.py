"""Attaching by the name of the attention implementation: equal to `attach`, and clean to leave."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sparseprefill.adapters.huggingface import attach, by_name, detach, handle_of, register
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import sparseprefill as sp
from helpers import hf_models
from helpers.hf_models import STREAMING, logits

GIVEN: dict[str, Any] = {"gate": None, "tail": 0, **STREAMING}
IDS = hf_models.prompt(90)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SPARSEPREFILL", raising=False)
    register("streaming", **GIVEN)
    yield
    by_name.TOLD.clear()


@pytest.fixture
def model() -> Any:
    return hf_models.build("llama")


def named(model: Any) -> Any:
    """A copy of a model, under the name."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("sparseprefill")
    return other


def generated(model: Any, **options: Any) -> Any:
    return model.generate(IDS, max_new_tokens=4, do_sample=False, **options)


def report(model: Any) -> Any:
    """The report of a model that was attached by the name."""
    handle = handle_of(model)
    assert handle is not None
    return handle.report()


@torch.no_grad()
def plain(model: Any, **inputs: Any) -> Any:
    """A model's output for a prompt, or for other inputs."""
    return model(**(inputs or {"input_ids": IDS}))


RUNS: dict[str, Callable[[Any], Any]] = {
    "logits": logits,
    "generate": generated,
    "chunks": lambda model: generated(model, prefill_chunk_size=32),
    "static": lambda model: generated(model, cache_implementation="static"),
    "padded": lambda model: plain(model, **hf_models.padded()).logits,
    "embeddings": lambda model: plain(model, inputs_embeds=model.get_input_embeddings()(IDS)).logits,
    "hidden": lambda model: torch.stack(plain(model, input_ids=IDS, output_hidden_states=True).hidden_states),
    "draft": lambda model: generated(model, prompt_lookup_num_tokens=20),
}


@pytest.mark.parametrize("run", RUNS, ids=list(RUNS))
def test_the_first_forward_is_that_of_attach(model: Any, run: str) -> None:
    wanted, given = copy.deepcopy(model), named(model)
    with attach(wanted, "streaming", **GIVEN) as handle:
        expected = RUNS[run](wanted)
    assert torch.equal(expected, RUNS[run](given))
    assert str(handle.report()) == str(report(given))
    assert report(given).layers[0].sparse_calls > 0


@pytest.mark.parametrize("family", [name for name in hf_models.FAMILIES if name != "llama"])
def test_families_are_equal(family: str) -> None:
    model = hf_models.build(family)
    model.set_attn_implementation(model.get_correct_attn_implementation(None))
    given = named(model)
    with attach(model, "streaming", **GIVEN):
        expected = [generated(model), logits(model)]
    assert all(torch.equal(a, b) for a, b in zip(expected, [generated(given), logits(given)], strict=True))


def test_a_method_that_remembers_goes_on_in_the_second_chunk(model: Any) -> None:
    """Chunks over a cache that the first forward makes itself, which nothing tells of before."""

    def run(model: Any) -> Any:
        with torch.no_grad():
            cache = model(IDS[:, :64], use_cache=True).past_key_values
            return model(IDS[:, 64:], past_key_values=cache).logits

    options: dict[str, Any] = {"gate": None, "tail": 0, "theta": 0.0, "block": 16, "step": 2, "init_tokens": 16}
    given = named(model)
    register("anchor-attention", **options)
    with attach(model, "anchor-attention", **options) as handle:
        expected = run(model)
    assert torch.equal(expected, run(given))
    assert handle.report().notes == report(given).notes


def test_another_name_detaches_and_the_name_attaches_again(model: Any) -> None:
    stock, given = logits(model), named(model)
    sparse = logits(given)
    assert not torch.equal(stock, sparse)
    first = handle_of(given)
    given.set_attn_implementation("sdpa")
    assert torch.equal(stock, logits(given))
    assert "sdpa" == given.config._attn_implementation
    assert (0, 0) == (len(given.model._forward_hooks), len(given.model._forward_pre_hooks))
    assert first is not None
    assert not first.report().notes
    given.set_attn_implementation("sparseprefill")
    given.set_attn_implementation("sparseprefill")
    assert torch.equal(sparse, logits(given))
    assert handle_of(given) is first
    register("dense", gate=None, block=16)
    assert torch.equal(sparse, logits(given))  # it was attached before
    given.set_attn_implementation("sparseprefill")
    torch.testing.assert_close(stock, logits(given))
    assert "dense" == report(given).method
    assert detach(given) is handle_of(given)
    assert torch.equal(stock, logits(given))


def test_attach_goes_before_the_name(model: Any) -> None:
    given, stock = named(model), logits(model)
    with attach(given, "dense", gate=None, block=16) as handle:
        logits(given)
    assert 1 == handle.report().layers[0].sparse_calls
    assert torch.equal(stock, logits(given))
    given.set_attn_implementation("sparseprefill")
    logits(given)
    with pytest.raises(sp.AttachError, match="already attached"):
        attach(given, "dense")
    given.set_attn_implementation("sdpa")
    attach(given, "dense").detach()
    assert torch.equal(stock, logits(given))


def test_saved_and_loaded(model: Any, tmp_path: Path) -> None:
    given, sparse = named(model), logits(named(model))
    logits(given)
    given.save_pretrained(tmp_path / "one")
    assert "sparseprefill" not in (tmp_path / "one" / "config.json").read_text(encoding="utf-8")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert torch.equal(logits(model), logits(loaded))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one", attn_implementation="sparseprefill")
    assert torch.equal(sparse, logits(loaded))
    assert torch.equal(logits(model), logits(copy.deepcopy(loaded)))


def test_only_the_decoder_of_a_model_of_images_is_attached() -> None:
    images = torch.zeros(1, 3, 8, 8)
    ids = torch.cat([torch.full((1, 4), hf_models.VOCABULARY - 1), IDS % 95 + 1], 1)
    wanted, given = hf_models.llava(), hf_models.llava()
    given.set_attn_implementation("sparseprefill")
    with torch.no_grad(), attach(wanted, "streaming", **GIVEN):
        expected = wanted(input_ids=ids, pixel_values=images).logits
        assert torch.equal(expected, given(input_ids=ids, pixel_values=images).logits)
    assert "sdpa" == given.config.vision_config._attn_implementation


@torch.no_grad()
def seen(model: Any) -> Any:
    """Logits for an image, and text behind it."""
    ids = torch.cat([torch.full((1, 4), hf_models.VOCABULARY - 1), IDS % 95 + 1], 1)
    return model(input_ids=ids, pixel_values=torch.zeros(1, 3, 8, 8)).logits


def test_a_decoder_is_not_attached_by_the_name_of_a_vision_tower() -> None:
    model = hf_models.llava()
    model.set_attn_implementation({"vision_config": "sparseprefill", "text_config": "eager"})
    says = (
        r"is 'sparseprefill' for CLIPVisionConfig, but .*LlamaModel, runs 'eager': give the decoder that name.*choose"
    )
    for _ in range(2):
        with pytest.raises(sp.AttachError, match=says):
            seen(model)
    assert handle_of(model) is None
    assert "eager" == model.config.text_config._attn_implementation
    model.set_attn_implementation({"text_config": "sparseprefill"})
    seen(model)
    assert "sparse" == report(model).layers[0].mode


@pytest.mark.parametrize("by_name", [True, False])
def test_a_vision_tower_of_an_attached_model_is_settled(by_name: bool) -> None:
    model = hf_models.llava()
    if by_name:
        model.set_attn_implementation("sparseprefill")
        seen(model)
    handle = handle_of(model) if by_name else attach(model, "streaming", **GIVEN)
    expected = seen(model)
    model.set_attn_implementation({"vision_config": "sparseprefill"})
    assert torch.equal(expected, seen(model))
    assert handle is handle_of(model)
    assert "sdpa" == model.config.vision_config._attn_implementation


def test_threads_attach_a_model_once(model: Any) -> None:
    """Those whose forwards begin while another attaches run stock."""
    given = named(model)
    found: list[Any] = []
    told: list[Any] = []
    expected = logits(named(model)), logits(model)
    by_name.TOLD.append(told.append)
    threads = [threading.Thread(target=lambda: found.append(logits(given))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [True] * 3 == [any(torch.equal(one, known) for known in expected) for one in found]
    assert 1 == len(told)
    assert torch.equal(expected[0], logits(given))


def test_models_are_let_go(model: Any) -> None:
    given = named(model)
    logits(given)
    gone = weakref.ref(given.model)
    before = len(by_name._known)
    del given
    gc.collect()
    assert gone() is None
    assert before > len(by_name._known)


def test_caches_are_let_go(model: Any) -> None:
    given = named(model)
    found = generated(given, return_dict_in_generate=True)
    gone = weakref.ref(found.past_key_values)
    del found
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_is_the_stock_models(model: Any, checkpointing: bool) -> None:
    given, found = named(model), []
    for one in (model, given):
        one.train()
        if checkpointing:
            one.gradient_checkpointing_enable()
        one(IDS, labels=IDS).loss.backward()
        found.append([weights.grad for weights in one.parameters()])
        one.eval()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    logits(given)
    assert 1 == report(given).layers[0].sparse_calls


def test_a_model_that_cannot_be_attached_says_so_every_time() -> None:
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=32)).eval()
    model.set_attn_implementation("sparseprefill")
    for _ in range(2):
        with pytest.raises(
            sp.AttachError, match=r"no attention layer to attach to.*choose another attn_implementation"
        ):
            model(IDS)
    model.set_attn_implementation("sdpa")
    model(IDS)


def test_an_encoder_decoder_says_what_to_choose() -> None:
    sizes: dict[str, Any] = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "ffn_dim")}
    heads: dict[str, Any] = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(vocab_size=97, d_model=32, **sizes, **heads)
    model = transformers.BartForConditionalGeneration(config).eval()
    model.set_attn_implementation("sparseprefill")
    with pytest.raises(sp.AttachError, match=r"encoder-decoder.*by the name 'sparseprefill': choose another"):
        plain(model)


def test_a_layer_alone_says_how_to_attach(model: Any) -> None:
    given = named(model)
    attention, states = given.model.layers[0].self_attn, torch.zeros(1, 20, 32)
    with pytest.raises(sp.AttachError, match=r"attach\(model, 'rowmax'\)"):
        attention(states, given.model.rotary_emb(states, torch.arange(20)[None]), None)


def test_compiled(model: Any) -> None:
    given = named(model)
    torch.testing.assert_close(logits(named(model)), logits(torch.compile(given, backend="eager")))
    assert handle_of(given) is not None


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("rowmx", sp.UnknownMethodError, "SPARSEPREFILL of the environment: no method is named 'rowmx'; did you mean"),
        ('{"method": "rowmax", "tial": 3}', sp.ParameterError, "did you mean 'tail', an option of attach"),
        ('{"method": "rowmax", "tail": -3}', sp.ParameterError, "tail is -3"),
        ('{"method": ', sp.ParameterError, "is not JSON"),
        ('{"method": "rowmax", "model": 3}', sp.ParameterError, "pass arguments of attach"),
    ],
)
def test_the_environment_is_checked_at_once(
    text: str, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEPREFILL", text)
    with pytest.raises(error, match=says):
        register()


@pytest.mark.parametrize(("text", "method"), [("", "rowmax"), ("xattention", "xattention"), ('{"tail": 64}', "rowmax")])
def test_the_environment_chooses(text: str, method: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEPREFILL", text)
    register()
    given = named(model)
    logits(given)
    assert method == report(given).method


def test_arguments_go_before_the_environment(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEPREFILL", "rowmx")
    register("dense")
    with pytest.raises(sp.ParameterError, match="tail is -1"):
        register("dense", tail=-1)
    with pytest.raises(sp.ParameterError, match=r"layers is \[-2\]: pass indices from 0"):
        register("dense", layers=[-2])


def test_the_harness_needs_no_code_of_ours(model: Any, tmp_path: Path) -> None:
    host = pytest.importorskip("lm_eval.models.huggingface")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(n): n for n in range(97)}, unk_token="0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="0").save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    lm = host.HFLM(pretrained=str(tmp_path), attn_implementation="sparseprefill", device="cpu", dtype="float32")
    lm._model_call(IDS)
    assert isinstance(lm.model, LlamaForCausalLM)
    assert torch.equal(logits(named(model)), lm._model_call(IDS))
    assert "streaming" == report(lm.model).method


def test_a_tool_runs_with_the_name_and_its_report(tmp_path: Path) -> None:
    script = tmp_path / "tool.py"
    script.write_text(
        "import sys\nfrom helpers import hf_models\nmodel = hf_models.build('llama')\n"
        "model.set_attn_implementation('sparseprefill')\nprint(sys.argv[1:], hf_models.logits(model).shape[1])\n",
        encoding="utf-8",
    )

    def run(chosen: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sparseprefill.adapters.huggingface", *arguments]
        environment = {**os.environ, "SPARSEPREFILL": chosen, "PYTHONPATH": str(Path(__file__).parents[1])}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    done = run(json.dumps({"method": "streaming", **GIVEN}), str(script), "--one")
    assert (0, "['--one'] 90\n") == (done.returncode, done.stdout), done.stderr
    assert "streaming on LlamaForCausalLM" in done.stderr
    assert "did you mean 'rowmax'" in run("rowmx", str(script)).stderr
    assert "usage:" in run("").stderr
    assert "no model ran under" in run("", "this").stderr
