"""Rows of the last layer that nobody reads: left out where the model says so, and nowhere else."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from sparseprefill.adapters.demo.model import load_model
from sparseprefill.adapters.huggingface import attach, state
from transformers import DynamicCache

import sparseprefill as sp
from helpers import hf_models

METHODS: dict[str, Mapping[str, Any]] = {
    "dense": {},
    "streaming": {"sink": 16, "window": 32, "block": 16},
    "rowmax": {"eps": 0.05},
    "bfla": sp.default_registry().get("bfla").small,
    "share-prefill": sp.default_registry().get("share-prefill").small,
}
LENGTH = 390  # with one row read, those from 384 on stay: whole tiles of 128


def both(model: Any, method: str, run: Any, **options: Any) -> tuple[Any, Any, Any]:
    """What `run` gives with every row of the last layer, without those that nobody reads, and the second's report."""
    found = []
    for skip in (False, True):
        with (
            torch.no_grad(),
            attach(model, method, gate=None, skip_unread=skip, **METHODS[method], **options) as handle,
        ):
            found.append(run(model))
        assert not model._forward_pre_hooks
        assert not model._forward_hooks
    return found[0], found[1], handle.report()


def skipped(report: Any) -> int:
    """How many calls of the last layer did without rows."""
    return sum(count for note, count in report.notes.items() if "nobody reads" in note)


@pytest.mark.parametrize("method", METHODS)
def test_logits_are_the_same_and_the_last_layer_costs_a_tile(method: str) -> None:
    model, ids = hf_models.build("llama"), hf_models.prompt(LENGTH)
    whole, part, report = both(model, method, lambda m: m(input_ids=ids, logits_to_keep=1).logits)
    torch.testing.assert_close(whole, part, atol=2e-6, rtol=1e-5)
    last, rows = report.layers[-1], torch.arange(384, LENGTH) + 1
    assert float(rows.sum()) / (LENGTH * (LENGTH + 1) / 2) == pytest.approx(last.density)
    assert "sparse" == last.mode
    assert 1 == skipped(report)
    assert set(report.notes) == {
        "layer 1 computed only the last rows of the prompt, with every key: nobody reads the others (skip_unread)"
    }


def test_generate_says_that_it_reads_one_row() -> None:
    model, ids = hf_models.build("llama"), hf_models.prompt(LENGTH)
    whole, part, report = both(model, "streaming", lambda m: m.generate(ids, max_new_tokens=5, do_sample=False))
    assert torch.equal(whole, part)
    assert 1 == skipped(report)


def test_a_padded_batch() -> None:
    model, inputs = hf_models.build("llama"), hf_models.padded(LENGTH, (0, 7, 200))
    whole, part, report = both(model, "streaming", lambda m: m(**inputs, logits_to_keep=3).logits)
    torch.testing.assert_close(whole, part, atol=2e-6, rtol=1e-5)
    assert 1 == skipped(report)


def test_chunks_of_a_prompt() -> None:
    """Of each chunk the last layer computes the last rows alone."""

    def run(model: Any) -> Any:
        cache, ids = DynamicCache(config=model.config), hf_models.prompt(2 * LENGTH)
        made = [model(input_ids=chunk, past_key_values=cache, logits_to_keep=1) for chunk in ids.split(LENGTH, 1)]
        return made[-1].logits

    whole, part, report = both(hf_models.build("llama"), "streaming", run)
    torch.testing.assert_close(whole, part, atol=2e-6, rtol=1e-5)
    assert 2 == skipped(report)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"logits_to_keep": 0},
        {"logits_to_keep": torch.tensor([5])},
        {"logits_to_keep": 129},
        {"logits_to_keep": 1, "output_hidden_states": True},
    ],
)
def test_whoever_reads_more_gets_it(asked: dict[str, Any]) -> None:
    model, ids = hf_models.build("llama"), hf_models.prompt(LENGTH)
    whole, part, report = both(model, "streaming", lambda m: m(input_ids=ids, **asked))
    assert 0 == skipped(report)
    assert torch.equal(whole.logits, part.logits)
    for one, other in zip(whole.hidden_states or (), part.hidden_states or (), strict=True):
        assert torch.equal(one, other)


def test_the_decoder_alone_a_loss_and_a_method_without_a_tail_read_every_row() -> None:
    model, ids = hf_models.build("llama"), hf_models.prompt(LENGTH)
    *found, report = both(model, "streaming", lambda m: m.model(input_ids=ids).last_hidden_state)
    assert 0 == skipped(report)
    assert torch.equal(*found)
    *found, report = both(model, "streaming", lambda m: m(input_ids=ids, labels=ids, logits_to_keep=LENGTH).loss)
    assert 0 == skipped(report)
    assert torch.equal(*found)
    *_, report = both(model, "streaming", lambda m: m(input_ids=ids, logits_to_keep=1).logits, tail=0)
    assert 0 == skipped(report)


def test_a_forward_that_fails_is_forgotten() -> None:
    model, ids = hf_models.build("llama"), hf_models.prompt(LENGTH)
    with torch.no_grad(), attach(model, "streaming", gate=None, skip_unread=True, **METHODS["streaming"]) as handle:
        head, model.lm_head = model.lm_head, torch.nn.Linear(7, 7)
        with pytest.raises(RuntimeError, match="shapes"):
            model(input_ids=ids, logits_to_keep=1)
        model.lm_head = head
        model.model(input_ids=ids)
        copied = copy.deepcopy(model)
        copied(input_ids=ids, logits_to_keep=1)
    assert 1 == skipped(handle.report())


def nested(model: Any, *path: str) -> Any:
    for name in path:
        model = getattr(model, name)
    return model


@pytest.mark.parametrize("path", [("config",), ("config", "text_config"), ("model", "language_model", "config")])
@pytest.mark.parametrize("switch", ["output_hidden_states", "output_router_logits", "output_attentions"])
def test_a_configuration_at_any_depth_asks_for_every_row(path: tuple[str, ...], switch: str) -> None:
    model, ids = hf_models.llava(), hf_models.prompt(LENGTH).clamp(max=90)
    model.set_attn_implementation("eager")
    setattr(nested(model, *path), switch, True)
    whole, part, report = both(model, "streaming", lambda m: m(input_ids=ids, logits_to_keep=1))
    assert 0 == skipped(report)
    for one, other in zip(whole.hidden_states or (), part.hidden_states or (), strict=True):
        assert torch.equal(one, other)


def test_what_an_inner_configuration_asks_for_comes_out_whole() -> None:
    model, ids = hf_models.llava(), hf_models.prompt(LENGTH).clamp(max=90)
    model.config.text_config.output_hidden_states = True
    whole, part, _ = both(model, "streaming", lambda m: m(input_ids=ids, logits_to_keep=1))
    assert 3 == len(part.hidden_states)
    for one, other in zip(whole.hidden_states, part.hidden_states, strict=True):
        assert torch.equal(one, other)


def test_inner_configurations_that_ask_for_nothing_leave_rows_out() -> None:
    ids = hf_models.prompt(LENGTH).clamp(max=90)
    whole, part, report = both(hf_models.llava(), "streaming", lambda m: m(input_ids=ids, logits_to_keep=1).logits)
    torch.testing.assert_close(whole, part, atol=2e-6, rtol=1e-5)
    assert 1 == skipped(report)


INTERRUPTED: dict[str, Any] = {
    "before the model": lambda m: m.register_forward_pre_hook,
    "before the decoder": lambda m: m.model.register_forward_pre_hook,
    "in the last layer": lambda m: m.model.layers[-1].register_forward_pre_hook,
    "behind the layers": lambda m: m.model.norm.register_forward_pre_hook,
    "behind the decoder": lambda m: m.model.register_forward_hook,
    "behind the model": lambda m: m.register_forward_hook,
}


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
@pytest.mark.parametrize("where", INTERRUPTED)
def test_a_forward_that_is_interrupted_is_forgotten(where: str, ending: type[BaseException]) -> None:
    """Torch calls no hook behind it; the decoder alone, and its last layer alone, give every row afterwards."""
    model, ids = hf_models.build("llama"), hf_models.prompt(LENGTH)

    def interrupts(*_: Any) -> None:
        raise ending

    def layer_alone() -> Any:
        x = model.model.embed_tokens(ids)
        positions = model.model.rotary_emb(x, torch.arange(LENGTH)[None])
        return model.model.layers[-1](x, position_embeddings=positions)

    with torch.no_grad(), attach(model, "streaming", gate=None, **METHODS["streaming"]):
        wanted = model.model(input_ids=ids).last_hidden_state
    with torch.no_grad():
        alone = layer_alone()
    with torch.no_grad(), attach(model, "streaming", gate=None, skip_unread=True, **METHODS["streaming"]) as handle:
        hook = INTERRUPTED[where](model)(interrupts)
        with pytest.raises(ending):
            model(input_ids=ids, logits_to_keep=1)
        hook.remove()
        assert state.current(handle) is None
        assert torch.equal(alone, layer_alone())
        assert torch.equal(wanted, model.model(input_ids=ids).last_hidden_state)
    assert not model._forward_pre_hooks
    assert not model.model._forward_pre_hooks


@pytest.mark.parametrize("where", ["pre", "behind", "head", "layer"])
def test_the_decoder_called_by_a_hook_gives_every_row(where: str) -> None:
    """`logits_to_keep` of the forward around it says nothing about the rows that a hook reads."""
    model, ids = hf_models.build("llama"), hf_models.prompt(LENGTH)
    found: list[Any] = []

    def calls(*_: Any) -> None:
        if len(found) < 1:
            found.append(None)
            found[0] = model.model(input_ids=ids).last_hidden_state

    owners = {"pre": model, "behind": model.model, "head": model.lm_head, "layer": model.model.layers[0]}
    with torch.no_grad(), attach(model, "streaming", gate=None, **METHODS["streaming"]):
        wanted = model.model(input_ids=ids).last_hidden_state
    with torch.no_grad(), attach(model, "streaming", gate=None, skip_unread=True, **METHODS["streaming"]) as handle:
        owner = owners[where]
        hook = owner.register_forward_hook(calls) if where == "behind" else owner.register_forward_pre_hook(calls)
        model(input_ids=ids, logits_to_keep=1)
        hook.remove()
    assert torch.equal(wanted, found[0])
    assert 1 == skipped(handle.report())


def test_observers_are_told_of_the_rows_that_were_computed() -> None:
    seen: dict[int, tuple[int, int]] = {}

    def observe(call: sp.AttentionCall, result: sp.Result) -> None:
        seen[call.layer] = (call.q.shape[2], result.out.shape[2])

    model, ids = hf_models.build("llama"), hf_models.prompt(LENGTH)
    with torch.no_grad(), attach(model, "streaming", gate=None, skip_unread=True, observe=observe):
        model(input_ids=ids, logits_to_keep=1)
    assert {0: (LENGTH, LENGTH), 1: (LENGTH - 384, LENGTH - 384)} == seen


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["rowmax", "bfla"])
def test_on_a_gpu(method: str) -> None:
    model = load_model(torch.bfloat16).cuda()
    ids = torch.randint(5, 200, (1, 4 * LENGTH), generator=torch.Generator().manual_seed(0)).cuda()
    whole, part, report = both(model, method, lambda m: m(input_ids=ids, logits_to_keep=1).logits)
    # rowmax's mask has the tiles of the part's, each by the same kernel; bfla's others, and so another order of sums.
    assert method != "rowmax" or torch.equal(whole, part)
    assert float((whole - part).float().norm() / whole.float().norm()) < 0.02
    assert 1 == skipped(report)
