"""Models x ways to run them: with a full mask an attached model is the stock model, whichever way its weights come."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sparseprefill.adapters.huggingface import attach
from torch import nn
from transformers import LlamaForCausalLM, StaticCache

import sparseprefill as sp
from helpers import hf_models
from helpers.hf_models import logits

TOKENS = 6
Run = Callable[[Any], torch.Tensor]


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    return model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, **options)


def padded_logits(model: Any) -> Any:
    inputs = hf_models.padded()
    return model(**inputs).logits[inputs["attention_mask"].bool()]


def right_padded_logits(model: Any) -> Any:
    inputs = hf_models.padded()
    inputs = {name: x.flip(-1) for name, x in inputs.items()}
    return model(**inputs).logits[inputs["attention_mask"].bool()]


def plain(model: Any) -> Any:
    return generate(model, {"input_ids": hf_models.prompt()})


def left_padded(model: Any) -> Any:
    return generate(model, hf_models.padded())


def chunked(model: Any) -> Any:
    return generate(model, hf_models.padded(), prefill_chunk_size=32)


def static(model: Any) -> Any:
    return generate(model, hf_models.padded(), cache_implementation="static", disable_compile=True)


def beams(model: Any) -> Any:
    return generate(model, hf_models.padded(lefts=(0, 11)), num_beams=3)


def second_turn(model: Any) -> Any:
    first = generate(model, {"input_ids": hf_models.prompt(60)}, return_dict_in_generate=True)
    more = torch.cat([first.sequences, hf_models.prompt(40, seed=5)], -1)
    return generate(model, {"input_ids": more}, past_key_values=first.past_key_values)


def by_hand(model: Any) -> Any:
    ids = hf_models.prompt(90)
    first = model(ids[:, :48], use_cache=True)
    return torch.cat([first.logits, model(ids[:, 48:], past_key_values=first.past_key_values).logits], 1)


def lookup(model: Any) -> Any:
    ids = hf_models.prompt(30).repeat(1, 3)
    return generate(model, {"input_ids": ids}, prompt_lookup_num_tokens=4)


RUNS: list[Run] = [
    *(logits, padded_logits, right_padded_logits, by_hand),
    *(plain, left_padded, chunked, static, beams, second_turn),
]
CASES = [*product(hf_models.FAMILIES, RUNS), ("llama", lookup), ("gpt-oss", lookup)]


@pytest.mark.parametrize(("family", "run"), CASES, ids=lambda one: getattr(one, "__name__", one))
@torch.no_grad()
def test_a_full_mask_is_the_stock_model(family: str, run: Run) -> None:
    model = hf_models.build(family)
    wanted = run(model)
    with attach(model, "dense", block=32, verify=False) as handle:
        got = run(model)
    if wanted.is_floating_point():
        close(got, wanted)
        assert torch.equal(run(model), wanted), "detached, it must be the stock model to the bit"
    else:
        assert torch.equal(got, wanted)
    report = handle.report()
    assert not report.fallbacks
    modes = [layer.mode for layer in report.layers]
    assert hf_models.SLIDING_LAYERS.get(family, 0) == modes.count("window")
    assert 2 - modes.count("window") == modes.count("sparse")


@pytest.mark.parametrize("family", hf_models.FAMILIES)
@torch.no_grad()
def test_a_streaming_mask_changes_the_logits(family: str) -> None:
    model = hf_models.build(family)
    wanted = logits(model)
    with attach(model, "streaming", tail=0, sink=16, window=16, block=16) as handle:
        got = logits(model)
    density = handle.report().density
    if hf_models.SLIDING_LAYERS.get(family) == 2:
        close(got, wanted)  # bands alone: exact whatever the method
        assert density is None
        return
    assert (got - wanted).abs().max() > 0.05
    assert density is not None
    assert density < 0.8


class Bringer:
    """What accelerate's AlignDevicesHook does: weights wait elsewhere and come for the module's forward alone."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.execution_device = device
        self._waiting = {name: x.detach().clone() for name, x in module.named_parameters(recurse=False)}
        self.after(module)
        module.register_forward_pre_hook(self.before)
        module.register_forward_hook(self.after)

    def before(self, module: nn.Module, args: Any = None) -> tuple[Any, ...] | None:
        for name, x in self._waiting.items():
            setattr(module, name, nn.Parameter(x.to(self.execution_device), requires_grad=False))
        return tuple(x.to(self.execution_device) if isinstance(x, torch.Tensor) else x for x in args)

    def after(self, module: nn.Module, *_: Any) -> None:
        for name, x in self._waiting.items():
            setattr(module, name, nn.Parameter(x.to("meta"), requires_grad=False))


class Several:
    """Hooks in one, as accelerate's SequentialHook."""

    def __init__(self, *hooks: object) -> None:
        self.hooks = hooks


def offload(model: Any, *, several: bool) -> None:
    """Every weight to the meta device, one hook a module."""
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            hook = Bringer(module, torch.device("cpu"))
            module._hf_hook = Several(object(), hook) if several else hook


def accelerated(model: Any, kind: str, folder: Path) -> Any:
    """The model with weights that accelerate keeps elsewhere."""
    accelerate, cpu = pytest.importorskip("accelerate"), torch.device("cpu")
    if kind == "cpu":
        accelerate.cpu_offload(model, execution_device=cpu)
    elif kind == "disk":
        accelerate.disk_offload(model, str(folder), execution_device=cpu)
    else:
        places = {"model": "disk", "lm_head": "cpu"}
        model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["one hook", "several hooks", "cpu", "disk", "dispatch"])
def test_weights_that_come_layer_by_layer(kind: str, tmp_path: Path) -> None:
    model = hf_models.build("llama")
    wanted = logits(model)
    if kind.endswith(("hook", "hooks")):
        offload(model, several=kind == "several hooks")
        assert "meta" == model.device.type
    else:
        model = accelerated(model, kind, tmp_path)
    with attach(model, "dense", block=32) as handle:
        close(logits(model), wanted)
    assert ["sparse", "sparse"] == [layer.mode for layer in handle.report().layers]
    assert torch.equal(wanted, logits(model))


class LowRank(nn.Module):
    """A linear layer with a low-rank term beside it, as PEFT's LoRA puts in its place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + self.up(self.down(x))
        return found


class Quantised(nn.Module):
    """A linear layer of int8 weights with a scale a row, as quantisers (AWQ, GPTQ, bitsandbytes) put in its place."""

    scale: torch.Tensor
    weight: torch.Tensor

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        scale = base.weight.detach().abs().amax(-1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (base.weight.detach() / scale).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


@pytest.mark.parametrize("kind", [LowRank, Quantised])
@torch.no_grad()
def test_projections_of_another_class(kind: Callable[[nn.Linear], nn.Module]) -> None:
    model = hf_models.build("llama")
    before = logits(model)
    torch.manual_seed(0)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, kind(getattr(layer.self_attn, name)))
    wanted = logits(model)
    assert not torch.allclose(before, wanted, atol=1e-4), "the new layers compute something else"
    with attach(model, "dense", block=32) as handle:
        close(logits(model), wanted)
    assert ["sparse", "sparse"] == [layer.mode for layer in handle.report().layers]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    model = hf_models.build("llama").to(dtype)
    with attach(model, "dense", block=32), torch.no_grad():
        assert model(hf_models.prompt()).logits.dtype == dtype


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
    close(got, wanted)
    assert [layer.window_calls for layer in handle.report().layers] == [1, 1]


def test_what_sdpa_ignores_is_ignored_and_noted() -> None:
    model = hf_models.build("gemma2-sdpa")
    with attach(model, "dense", block=32) as handle:
        logits(model)
    assert any("softcap" in note for note in handle.report().notes)
    assert "note: sdpa ignores" in str(handle.report())
