"""With a full mask an attached model is the stock model, in every way that transformers runs a prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sparseprefill.adapters.huggingface import attach

from . import hf_models

TOKENS = 6
Run = Callable[[Any], torch.Tensor]


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    return model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, **options)


def logits(model: Any) -> Any:
    return model(hf_models.prompt()).logits


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
    logits,
    padded_logits,
    right_padded_logits,
    plain,
    left_padded,
    chunked,
    static,
    beams,
    second_turn,
    by_hand,
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("family", hf_models.FAMILIES)
@torch.no_grad()
def test_a_full_mask_is_the_stock_model(family: str, run: Run) -> None:
    model = hf_models.build(family)
    wanted = run(model)
    with attach(model, "dense", block=32, verify=False) as handle:
        got = run(model)
    if wanted.is_floating_point():
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    else:
        assert torch.equal(got, wanted)
    report = handle.report()
    assert not report.fallbacks
    modes = [layer.mode for layer in report.layers]
    assert modes.count("window") == hf_models.SLIDING_LAYERS.get(family, 0)
    assert modes.count("sparse") == 2 - modes.count("window")
    if wanted.is_floating_point():
        assert torch.equal(run(model), wanted), "detached, it must be the stock model to the bit"


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
@torch.no_grad()
def test_prompt_lookup_decoding(family: str) -> None:
    model = hf_models.build(family)
    wanted = lookup(model)
    with attach(model, "dense", block=32) as handle:
        assert torch.equal(lookup(model), wanted)
    assert not handle.report().fallbacks


@pytest.mark.parametrize("family", hf_models.FAMILIES)
@torch.no_grad()
def test_a_streaming_mask_changes_the_logits(family: str) -> None:
    model = hf_models.build(family)
    wanted = logits(model)
    with attach(model, "streaming", tail=0, sink=16, window=16, block=16) as handle:
        got = logits(model)
    if hf_models.SLIDING_LAYERS.get(family) == 2:
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)  # bands alone: exact whatever the method
        assert handle.report().density is None
        return
    assert (got - wanted).abs().max() > 0.05
    density = handle.report().density
    assert density is not None
    assert density < 0.8
