"""Texts by kind: numbers make no new one, and a report does not grow with what it is told."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import logging

import pytest
import torch
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.session.kinds import MOST, OTHERS, Kinds
from sparseprefill.adapters.session.report import LayerReport, Report
from sparseprefill.adapters.session.session import Session
from transformers import DynamicCache

import sparseprefill as sp
from helpers import hf_models
from helpers.hf_models import STREAMING
from sparseprefill.errors import numberless

KINDS: list[tuple[list[str], dict[str, int]]] = [
    (["cut at token 64", "cut at token 9", "cut at token 128"], {"cut at token 9 to 128": 3}),
    (["same 5"] * 3, {"same 5": 3}),
    (["2 x 60 rows, 70 keys", "2 x 61 rows, 7 keys"], {"2 x 60 to 61 rows, 7 to 70 keys": 2}),
    (["sparse from 32,768 keys", "sparse from 1,024 keys"], {"sparse from 1,024 to 32,768 keys": 2}),
    (["keeps 0.5 of 0x7fa0", "keeps 0.25 of 0x7fb0"], {"keeps 0.25 to 0.5 of 0x7fa0 to 0x7fb0": 2}),
    (["float16", "float32", "sm_90", "sm_80"], {"float16": 1, "float32": 1, "sm_90": 1, "sm_80": 1}),
    (["torch 2.13.0", "torch 2.12.0"], {"torch 2.13.0": 1, "torch 2.12.0": 1}),
    (["layers 0 to 3", "layers 2 to 7"], {"layers 0 to 7": 2}),
    (["a tensor of (1, 4, 60, 8)", "a tensor of (1, 4, 70, 8)"], {"a tensor of (1, 4, 60 to 70, 8)": 2}),
    (["no number", "none"], {"no number": 1, "none": 1}),
    ([], {}),
]


@pytest.mark.parametrize(("texts", "wanted"), KINDS)
def test_kinds(texts: list[str], wanted: dict[str, int]) -> None:
    kinds = Kinds()
    kinds.update(texts)
    assert wanted == kinds.counts()
    again = Kinds()
    again.update(kinds.counts())
    assert wanted == again.counts()
    assert len(wanted) == len(again)


@pytest.mark.parametrize(("texts", "wanted"), KINDS)
def test_what_is_one_kind_is_one_text_without_its_numbers(texts: list[str], wanted: dict[str, int]) -> None:
    assert len(wanted) == len({numberless(text) for text in texts})


def test_a_number_goes_whole() -> None:
    assert "N keys, int8 and gamma N, layers N" == numberless("3,012 keys, int8 and gamma 0.95, layers 0 to 27")


def test_the_first_of_a_kind_is_told() -> None:
    kinds = Kinds()
    assert [True, False, False, True] == [kinds.add(text) for text in ("at 1", "at 2", "at 1", "on 1")]


def test_what_differs_in_any_way_is_kept_to_a_number() -> None:
    kinds = Kinds()
    for i in range(3 * MOST):
        kinds.add("".join(chr(97 + int(digit)) for digit in str(i)))
    assert MOST + 1 == len(kinds)
    assert 2 * MOST == kinds.counts()[OTHERS]


def test_reasons_and_kernels_of_a_session(caplog: pytest.LogCaptureFixture) -> None:
    session = Session(sp.build("streaming", **STREAMING))
    with caplog.at_level(logging.WARNING, "sparseprefill"):
        for length in range(100, 200):
            session.decline(length % 2, f"{length} queries come after {length - 1} keys", (1, length, length))
            session.note(f"something at {length}")
    report = session.report("host", "sdpa")
    assert {"100 to 199 queries come after 99 to 198 keys": 100} == report.fallbacks
    assert {"something at 100 to 199": 100} == report.notes
    assert 1 == len(caplog.records)


def test_layers_with_other_numbers_are_one_fallback() -> None:
    layers = tuple(LayerReport(layer=i, reasons={f"at {i} to {9 - i}": 2}) for i in range(3))
    report = Report(method="m", host="h", implementation="i", min_query=16, layers=layers)
    assert {"at 0 to 9": 6} == report.fallbacks


@torch.no_grad()
def test_cuts_of_a_prompt_are_one_note() -> None:
    """A note for each length of a chunk made a report of thousands of lines."""
    model = hf_models.build("llama")
    with attach(model, "anchor-attention", gate=None, tail=0, theta=0.0, block=16, step=2, init_tokens=16) as handle:
        for chunk in range(17, 37):
            cache = DynamicCache(config=model.config)
            for part in hf_models.prompt(120).split(chunk, 1):
                model(part, past_key_values=cache)
    (note,) = handle.report().notes
    assert note.startswith("prefill was cut at token 17 to 104; its grain is 32 tokens")
