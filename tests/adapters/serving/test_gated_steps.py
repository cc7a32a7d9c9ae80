"""What a gate found of a step's sizes holds for all layers of the step: nothing is asked again, nor prepared."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sparseprefill.adapters.serving.attend import run
from sparseprefill.adapters.serving.layer import Layer
from sparseprefill.adapters.serving.parts import Batch, Part
from sparseprefill.adapters.serving.requests import Requests, Row
from sparseprefill.adapters.serving.summary import Summary
from sparseprefill.adapters.session.kinds import Why
from sparseprefill.adapters.session.prospects import NOT_CHOSEN
from sparseprefill.adapters.session.session import Prefill

import sparseprefill as sp
from helpers.tables import from_length
from sparseprefill.breakeven.table import Verdict

from .test_failures import HEADS, HOSTS, SIZE, runtime
from .test_failures import Gate as Broken

SHORT, LONG = 40, 120
SMALL = "too small"


class Gate:
    """A gate that keeps short prompts dense, and counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
        self.asked += 1
        return Verdict(call.kv_len >= LONG, None, SMALL)


class Reasons:
    """In the place of the metrics, whose library comes with vLLM."""

    summary = Summary()

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def fallback(self, layer: int, why: Why) -> None:
        self.found.append((layer, why.text))

    def inform(self, steps: int) -> None:
        assert steps >= 0


class Step:
    """A step of prompts of these lengths, layer by layer."""

    def __init__(self, *lengths: int, slow: bool = False, **options: Any) -> None:
        self.gate, self.reads, self.stocks, self.slow = Gate(), list[int](), list[int](), slow
        self.reasons = Reasons()
        self.mine = runtime(sp.build("dense", block=16), self.reasons, gate=self.gate, **options)
        self.parts = Batch(self._parts(lengths))

    def _parts(self, lengths: tuple[int, ...]) -> Iterator[Part]:
        begin = 0
        for i, length in enumerate(lengths):
            yield Part(i, i + 1, begin, begin + length, Row(0, length, str(i), length), Prefill(), make=lambda: None)
            begin += length

    def layer(self, index: int) -> torch.Tensor | None:
        """The output; None where the host is to compute all of it."""
        query = torch.randn(self.parts[-1].end, HEADS, SIZE)
        output = torch.full_like(query, float("nan"))

        def read(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
            self.reads.append(part.first)
            kv = torch.randn(2, 1, HEADS, part.end - part.begin, SIZE)
            return kv[0], kv[1]

        def stock(part: Part, rows: torch.Tensor, out: torch.Tensor) -> None:
            self.stocks.append(part.first)
            out.fill_(HOSTS)

        facts = Layer(index, 0.25, None, None, None)
        return output if run(self.mine, facts, self.parts, query, output, (), read, stock, slow=self.slow) else None

    def dense_calls(self) -> list[tuple[int, int, dict[str, int]]]:
        report = self.mine.session.report("M", "STOCK")
        return [(layer.layer, layer.dense_calls, dict(layer.reasons)) for layer in report.layers]


def test_a_batch_that_is_too_small_goes_to_the_host_at_once() -> None:
    step = Step(SHORT, SHORT)
    first = step.layer(0)
    assert first is not None
    assert (first == HOSTS).all()
    assert (step.reads, step.stocks) == ([0, 1], [0, 1])
    assert step.layer(1) is None
    assert step.layer(2) is None
    assert (step.reads, step.stocks) == ([0, 1], [0, 1])
    assert 2 == step.gate.asked
    assert [(layer, 2, {SMALL: 2}) for layer in range(3)] == step.dense_calls()
    assert [(layer, SMALL) for layer in range(3) for _ in range(2)] == step.reasons.found


def test_the_others_of_a_batch_run_sparse() -> None:
    step = Step(SHORT, LONG, SHORT)
    for index in range(2):
        output = step.layer(index)
        assert output is not None
        short = torch.cat([output[:SHORT], output[-SHORT:]])
        assert (short == HOSTS).all()
        assert not (output[SHORT:-SHORT] == HOSTS).any()
        assert output.isfinite().all()
    assert [0, 1, 2, 1] == step.reads
    assert [0, 2, 0, 2] == sorted(step.stocks[:2]) + sorted(step.stocks[2:])


def test_layers_that_are_not_chosen_say_so() -> None:
    step = Step(SHORT, layers=(0, 2))
    assert step.layer(0) is not None
    assert step.layer(1) is None
    assert [(0, 1, {SMALL: 1}), (1, 1, {NOT_CHOSEN: 1})] == step.dense_calls()


def test_a_slow_host_leaves_small_calls_to_the_library() -> None:
    step = Step(SHORT, slow=True)
    for index in range(2):
        output = step.layer(index)
        assert output is not None
        assert not (output == HOSTS).any()
    assert [0, 0] == step.reads
    assert [] == step.stocks


def test_what_the_library_cannot_compute_either_is_the_hosts_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(SHORT, slow=True)

    def whole(_: sp.AttentionCall) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step.mine.session, "whole", whole)
    for index in range(2):
        output = step.layer(index)
        assert output is not None
        assert (output == HOSTS).all()
    assert [(layer, 1, {SMALL: 1}) for layer in range(2)] == step.dense_calls()
    (note,) = step.mine.session.report("M", "STOCK").notes
    assert "left to the host: OutOfMemoryError: CUDA out of memory" in note


@pytest.mark.parametrize("lengths", [(SHORT,), (SHORT, LONG)])
def test_the_next_step_is_asked_anew(lengths: tuple[int, ...]) -> None:
    """A verdict stands with the parts of its step; a request's own stands with its Memory."""
    step = Step(*lengths)
    step.layer(0)
    step.parts = Batch(step._parts(lengths))
    assert step.layer(0) is not None


@pytest.mark.parametrize(("cached", "found"), [(0, True), (64, False)])
def test_what_others_left_of_a_first_chunk_is_no_prefix_of_another_request(cached: int, found: bool) -> None:
    """Fewer than `min_query`, say, so that nobody asked the gate, and more than an eighth. What a cache held is one."""
    step, requests = Step(), Requests(chunk=512)
    step.mine = runtime(sp.build("dense", block=16), step.reasons, gate=step.gate)
    first, second = cached + 20, cached + 60 if cached else LONG
    prefills = [
        requests.step([Row(*ends, "a", second)], {}, lambda name: True)[0]
        for ends in ((cached, first), (first, second))
    ]
    assert prefills[0] is prefills[1]
    x = torch.randn(1, HEADS, second, SIZE)
    outcome = step.mine.session.run(sp.AttentionCall(x[:, :, first:], x, x, prompt_lengths=second), prefills[1])
    assert found == isinstance(outcome, sp.Result)
    said = "" if isinstance(outcome, sp.Result) else outcome.reason
    assert (
        ""
        if found
        else f"{SMALL} (judged for the 64 tokens before it: dense, as a prompt of 64 tokens would have been)"
    ) == said


class Long:
    """A gate that finds steps of at least so many tokens worth it."""

    def __init__(self, least: int) -> None:
        self.least = least

    def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
        return Verdict(call.q.shape[2] >= self.least, None, SMALL)


@pytest.mark.parametrize(
    ("least", "said", "level"),
    [
        (100, "by the gate, prompts of some 100 tokens and more run dense in steps of 128", logging.INFO),
        (
            256,
            "no prompt of up to 4096 tokens runs dense in steps of 128: gate or profile leave each of them dense; "
            'in one step they do from some 256 tokens on (STEP); set "gate": false to run every call sparse',
            logging.WARNING,
        ),
        (
            5000,
            "no prompt of up to 4096 tokens runs dense in steps of 128: gate or profile leave each of them dense; "
            'set "gate": false to run every call sparse',
            logging.WARNING,
        ),
    ],
)
def test_a_start_tells_from_where_on_prompts_run_sparse(
    least: int, said: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    mine = runtime(sp.build("dense", block=16), Reasons(), gate=Long(least))
    mine.requests.chunk = 128
    call = sp.AttentionCall(*torch.randn(3, 1, HEADS, 16, SIZE))
    with caplog.at_level(logging.INFO, "sparseprefill"):
        mine.foretell(call, 4096, "STEP")
    (record,) = (one for one in caplog.records if "in steps of" in one.getMessage())
    assert (level, f"sparseprefill: {said}") == (record.levelno, record.getMessage())
    notes = mine.session.report("M", "STOCK").notes
    assert ({said.partition("; set")[0]: 1} if level == logging.WARNING else {}) == notes


def test_a_gate_that_fails_ends_no_start(caplog: pytest.LogCaptureFixture) -> None:
    mine = runtime(sp.build("dense", block=16), Reasons(), gate=Broken(ZeroDivisionError("by zero")))
    mine.requests.chunk = 128
    mine.foretell(sp.AttentionCall(*torch.randn(3, 1, HEADS, 16, SIZE)), 4096, "STEP")
    (record,) = caplog.records
    assert "from which length on prompts run sparse: StageError: dense: Gate.judge() raised" in record.getMessage()


def test_a_start_tells_of_a_method_that_the_table_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    table = from_length(64, "another", heads=HEADS, kv_heads=HEADS, head_dim=SIZE)
    mine = runtime(sp.build("dense", block=16), Reasons(), gate=table)
    mine.requests.chunk = 128
    with caplog.at_level(logging.INFO, "sparseprefill"):
        mine.foretell(sp.AttentionCall(*torch.randn(3, 1, HEADS, 16, SIZE)), 4096, "STEP")
    least, doubt = (record.getMessage() for record in caplog.records)
    assert "tokens and more run dense in steps of 128" in least
    assert "has no figures of dense; sparseprefill calibrate --method dense --heads" in doubt


def test_a_start_without_a_gate_has_nothing_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    mine = runtime(sp.build("dense", block=16), Reasons())
    mine.requests.chunk = 128
    with caplog.at_level(logging.INFO, "sparseprefill"):
        mine.foretell(sp.AttentionCall(*torch.randn(3, 1, HEADS, 16, SIZE)), 4096, "STEP")
    assert [] == caplog.records
