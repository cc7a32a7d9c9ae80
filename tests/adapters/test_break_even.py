"""The gate in a host: calls below break-even stay with the model's own attention, and the report counts them."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.serving.model import Model
from sparseprefill.adapters.serving.options import read_table
from sparseprefill.adapters.serving.runtime import Runtime
from sparseprefill.adapters.serving.tally import Owner
from sparseprefill.adapters.session.kinds import Code
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.prospects import NOT_CHOSEN
from sparseprefill.adapters.session.session import WHOLE, Fallback, Prefill, Session
from torch.nn import functional

import sparseprefill as sp
from helpers import hf_models
from helpers.build import make
from helpers.hf_models import STREAMING, logits, padded, prompt
from helpers.tables import from_length, point, shape_of, table, whole
from sparseprefill.breakeven.gate import GateChoice
from sparseprefill.breakeven.table import BELOW, BreakEven, Verdict
from sparseprefill.profiles.identity import ModelIdentity

HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8}


def pays_from(least: int) -> BreakEven:
    return from_length(least, **HEADS)


@pytest.fixture
def model() -> Any:
    return hf_models.build("llama")


def test_below_break_even_the_model_computes_what_it_did_and_says_so(model: Any, tmp_path: Path) -> None:
    stock = logits(model, 90)
    path = tmp_path / "table.json"
    path.write_text(pays_from(120).to_json(), encoding="utf-8")
    with attach(model, "streaming", tail=0, gate=path, **STREAMING) as handle:
        assert torch.equal(stock, logits(model, 90))
        assert not torch.equal(stock, logits(model, 150)[:, :90])
        logits(model, 90)
    report = handle.report()
    assert [("dense", 1, 2)] * 2 == [(one.mode, one.sparse_calls, one.dense_calls) for one in report.layers]
    assert {BELOW: 4} == report.fallbacks
    assert report.pays_from in range(116, 121)
    told = f", by which whole prompts run sparse from some {report.pays_from} tokens on"
    assert f"dense by break-even: break-even table of test (cpu){told}" in str(report)


class Counted:
    """A gate that finds everything too small, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
        self.asked.append((call.q.shape[2], call.kv_len))
        return Verdict(False, 2.0, BELOW)


@torch.no_grad()
def test_layers_of_one_forward_are_judged_once(model: Any) -> None:
    gate = Counted()
    with attach(model, "streaming", tail=0, gate=gate, verify=False, **STREAMING) as handle:
        gate.asked.clear()  # attaching asks what may ever run
        cache = model(prompt(60), use_cache=True).past_key_values
        model(prompt(30), past_key_values=cache)
        logits(model, 60)
    assert [(60, 60), (60, 60)] == gate.asked  # the second call goes on with the first one's prompt
    assert [("dense", 3, {BELOW: 2, f"{BELOW} (judged by the prompt's first chunk)": 1})] * 2 == [
        (one.mode, one.dense_calls, one.reasons) for one in handle.report().layers
    ]


def test_what_was_judged_once_minds_the_layers_asked_for() -> None:
    session = Session(sp.build("streaming", **STREAMING), HostOptions(layers=[1]))
    for layer in range(3):
        session.again(layer, Fallback(BELOW, small=True), (1, 90, 90))
    assert [{NOT_CHOSEN: 1}, {BELOW: 1}, {NOT_CHOSEN: 1}] == [one.reasons for one in session.report("", "").layers]


@torch.no_grad()
def test_a_padded_batch_below_break_even_is_the_stock_models(model: Any) -> None:
    inputs = padded(90)
    stock = model(**inputs).logits
    with attach(model, "streaming", tail=0, gate=pays_from(500), **STREAMING) as handle:
        assert torch.equal(stock, model(**inputs).logits)
    assert {BELOW: 2} == handle.report().fallbacks


def test_strict_does_not_object_to_break_even(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    stock = logits(model)
    with attach(model, "streaming", tail=0, strict=True, gate=pays_from(500), **STREAMING) as handle:
        assert torch.equal(stock, logits(model))
    assert {BELOW: 2} == handle.report().fallbacks
    assert [] == [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_auto_is_the_default_and_takes_the_table_of_the_environment(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    path.write_text(pays_from(500).to_json(), encoding="utf-8")
    monkeypatch.setenv("SPARSEPREFILL_BREAKEVEN", str(path))
    with attach(model, "streaming", tail=0, **STREAMING) as handle:
        logits(model)
    assert {BELOW: 2} == handle.report().fallbacks
    off: tuple[GateChoice, ...] = (None, False)
    for gate in off:
        with attach(model, "streaming", tail=0, gate=gate, **STREAMING) as handle:
            logits(model)
        assert ({}, "") == (handle.report().fallbacks, handle.report().gate)
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(sp.ParameterError, match=r"SPARSEPREFILL_BREAKEVEN: .*schema is None"):
        attach(model, "streaming", tail=0, **STREAMING)


def test_auto_without_a_table_keeps_short_prompts_dense_and_says_so(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SPARSEPREFILL_BREAKEVEN", raising=False)
    monkeypatch.setattr("sparseprefill.breakeven.gate.shipped", lambda device: None)
    stock = logits(model)
    with attach(model, "streaming", tail=0, strict=True, **STREAMING) as handle:
        assert torch.equal(stock, logits(model))
    report = handle.report()
    (reason,) = report.fallbacks
    assert "no break-even table for cpu: dense by the built-in rule (sparse from " in reason
    assert "measure a table with sparseprefill calibrate, or pass gate=None to run every call sparse" in reason
    assert "the built-in rule (sparse from" in report.gate
    (record,) = (
        one for one in caplog.records if one.levelno >= logging.WARNING
    )  # nothing of so small a model can ever run sparse
    assert "up to 512 tokens every call stays dense: no break-even table for cpu" in record.getMessage()


def test_a_gated_pipeline_brings_its_gate(model: Any) -> None:
    pipeline = sp.build("streaming", gate=pays_from(500), **STREAMING)
    with attach(model, pipeline) as handle:
        logits(model)
    assert {BELOW: 2} == handle.report().fallbacks
    assert 1 == handle.report().grain
    with attach(model, pipeline, gate=None) as handle:
        logits(model)
    assert not handle.report().fallbacks


def test_a_table_that_does_not_know_the_device_is_noted(model: Any) -> None:
    other = table(whole({64: 4.0}, **HEADS), kind="cuda", capability=(9, 0))
    with attach(model, "streaming", tail=0, gate=other, **STREAMING) as handle:
        logits(model)
    (note,) = handle.report().notes
    assert "has nothing for cpu" in note
    assert not handle.report().fallbacks


@pytest.mark.parametrize("auto", [False, True])
def test_a_method_without_figures_is_named_with_the_command_that_measures_it(
    model: Any, auto: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a plugin's: the table is not named as if it knew."""
    path = tmp_path / "table.json"
    path.write_text(from_length(200, "another", **HEADS).to_json(), encoding="utf-8")
    monkeypatch.setenv("SPARSEPREFILL_BREAKEVEN", str(path))
    gate: GateChoice = "auto" if auto else path
    with attach(model, "streaming", tail=0, gate=gate, **STREAMING) as handle:
        logits(model, 90)
        logits(model, 18)
    report = handle.report()
    command = "sparseprefill calibrate --method streaming --heads 4 --kv-heads 2 --head-dim 8 --dtype float32"
    (note,) = report.notes
    (reason,) = report.fallbacks
    for said in (note, reason):
        assert "the break-even table of test (cpu) has no figures of streaming" in said
        assert command in said
    assert "judged by the executor alone" in note
    assert reason.startswith(f"{BELOW}, even for the executor alone")
    told = (
        "dense by break-even: break-even table of test (cpu), without figures of streaming, by which whole prompts run"
    )
    assert f"\n{told} sparse from some " in str(report)


@torch.no_grad()
def test_chunks_go_on_as_the_prompt_began(model: Any) -> None:
    """Later chunks would be worth it by themselves; a dense beginning would not fit them."""
    sizes = ((32, 64, 3.0), (32, 128, 0.5), (64, 64, 3.0), (128, 128, 0.5))
    gate = table(shape_of(*(point(queries, keys, streaming=ratio) for queries, keys, ratio in sizes), **HEADS))
    with attach(model, "streaming", tail=0, gate=gate, **STREAMING) as handle:
        model.generate(prompt(160), max_new_tokens=3, do_sample=False, prefill_chunk_size=64)
    (first, _) = handle.report().layers
    assert (0, 3) == (first.sparse_calls, first.dense_calls)
    assert {BELOW: 2, f"{BELOW} (judged by the prompt's first chunk)": 4} == handle.report().fallbacks
    with attach(model, "streaming", tail=0, gate=gate, **STREAMING) as handle:  # a longer beginning
        model.generate(prompt(160), max_new_tokens=3, do_sample=False, prefill_chunk_size=128)
    (first, _) = handle.report().layers
    assert (2, 0) == (first.sparse_calls, first.dense_calls)


def test_sliding_windows_stay_bands() -> None:
    model = hf_models.build("mistral-sliding")
    with attach(model, "streaming", tail=0, gate=pays_from(500), **STREAMING) as handle:
        logits(model)
    assert all(layer.mode == "window" for layer in handle.report().layers)


def test_any_gate_will_do() -> None:
    class Odd:
        def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
            return Verdict(call.layer != 1, reason="layer 1 is not worth it" if call.layer == 1 else "")

    session = Session(sp.build("streaming", **STREAMING), HostOptions(strict=True), gate=Odd())
    x = torch.randn(1, 2, 40, 8)
    found = [session.run(sp.AttentionCall(x, x, x, layer=layer), Prefill()) for layer in range(3)]
    assert [False, True, False] == [isinstance(one, Fallback) for one in found]
    assert {"layer 1 is not worth it": 1} == session.report("host", "sdpa").fallbacks


def test_a_slow_host_may_have_small_calls_computed_densely() -> None:
    """What vLLM's CUDA backend asks for: every key, by the pipeline's executor, while the record says dense."""
    call = make(90, heads=4, kv_heads=2)
    session = Session(sp.build("streaming", **STREAMING), gate=pays_from(500))
    found = session.run(call, Prefill())
    assert Fallback(BELOW, chosen=True, small=True, code=Code.GATE) == found
    out = session.whole(call)
    assert out is not None
    causal = functional.scaled_dot_product_attention(call.q, call.k, call.v, is_causal=True, enable_gqa=True)
    assert sp.output_error(out, causal) <= 1e-5
    report = session.report("none", "none")
    assert ({BELOW: 1}, {WHOLE: 1}) == (report.fallbacks, report.notes)
    session = Session(sp.build("streaming", **STREAMING), HostOptions(layers=[3]), gate=pays_from(500))
    assert not getattr(session.run(call, Prefill()), "small", True)


def rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table fits."""
    monkeypatch.delenv("SPARSEPREFILL_BREAKEVEN", raising=False)
    monkeypatch.setattr("sparseprefill.breakeven.gate.shipped", lambda device: None)


@pytest.mark.parametrize("measured", [True, False])
def test_that_nothing_ran_sparse_is_said_once_with_why_and_what_to_do(
    measured: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rule(monkeypatch)
    model = hf_models.build("llama", num_hidden_layers=6)
    gate = pays_from(500) if measured else "auto"
    with caplog.at_level(logging.INFO, "sparseprefill"), attach(model, "streaming", gate=gate, **STREAMING) as handle:
        logits(model)
        logits(model, 60)
    text = str(handle.report())
    said = "nothing ran sparse, since the gate found 12 calls too small: "
    why = BELOW if measured else "no break-even table for cpu: dense by the built-in rule"
    (line,) = (one for one in text.split("\n") if "sparse, since" in one)
    assert line.startswith(said + why)
    assert line.endswith("pass gate=None to run every call sparse")
    assert 1 == text.count("gate=None")
    assert "x)" not in text
    assert line == handle.report().idle
    assert 1 == sum("calls run dense" in record.getMessage() for record in caplog.records)
    with attach(model, "streaming", gate=None, **STREAMING) as handle:
        logits(model)
    assert ("", {}) == (handle.report().idle, handle.report().gated)


def test_what_ran_sparse_at_least_once_is_not_idle(model: Any) -> None:
    with attach(model, "streaming", gate=pays_from(100), tail=0, **STREAMING) as handle:
        logits(model, 60)
        assert "nothing ran sparse" in str(handle.report())
        logits(model, 400)
    assert "nothing ran sparse" not in str(handle.report())
    assert {BELOW: 2} == handle.report().gated


def test_a_gate_whose_words_have_numbers(model: Any) -> None:
    class Numbered:
        def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
            return Verdict(False, None, f"{call.kv_len} keys are few")

    with attach(model, "streaming", gate=Numbered(), **STREAMING) as handle:
        for length in range(60, 70):
            logits(model, length)
    assert {"60 to 69 keys are few": 20} == handle.report().fallbacks
    assert 1 == str(handle.report()).count("keys are few")


@pytest.mark.parametrize("table", [{}, {"gate": "auto"}])
def test_servers_name_what_their_configuration_takes(table: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One place says how to have no gate; a server's table takes false, and no None."""
    rule(monkeypatch)
    sizes: dict[str, Any] = {
        "name": "m",
        "architecture": "M",
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "digest": "0" * 16,
    }
    whole = ModelIdentity(**sizes)
    table = {"method": "streaming", "parameters": dict(STREAMING), **table}
    served = Runtime.made(read_table(table), Model(whole, whole, "M", "STOCK", 0), Owner())
    found = served.session.run(make(90, heads=4, kv_heads=2), Prefill())
    assert isinstance(found, Fallback)
    text = str(served.session.report("m", "STOCK"))
    for said in (found.reason, text):
        assert 'set "gate": false to run every call sparse' in said
        assert "gate=None" not in said
    assert 1 == text.count('"gate": false')


@pytest.mark.parametrize("chunk", [0, 16])
def test_a_report_asks_a_gate_that_lets_nothing_run_a_few_times(chunk: int) -> None:
    """Not for each step of the longest prompt there may be; in steps a server has told it."""
    gate = Counted()
    session = Session(sp.build("streaming", **STREAMING), gate=gate)
    session.run(make(90, heads=4, kv_heads=2), Prefill(chunk=chunk))
    gate.asked.clear()
    report = session.report("m", "STOCK")
    assert (None, True) == (report.pays_from, len(gate.asked) < 200)
    assert "run sparse from" not in str(report)
    assert bool(gate.asked) == (not chunk)


def test_reasons_of_several_layers_are_told_once(model: Any) -> None:
    with attach(model, "streaming", gate=None, **STREAMING) as handle:
        model(hf_models.prompt())
    text = str(handle.report())
    assert 1 == text.count("gradients are recorded")
    assert "dense in 2 layers: gradients are recorded" in text


def test_a_servers_table_takes_an_executor() -> None:
    table = {"method": "streaming", "executor": {"precision": "int8"}}
    made = read_table(table).build()
    assert [one.executor for one in made.known] == [sp.AutoExecutor(precision="int8")]
    with pytest.raises(sp.ParameterError, match=r"sparseprefill\.executor\.precision is 'int4'"):
        read_table({**table, "executor": {"precision": "int4"}}).build()
