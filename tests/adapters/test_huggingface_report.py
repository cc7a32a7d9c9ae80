"""What a report says: densities, layers that ran dense and why, training, and stages that object."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from sparseprefill.adapters.huggingface import attach, attention
from sparseprefill.adapters.session import session as sessions
from torch.utils.checkpoint import checkpoint

import sparseprefill as sp
from helpers import hf_models
from helpers.hf_models import STREAMING, logits


@pytest.fixture
def model() -> Any:
    return hf_models.build("llama")


@torch.no_grad()
def test_report(model: Any) -> None:
    with attach(model, "anchor-attention", tail=0, theta=1.0, step=2, block=16, init_tokens=16) as handle:
        assert [layer.mode for layer in handle.report().layers] == ["unused", "unused"]
        model.generate(hf_models.prompt(120), max_new_tokens=4, do_sample=False)
    report = handle.report()
    assert (report.method, report.host, report.implementation) == ("anchor-attention", "LlamaForCausalLM", "sdpa")
    assert (report.min_query, report.grain, report.short_forwards) == (16, 32, 3)
    layer = report.layers[1]
    assert (layer.layer, layer.mode, layer.sparse_calls, layer.dense_calls) == (1, "sparse", 1, 0)
    assert (layer.batch, layer.query_length, layer.key_length) == (1, 120, 120)
    assert layer.density is not None
    assert 0 < layer.density < 1
    assert layer.mean_density is None
    assert report.fallbacks == {}
    text = str(report)
    assert "anchor-attention on LlamaForCausalLM (dense: sdpa; grain 32 tokens)" in text
    assert "layer   1  sparse" in text
    assert f"density {layer.density:.3f}" in text
    assert "dense by length (fewer than 16 query rows): 3 forwards" in text


def test_chosen_layers_that_call_no_attention_are_noted(model: Any) -> None:
    """As those of a hybrid model; without a dry run only a forward tells."""
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with attach(model, "streaming", gate=None, verify=False, layers=[0, 1], **STREAMING) as handle:
        logits(model)
    (note,) = handle.report().notes
    assert note == "layers names 1, which called no attention so far: such a layer has none, or was skipped"


@torch.no_grad()
def test_observe_and_measure(model: Any) -> None:
    seen: list[tuple[int, float]] = []

    def observe(call: sp.AttentionCall, result: sp.Result) -> None:
        seen.append((call.layer, result.density))

    with attach(model, "streaming", tail=0, measure=True, observe=observe, **STREAMING) as handle:
        logits(model, 60)
        logits(model, 120)
    assert [layer for layer, _ in seen] == [0, 1, 0, 1]
    layer = handle.report().layers[0]
    assert layer.density == pytest.approx(seen[2][1])
    assert layer.mean_density is not None
    assert min(seen[0][1], seen[2][1]) < layer.mean_density < max(seen[0][1], seen[2][1])
    assert "(mean" in str(layer)


def test_density_sums_over_the_chunks_of_a_prefill(model: Any) -> None:
    def density(**options: Any) -> float | None:
        with attach(model, "streaming", tail=0, **STREAMING) as handle:
            model.generate(hf_models.prompt(120), max_new_tokens=2, do_sample=False, **options)
        found: float | None = handle.report().layers[0].density
        return found

    assert density() == pytest.approx(density(prefill_chunk_size=48))


def test_the_density_of_masks_beyond_the_budget_is_known(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with attach(model, "streaming", tail=0, **STREAMING) as handle:
        logits(model)
        wanted = handle.report().density
        monkeypatch.setattr(sessions, "KEPT_BYTES", 0)
        logits(model)
    assert handle.report().layers[0].mode == "sparse"
    assert wanted == handle.report().density is not None


@torch.no_grad()
def test_short_prompts_and_chosen_layers(model: Any) -> None:
    wanted = logits(model, 15)
    with attach(model, "streaming", tail=0, layers=[1], strict=True, **STREAMING) as handle:
        assert torch.equal(logits(model, 15), wanted)
        assert handle.report().short_forwards == 1
        logits(model)
    first, second = handle.report().layers
    assert (first.mode, second.mode) == ("dense", "sparse")
    assert first.reasons == {"not among the chosen layers": 1}
    with attach(model, "streaming", tail=0, min_query=91, **STREAMING) as handle:
        logits(model)
    assert handle.report().layers[0].calls == 0


def test_recorded_gradients_run_dense(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    ids = hf_models.prompt()
    wanted = model(ids).logits
    with attach(model, "streaming", tail=0, **STREAMING) as handle, caplog.at_level(logging.WARNING, "sparseprefill"):
        got = model(ids).logits
        got.sum().backward()
        model(ids)
    torch.testing.assert_close(got, wanted)
    assert sum("gradients are recorded" in record.message for record in caplog.records) == 1
    assert [list(layer.reasons.values()) for layer in handle.report().layers] == [[2], [2]]
    with (
        attach(model, "streaming", tail=0, strict=True, **STREAMING),
        pytest.raises(sp.UnsupportedCallError, match="no_grad"),
    ):
        model(ids)


def test_frozen_weights_need_no_no_grad(model: Any) -> None:
    model.requires_grad_(False)
    with attach(model, "streaming", tail=0, strict=True, **STREAMING) as handle:
        model(hf_models.prompt())
    assert handle.report().layers[0].mode == "sparse"


def gradient(model: Any, *, through: Any = None) -> Any:
    """Of the first layer's query weights. through: a checkpoint around the whole model."""
    model.zero_grad()
    ids = hf_models.prompt()

    def loss(bias: Any) -> Any:
        return model(inputs_embeds=model.get_input_embeddings()(ids) + bias, labels=ids, use_cache=False).loss

    bias = torch.zeros((), requires_grad=True)
    (loss(bias) if through is None else through(loss, bias)).backward()
    return model.model.layers[0].self_attn.q_proj.weight.grad.clone()


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*", "ignore:.*use_cache.*")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_trains_as_ever(model: Any, reentrant: bool, implementation: str) -> None:
    """With reentrant checkpointing the first pass records no gradients, the second one does."""
    model.set_attn_implementation(implementation)
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    wanted = gradient(model)
    with attach(model, "streaming", tail=0, gate=None, **STREAMING) as handle:
        assert model.training
        torch.testing.assert_close(gradient(model), wanted)
    assert attention.TRAINING in handle.report().fallbacks
    assert handle.report().layers[0].sparse_calls == 0


@pytest.mark.filterwarnings("ignore:.*use_reentrant.*", "ignore:.*use_cache.*")
def test_checkpoints_of_ones_own_train_as_ever(model: Any) -> None:
    """Around the whole model, which begins without gradients then; and around layers of a model in evaluation mode."""
    model.train()
    wanted = gradient(model)
    whole = partial(checkpoint, use_reentrant=True)
    with attach(model, "streaming", tail=0, gate=None, **STREAMING) as handle:
        torch.testing.assert_close(gradient(model, through=whole), wanted)
        model.eval()
        for layer in model.model.layers:
            run = layer.forward
            layer.forward = lambda x, run=run, **options: whole(partial(run, **options), x)
        torch.testing.assert_close(gradient(model), wanted)
    assert set(handle.report().fallbacks) == {attention.TRAINING, attention.GRADIENT, attention.OUTSIDE}
    assert handle.report().layers[0].sparse_calls == 0


@torch.no_grad()
def test_a_model_in_training_mode_runs_dense(model: Any) -> None:
    wanted = logits(model.train())
    with attach(model, "streaming", tail=0, gate=None, **STREAMING) as handle:
        assert torch.equal(logits(model), wanted)
        model.eval().model.layers[1].train()
        logits(model)
    first, second = handle.report().layers
    assert (first.sparse_calls, second.sparse_calls) == (1, 0)
    assert first.reasons == {attention.TRAINING: 1}
    with (
        attach(model.train(), "streaming", strict=True, **STREAMING),
        pytest.raises(sp.UnsupportedCallError, match="eva"),
    ):
        logits(model)


@torch.no_grad()
def test_attention_weights_that_the_configuration_asks_for(model: Any) -> None:
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    ids = hf_models.prompt()
    wanted = model(ids)
    assert len(wanted.attentions) == 2
    with attach(model, "streaming", tail=0, gate=None, **STREAMING) as handle:
        got = model(ids)
        assert torch.equal(got.logits, wanted.logits)
        assert all(torch.equal(a, b) for a, b in zip(got.attentions, wanted.attentions, strict=True))
        assert handle.report().fallbacks == {attention.WEIGHTS: 2}
        model(ids, output_attentions=False)
    assert handle.report().layers[0].sparse_calls == 1


@attrs.frozen
class Picky:
    """An estimator that objects to sinks."""

    inner: Any

    def unsupported(self, call: sp.AttentionCall) -> str | None:
        return None if call.sinks is None else "sinks are beyond me"

    def estimate(self, call: sp.AttentionCall, memory: sp.Memory) -> sp.Plan:
        plan: sp.Plan = self.inner.estimate(call, memory)
        return plan


def test_a_stage_that_objects_leaves_its_layers_to_the_host() -> None:
    model = hf_models.build("gpt-oss")
    wanted = logits(model)
    streaming = sp.build("streaming", **STREAMING)
    picky = attrs.evolve(streaming, estimator=Picky(streaming.estimator), name="picky")
    with attach(model, picky) as handle:
        torch.testing.assert_close(logits(model), wanted)
    sliding, full = handle.report().layers
    assert (sliding.mode, full.mode) == ("window", "dense")
    assert full.reasons == {"Picky: sinks are beyond me": 1}
    with pytest.raises(sp.AttachError, match="layer 1: Picky: sinks are beyond me"):
        attach(model, picky, strict=True)
