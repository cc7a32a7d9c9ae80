"""Which models are refused, and why; masks; compilation; imports."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from sparseprefill.adapters.huggingface import attach, masks, versions
from torch import nn
from transformers import LlamaForCausalLM, StaticCache, masking_utils
from transformers.models.llama import modeling_llama

import sparseprefill as sp

from . import hf_models

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def bloom() -> nn.Module:
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4))


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SMALL))


def mamba() -> nn.Module:
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=8)
    return transformers.MambaForCausalLM(config)


class NamedAttention(modeling_llama.LlamaAttention):
    """Drops its mask under an implementation that it does not know."""

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if self.config._attn_implementation in ("eager", "sdpa"):
            kwargs["attention_mask"] = attention_mask
        else:
            kwargs["attention_mask"] = None
        return super().forward(*args, **kwargs)


class BiasedAttention(modeling_llama.LlamaAttention):
    """Mixes something into its keys that depends on the implementation in use."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return out * len(str(self.config._attn_implementation)), weights


def llama_with(attention: type[nn.Module]) -> nn.Module:
    model = hf_models.build("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = attention
    return cast(nn.Module, model)


REFUSED: list[tuple[Any, str]] = [
    (t5, "encoder-decoder"),
    (bloom, "does not use transformers' AttentionInterface"),
    (bert, "no attention layer to attach to: the layer is not causal"),
    (mamba, "no attention layer to attach to: none of them calls"),
    (lambda: llama_with(NamedAttention), r"branches on the name of its attention implementation \(in NamedAttention\)"),
    (lambda: llama_with(BiasedAttention), "does not compute plain attention"),
    (lambda: nn.Linear(3, 3), "holds no transformers decoder"),
    (lambda: "llama", "not a torch module"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "reason"), REFUSED)
def test_models_that_are_refused(make: Any, reason: str) -> None:
    model = make()
    with pytest.raises(sp.AttachError, match=reason):
        attach(model, "dense", block=32)
    config = getattr(model, "config", None)
    assert config is None or not str(config._attn_implementation).startswith("sparseprefill")


def test_a_model_that_fails_the_dry_run_can_be_attached_without() -> None:
    model = hf_models.build("llama")

    def fail(*_: object) -> None:
        raise RuntimeError("needs pictures")

    hook = model.register_forward_pre_hook(fail)
    with pytest.raises(sp.AttachError, match=r"does not run on plain token ids.*needs pictures.*verify=False"):
        attach(model, "dense")
    with attach(model, "dense", verify=False) as handle:
        hook.remove()
        with torch.no_grad():
            model(hf_models.prompt())
    assert len(handle.report().layers) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    model = hf_models.build("llama").to(dtype)
    with attach(model, "dense", block=32), torch.no_grad():
        assert model(hf_models.prompt()).logits.dtype == dtype


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


def test_a_bare_decoder_and_a_multimodal_model() -> None:
    text = transformers.LlamaConfig(**hf_models.SIZES)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8
    )
    options: dict[str, Any] = {"text_config": text, "vision_config": vision, "image_token_id": 96}
    llava = transformers.LlavaConfig(**options)
    bare, seeing = transformers.LlamaModel(text), transformers.LlavaForConditionalGeneration(llava)
    eyes = seeing.model.vision_tower.config._attn_implementation
    for model in (bare, seeing, transformers.LlamaForSequenceClassification(text)):
        with attach(model, "dense", block=32) as handle:
            assert seeing.model.vision_tower.config._attn_implementation == eyes
        assert [layer.layer for layer in handle.report().layers] == [0, 1]


def patterns() -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.integers(1, 12))


@given(window=patterns(), past=st.integers(0, 9), rows=st.integers(2, 9), spare=st.integers(0, 5), data=st.data())
def test_a_compact_mask_says_what_the_stock_mask_says(
    window: int | None, past: int, rows: int, spare: int, data: st.DataObject
) -> None:
    total = past + rows
    padding = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=total, max_size=total), min_size=1, max_size=3))
    )
    function: Any = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    sizes: dict[str, Any] = {"batch_size": len(padding), "q_length": rows, "kv_length": total + spare, "q_offset": past}
    pattern = masks.classify(function, window, True)
    assert pattern is not None
    assert pattern == masks.Pattern(window)
    asked = {**sizes, "kv_offset": 0, "mask_function": function, "attention_mask": padding, "local_size": window}
    order = masks.Order.of(pattern, masking_utils.sdpa_mask, asked)
    mask, compact = masks.LazyMask.of(order), order.compact()
    stock: Any = masking_utils.sdpa_mask(**asked, allow_is_causal_skip=False)
    assert mask.shape == (len(padding), 1, rows, total + spare)
    assert torch.equal(mask & True, stock.expand(mask.shape)), "whoever reads it reads the stock mask"
    assert compact.used == total
    assert compact.window == window
    if not compact.holes:
        q = torch.zeros(len(padding), 1, rows, 8)
        k = torch.zeros(len(padding), 1, total, 8)
        call = sp.AttentionCall(q, k, k, starts=compact.starts, lengths=compact.lengths, window=compact.window)
        real = padding[:, past:, None]
        assert torch.equal(call.geometry.visible() & real, stock[:, 0, :, :total] & real)


def test_masks_of_other_patterns_are_left_alone() -> None:
    causal = masking_utils.causal_mask_function
    chunked = masking_utils.chunked_causal_mask_function(24, torch.zeros(2, dtype=torch.long))
    both = masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(torch.zeros(1, 4)))
    assert masks.classify(causal, None, False) is None
    assert masks.classify(chunked, 24, True) is None
    assert masks.classify(both, None, True) is None
    assert masks.classify(masking_utils.bidirectional_mask_function, 8, True) is None


def reset_compiler() -> None:
    compiler: Any = torch._dynamo
    compiler.reset()


@torch.no_grad()
def test_compiled_decoding() -> None:
    model, ids = hf_models.build("llama"), hf_models.prompt(40, 2)
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False)[:, 40:]
    reset_compiler()
    with attach(model, "dense", block=32) as handle:
        cache = StaticCache(config=model.config, max_cache_len=64)
        step: Any = torch.compile(model.forward, backend="eager", fullgraph=True)
        token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        tokens = [token]
        for _ in range(4):
            token = step(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
            tokens.append(token)
    reset_compiler()
    assert torch.equal(torch.cat(tokens, 1), wanted)
    assert [layer.sparse_calls for layer in handle.report().layers] == [1, 1]


@torch.no_grad()
def test_compiled_prefill_breaks_the_graph_and_stays_right() -> None:
    model = hf_models.build("mistral-sliding")
    wanted = model(hf_models.prompt()).logits
    reset_compiler()
    with attach(model, "dense", block=32) as handle:
        compiled: Any = torch.compile(model, backend="eager")
        got = compiled(hf_models.prompt()).logits
    reset_compiler()
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    assert [layer.window_calls for layer in handle.report().layers] == [1, 1]


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
    assert 'pip install "sparseprefill[hf]"' in done.stdout


def test_a_class_made_in_a_session_can_be_attached() -> None:
    class Mine(LlamaForCausalLM):
        pass

    torch.manual_seed(0)
    make: Any = Mine
    with attach(make(transformers.LlamaConfig(**hf_models.SIZES)).eval(), "dense") as handle:
        assert handle.report().host == "Mine"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_inside_autocast(dtype: torch.dtype, implementation: str) -> None:
    """Values come in the type of autocast, queries and keys in another; what is measured is not rounded to it."""
    model, ids = hf_models.build("llama").to(dtype), hf_models.prompt()
    types: set[torch.dtype] = set()
    model.set_attn_implementation(implementation)

    def observe(call: sp.AttentionCall, result: sp.Result) -> None:
        types.update((call.q.dtype, call.k.dtype, call.v.dtype, result.out.dtype))
        lse = torch.logsumexp(scores(call), -1)
        torch.testing.assert_close(result.lse.float(), lse, atol=1e-3, rtol=1e-3)

    with torch.autocast("cpu", dtype=torch.float16):
        wanted = model(ids, use_cache=False).logits
        with attach(model, "dense", gate=None, strict=True, observe=observe) as handle:
            got = model(ids, use_cache=False).logits
            assert torch.is_autocast_enabled("cpu")
    assert types == {torch.float16}
    assert got.dtype == wanted.dtype
    assert (got - wanted).float().norm() < 0.01 * wanted.float().norm()
    assert [layer.sparse_calls for layer in handle.report().layers] == [1, 1]


def scores(call: sp.AttentionCall) -> torch.Tensor:
    """Float32, masked."""
    k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    found = call.q.float() @ k.float().mT * call.softmax_scale
    return found.masked_fill(~call.geometry.visible()[:, None], -torch.inf)


@pytest.mark.parametrize(
    ("name", "version", "tried"),
    [
        *(("transformers", version, True) for version in ("5.16.1", "5.19.0", "5.23.7")),
        *(("transformers", version, False) for version in ("5.15.1", "5.24.0", "6.0.0", "4.57.6", "unknown")),
        *(("torch", version, True) for version in ("2.11.0+cu130", "2.13.0")),
        *(("torch", version, False) for version in ("2.15.0", "2.14.1+cpu", "3.0.0a0+git1", "2.9.1")),
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
    assert "torch 2.99.0 is untested (tried: 2.11 to 2.13)" in said[0]
    assert "transformers 5.99.0 is untested (tried: 5.16 to 5.23)" in said[1]


def test_every_version_of_the_extra_can_be_installed_and_the_first_was_tried() -> None:
    """No cap: what is newer is used, and told."""
    metadata = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = metadata["optional-dependencies"]["hf"]
    assert re.fullmatch(r"transformers>=5\.16\.\d+", wanted)
    assert versions.TRIED["transformers"][0] == (5, 16)
    assert "torch>=2.11" in metadata["dependencies"]
    assert versions.TRIED["torch"][0] == (2, 11)
