"""torch.compile of an attached model: with breaks it runs; as one graph it is refused in our words."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sparseprefill.adapters.huggingface import attach

import sparseprefill as sp
from helpers import hf_models
from helpers.hf_models import STREAMING

OPTIONS: dict[str, Any] = {"gate": None, "tail": 0, **STREAMING}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole(model: Any) -> Any:
    return torch.compile(model, fullgraph=True, backend="eager")


def in_place(model: Any) -> Any:
    model.compile(fullgraph=True, backend="eager")
    return model


def its_decoder(model: Any) -> Any:
    model.model.compile(fullgraph=True, backend="eager")
    return model


def its_layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    return model


def exported(model: Any) -> Any:
    return lambda ids, **more: torch.export.export(model, (ids,), kwargs=more, strict=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("change", "first"),
    [*((change, True) for change in (whole, in_place, its_decoder, its_layers, exported)), (whole, False)],
)
@torch.no_grad()
def test_one_graph_is_refused_in_our_words(change: Callable[[Any], Any], first: bool) -> None:
    model, ids = hf_models.build("llama"), hf_models.prompt(100)
    wanted = model(ids, use_cache=False).logits
    run = None if first else change(model)
    if run is not None and change is not exported:
        run(ids, use_cache=False)
    handle = attach(model, "streaming", verify=False, **OPTIONS)
    run = change(model) if run is None else run
    with pytest.raises(sp.AttachError) as caught:
        run(ids, use_cache=False)
    assert str(caught.value).startswith("an attached model cannot be compiled as one graph")
    assert "fullgraph=False" in str(caught.value)
    assert "torch.compiler.disable" not in str(caught.value)
    assert str(caught.value) == str(pickle.loads(pickle.dumps(caught.value)))
    handle.detach()
    if change is not exported:
        torch.testing.assert_close(run(ids, use_cache=False).logits, wanted)


@torch.no_grad()
def test_with_breaks_it_runs_sparse() -> None:
    """Under the compiler transformers takes every prompt for packed sequences; whether it is can be seen."""
    model, ids = hf_models.build("llama"), hf_models.prompt(100)
    packed = torch.cat([torch.arange(60), torch.arange(40)])[None]
    stock = model(ids, position_ids=packed, use_cache=False).logits
    with attach(model, "streaming", **OPTIONS) as handle:
        wanted = model(ids, use_cache=False).logits
        compiled: Any = torch.compile(model, backend="eager")
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, wanted)
        assert [2, 2] == [layer.sparse_calls for layer in handle.report().layers]
        torch.testing.assert_close(compiled(ids, position_ids=packed, use_cache=False).logits, stock)
    assert [2, 2] == [layer.sparse_calls for layer in handle.report().layers]


@torch.no_grad()
def test_decoding_as_one_graph_is_left_alone() -> None:
    model, ids = hf_models.build("llama"), hf_models.prompt(8)
    wanted = model(ids, use_cache=False).logits
    with attach(model, "streaming", **OPTIONS):
        torch.testing.assert_close(whole(model)(ids, use_cache=False).logits, wanted)
