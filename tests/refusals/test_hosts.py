"""What `attach` and sessions refuse: options, methods, and models that cannot be attached."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, cast

import pytest
import torch
import transformers
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.huggingface import unread as reading
from sparseprefill.adapters.session.options import MOST_LAYERS
from torch import nn
from transformers.models.llama import modeling_llama

import sparseprefill as sp
from helpers import hf_models
from helpers.hf_models import STREAMING
from helpers.refusals import Refusal, over, parameter_error, refused, unknown_method
from helpers.sessions import session

METHOD = sp.build("streaming", **STREAMING)


class Torn:
    """Neither true nor false."""

    def __bool__(self) -> bool:
        raise RuntimeError("neither")


TAIL = r"tail is .*: pass a number of query rows from 0 to 2147483647"
MORE = rf"which has more than {MOST_LAYERS} indices: pass"

# What `attach` and `Session` have in common: an option, and the words.
SHARED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"min_query": rows}, r"min_query is .*: pass an integer from 2")
        for rows in (1, 0, -3, True, 2.5, 16.0, "16", 10**30, 1 << 31)
    ),
    *(({"layers": layers}, "layers is") for layers in (3, [], "12", ["first"], [True], [1.0], {0: 1}, [0, [1]])),
    ({"layers": [0, -1]}, r"layers is \[0, -1\]: pass indices from 0"),
    ({"layers": []}, "layers is empty: pass the layers to run sparse"),
    ({"layers": range(1 << 20)}, rf"layers is range\(0, 1048576\), {MORE}"),
    *(({"tail": tail}, TAIL) for tail in (-1, 1.5, True, None, "128", 1 << 31)),
    *(
        ({name: value}, rf"{name} is {shown}: pass True or False")
        for name in ("strict", "measure")
        for value, shown in (("no", "'no'"), (None, "None"), (0, "0"), (1, "1"), (Torn(), ".*Torn object at .*"))
    ),
    ({"observe": 3}, "observe is 3: pass a function of a call and its result, or None"),
    ({"gate": True}, "gate is True"),
    ({"recall_every": -1}, "^recall_every is -1: pass N to measure one of N prefills, an integer from 0"),
    ({"recall_every": True}, "^recall_every is True: pass"),
    ({"recall_every": 0.5}, "^recall_every is 0.5: pass"),
    ({"strict_recall": 1.5}, "^strict_recall is 1.5: pass a number from 0 to 1, or None"),
    ({"strict_recall": math.nan}, "^strict_recall is nan: pass a number"),
    ({"strict_recall": False}, "^strict_recall is False: pass a number"),
    ({"strict_recall": 0.9, "recall_every": 0}, "^strict_recall is 0.9, but recall_every is 0, so nothing is"),
]
SESSION = [
    *(parameter_error(words, session, METHOD, **options) for options, words in SHARED),
    parameter_error(r"min_query is .*: pass an integer from 2", session, METHOD, min_query=None),
    parameter_error(f"layers is .*, {MORE}", session, METHOD, layers=range(MOST_LAYERS + 1)),
]


@cache
def llama() -> Any:
    return hf_models.build("llama")


def attached(method: Any = "streaming", **options: Any) -> object:
    return attach(llama(), method, **options)


ATTACH = [
    *(parameter_error(words, attached, **options) for options, words in SHARED),
    parameter_error("layers names 7: the model's attention layers are 0, 1", attached, layers=[7]),
    parameter_error("layers names 2, 7: the model's layers are 0, 1", attached, layers=[1, 7, 2], verify=False),
    *(parameter_error("verify", attached, verify=verify) for verify in ("no", None, 0, 1, Torn())),
    parameter_error("skip_unread is 1: pass True or False", attached, skip_unread=1),
    parameter_error(r"^recall is 2: pass a number from 0 to 1", attached, recall=2),
    unknown_method("anchor-attention", attached, "anchor-atention"),
    parameter_error("theta", attached, "anchor-attention", thetta=1.0),
    parameter_error(r"pass parameters \(block\) with the name", attached, sp.build("dense"), block=16),
    parameter_error("pass the name of a method, or a Pipeline", attached, 5),
    refused(
        *(sp.AttachError, "the last of LlamaForCausalLM's 2 layers is no attention layer"),
        lambda: reading.check(llama(), llama().model, (0,)),
    ),
]


@over(SESSION)
def test_options_of_a_session(refusal: Refusal) -> None:
    refusal.check()


@over(ATTACH)
def test_options_of_attach(refusal: Refusal) -> None:
    refusal.check()
    assert "sdpa" == llama().config._attn_implementation


@pytest.mark.parametrize("ask", [lambda layers: session(METHOD, layers=layers), lambda layers: attached(layers=layers)])
def test_layers_without_an_end_are_read_no_further_than_it_takes(ask: Callable[[Any], object]) -> None:
    endless = itertools.count()
    with pytest.raises(sp.ParameterError, match=f"layers is .*, {MORE} layer indices"):
        ask(endless)
    assert MOST_LAYERS + 1 == next(endless)


SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def bloom() -> nn.Module:
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4))


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZES, intermediate_size=48, num_attention_heads=4))


def mamba() -> nn.Module:
    return transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES, state_size=8))


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


def failing(*on: int, of: str = "") -> Any:
    """A model of whose forwards some fail, by their number from 0; `forwards` are those that ran. of: a part of it, of
    which all fail from then on."""
    model = hf_models.build("llama")
    forwards: list[int] = []
    model.forwards = forwards

    def count(*_: object) -> None:
        forwards.append(len(forwards))
        if forwards[-1] in on or (of and forwards[-1] > min(on)):
            raise RuntimeError("out of luck")

    model.get_submodule(of).register_forward_pre_hook(count)
    return model


def with_logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    model = hf_models.build("llama")
    model.lm_head.register_forward_hook(lambda module, args, out: change(out))
    return model


def reading_all_rows() -> Any:
    """A model whose last row depends on all others after its last layer."""
    model = hf_models.build("llama")
    forward = model.model.forward

    def mixed(*arguments: Any, **more: Any) -> Any:
        found = forward(*arguments, **more)
        found.last_hidden_state = found.last_hidden_state + found.last_hidden_state.mean(1, keepdim=True)
        return found

    model.model.forward = mixed
    return model


UNREAD = "LlamaModel does not say which rows it reads: pass a causal LM"
BEFORE = "as it is, before it is attached: RuntimeError: out of luck.*verify="
MODELS: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (t5, {}, "encoder-decoder"),
    (bloom, {}, "does not use transformers' AttentionInterface"),
    (bert, {}, "no attention layer to attach to: the layer is not causal"),
    (mamba, {}, "no attention layer to attach to: none of them calls"),
    (
        lambda: llama_with(NamedAttention),
        {},
        r"branches on the name of its attention implementation \(in NamedAttention\)",
    ),
    (lambda: llama_with(BiasedAttention), {}, "does not compute plain attention"),
    (lambda: nn.Linear(3, 3), {}, "holds no transformers decoder"),
    (lambda: hf_models.build("llama").model.layers[0], {}, "LlamaDecoderLayer holds no .*: pass a whole model"),
    (lambda: hf_models.build("llama").lm_head, {}, "Linear holds no .*: pass a whole model"),
    (lambda: "llama", {}, "not a torch module"),
    # A stock model that fails, at once or in the middle: what fails with our attention is run once more without it.
    (
        lambda: hf_models.build("llama").to("meta"),
        {},
        "on the meta device hold no numbers: load the model's weights",
    ),
    (lambda: failing(0, of="model"), {}, BEFORE),
    (lambda: failing(1, 2), {}, BEFORE),
    (
        lambda: with_logits(lambda out: out + torch.randn_like(out) * out.std()),
        {},
        "gives other logits from run to run",
    ),
    (
        lambda: with_logits(lambda out: out * torch.inf),
        {},
        "before it is attached, gives logits that are not finite",
    ),
    *(
        (lambda: hf_models.build("llama").model, {"skip_unread": True, "verify": verify}, UNREAD)
        for verify in (True, False)
    ),
    (reading_all_rows, {"skip_unread": True}, "reads more rows of its last layer than logits_to_keep names"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "options", "words"), MODELS, ids=[words for *_, words in MODELS])
def test_models(make: Callable[[], Any], options: dict[str, Any], words: str) -> None:
    model = make()
    with pytest.raises(sp.AttachError, match=words):
        attach(model, "streaming" if options else "dense", **options)
    config = getattr(model, "config", None)
    assert config is None or not str(config._attn_implementation).startswith("sparseprefill")


def test_a_failure_with_our_attention_alone_is_ours() -> None:
    model = failing(1)
    with pytest.raises(sp.AttachError, match="fails with another attention function: RuntimeError: out of luck"):
        attach(model, "dense")
    assert [0, 1, 2] == model.forwards


def test_a_model_that_fails_the_dry_run_can_be_attached_without() -> None:
    model = failing(0, of="model")
    words = r"does not run on plain token ids.*out of luck.*verify=False"
    with pytest.raises(sp.AttachError, match=words):
        attach(model, "dense")
    with attach(model, "dense", verify=False) as handle:
        assert handle.active


@pytest.mark.parametrize(
    ("on", "run"),
    [
        ((0,), "2 x 64 random tokens without padding"),
        (range(9), "2 x 64 random tokens and left padding, through LlamaModel alone"),
    ],
)
def test_what_the_dry_run_had_to_leave_out_is_told(
    on: Iterable[int], run: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A model may need other inputs than token ids: that is no reason to refuse it, as long as its decoder runs."""
    with attach(failing(*on), "dense", gate=None) as handle:
        assert 2 == len(handle.report().layers)
    said = f"dry run: {run}, since with 2 x 64 random tokens and left padding LlamaForCausalLM fails: RuntimeError: out"
    (note,) = handle.report().notes
    assert note.startswith(said)
    assert ("alone" in run) == any(said in record.getMessage() for record in caplog.records)
