"""Recall at work, in a session and in `attach`: which prefills are measured, what is said, and that nothing waits."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import copy
import logging
import threading
from typing import Any, cast

import attrs
import pytest
import torch
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.session import watch as module
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.report import LayerRecall, LayerReport, Report
from sparseprefill.adapters.session.session import Prefill, Session
from sparseprefill.adapters.session.watch import LOST, NONFINITE, STEPS, CallRecall
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

import sparseprefill as sp
from helpers import hf_models
from helpers.build import int32, make, one_lookup
from helpers.hf_models import STREAMING
from helpers.tables import from_length
from sparseprefill.metrics import LAST, SPREAD, WatchedRecall, lowest_rows, watched_recall

CALL = make(300, heads=4, kv_heads=2)
METHOD = sp.build("streaming", **STREAMING)
CLOSE: dict[str, Any] = {"abs": 1e-5}


class Seen:
    """The calls and results of an attached model, and what `sp.recall` says of their rows."""

    def __init__(self) -> None:
        self.calls: list[tuple[sp.AttentionCall, sp.Result]] = []

    def __call__(self, call: sp.AttentionCall, result: sp.Result) -> None:
        self.calls.append((call, result))

    def rows(self, layer: int, spread: bool) -> torch.Tensor:
        """``[Hq, n]``: recall of the real rows over, or at the end of, every call of a layer."""
        found = []
        for call, result in self.calls:
            if call.layer == layer:
                at = watched_recall(call, result)
                some = slice(at.spread) if spread else slice(at.spread, None)
                for b in range(call.q.shape[0]):
                    kept = sp.recall(call, result, rows=at.rows[b])[b, :, some]
                    found.append(kept[:, at.real[b, some]])
        return torch.cat(found, -1)

    def check(self, report: Report) -> None:
        """The report's figures are means over these rows, and the lowest of them."""
        layers = sorted({call.layer for call, _ in self.calls})
        means, least, firsts, lowest = [], [], [], []
        for layer in layers:
            spread, last = self.rows(layer, True).mean(-1), self.rows(layer, False)
            each = torch.minimum(spread, last.mean(-1)) if last.shape[1] else spread
            means.append(float(spread.mean()))
            least.append(float(each.min()))
            found = next(one for one in report.layers if one.layer == layer).recall
            assert found is not None
            assert pytest.approx(means[-1], **CLOSE) == found.mean
            assert pytest.approx(least[-1], **CLOSE) == found.least == pytest.approx(float(each[found.head]), **CLOSE)
            assert sum(call.layer == layer for call, _ in self.calls) == found.calls
            first, low = map(float, lowest_rows(self.rows(layer, True)))
            lowest.append(min(low, float(last.min()) if last.shape[1] else 1.0, 1.0))
            assert pytest.approx(lowest[-1], **CLOSE) == found.row_lowest
            assert min(first, 1.0) - 1e-5 <= found.row_p1 <= min(first, 1.0) + 1 / STEPS + 1e-5
            firsts.append(found.row_p1)
        assert pytest.approx(sum(means) / len(means), **CLOSE) == report.recall
        assert report.least_recall is not None
        assert pytest.approx(min(least), **CLOSE) == report.least_recall[0]
        assert (min(firsts), layers[firsts.index(min(firsts))]) == report.row_p1
        assert report.row_lowest is not None
        assert pytest.approx(min(lowest), **CLOSE) == report.row_lowest[0]


def first_layer(session: Session) -> LayerReport:
    return session.report("h", "i").layers[0]


# Which prefills


@pytest.mark.parametrize(("every", "chosen"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (100, [0]), (0, [])])
def test_every_nth_prefill_from_the_first_on(every: int, chosen: list[int]) -> None:
    heard: list[CallRecall] = []
    session = Session(METHOD, HostOptions(recall_every=every), hear_recall=heard.append)
    for number in range(7):
        prefill = Prefill()
        for layer in (0, 5, 2):  # all its layers, and both its chunks
            for end in (150, 300):
                q, k, v = CALL.q[:, :, end - 150 : end], CALL.k[:, :, :end], CALL.v[:, :, :end]
                session.run(sp.AttentionCall(q, k, v, layer=layer), prefill)
        assert (number in chosen) == (len(heard) > 0)
        assert [0, 0, 5, 5, 2, 2] * (number in chosen) == [one.layer for one in heard]
        heard.clear()
    report = session.report("h", "i")
    assert (7 if every else 0, len(chosen)) == (report.prefills, report.measured_prefills)
    calls = [one.recall.calls for one in report.layers if one.recall is not None]
    assert ([2 * len(chosen)] * 3 if every else []) == calls
    assert ("recall" in str(report)) == bool(every)


def test_prefills_that_run_dense_are_not_counted() -> None:
    """A short one may not be the one in a hundred; nor is a dense layer of a sparse prefill measured, or a window."""
    gate = from_length(200, heads=4, kv_heads=2, head_dim=8)
    session = Session(METHOD, HostOptions(recall_every=2, layers=[0, 1]), gate=gate)
    short = make(100, heads=4, kv_heads=2)
    for call in (short, CALL, short, CALL, short, CALL):
        prefill = Prefill()
        for one in (call, attrs.evolve(call, layer=1, window=20), attrs.evolve(call, layer=2)):
            session.run(one, prefill)
        assert (call is not short) == (prefill.watched is not None)
    report = session.report("h", "i")
    assert (3, 2) == (report.prefills, report.measured_prefills)
    assert [2, None, None] == [None if one.recall is None else one.recall.calls for one in report.layers]


def test_threads_measure_one_prefill_in_so_many() -> None:
    session, jobs, turns = Session(METHOD, HostOptions(recall_every=4)), 6, 10
    start = threading.Barrier(jobs)

    def run() -> None:
        for _ in range(turns):
            start.wait()
            prefill = Prefill()
            for layer in range(2):
                session.run(attrs.evolve(CALL, layer=layer), prefill)

    threads = [threading.Thread(target=run) for _ in range(jobs)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    report = session.report("h", "i")
    assert (60, 15) == (report.prefills, report.measured_prefills)
    assert [15, 15] == [one.recall.calls for one in report.layers if one.recall is not None]


# What it says


@pytest.mark.parametrize("tail", [0, 40])
@pytest.mark.parametrize("floor", [None, 0.7, {"target": 0.99, "dense_from": 1.0}], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_attach_reports_what_sp_recall_says(batch: int, floor: Any, tail: int) -> None:
    model, seen = hf_models.build("llama"), Seen()
    inputs = {"input_ids": hf_models.prompt(300)} if batch == 1 else hf_models.padded(300, (0, 70, 211))
    with attach(
        model, "streaming", gate=None, tail=tail, recall=floor, recall_every=2, observe=seen, **STREAMING
    ) as handle:
        model(**inputs)
        model(**inputs)
        del seen.calls[2:]
        model(**inputs)
    report = handle.report()
    assert (3, 2, 4) == (report.prefills, report.measured_prefills, len(seen.calls))
    seen.check(report)
    assert report.recall is not None
    assert f"recall in 2 of 3 prefills: {report.recall:.3f}, lowest" in str(report)
    found = report.layers[0].recall
    assert found is not None
    rows = f"rows: 1st percentile {found.row_p1:.3f}, lowest {found.row_lowest:.3f}"
    text = f"  recall {found.mean:.3f} (lowest {found.least:.3f}, head {found.head}; {rows})"
    assert text in str(report.layers[0])
    assert "recall below" not in str(report)


@torch.no_grad()
def test_chunks_behind_a_cache_are_one_prefill() -> None:
    model, seen, ids = hf_models.build("llama"), Seen(), hf_models.prompt(300)
    with attach(model, "streaming", gate=None, tail=0, recall_every=2, observe=seen, **STREAMING) as handle:
        for _ in range(2):
            cache = DynamicCache(config=model.config)
            for begin, end in ((0, 130), (130, 200), (200, 300)):
                model(ids[:, begin:end], past_key_values=cache)
    assert 12 == len(seen.calls)
    del seen.calls[6:]
    report = handle.report()
    assert (2, 1) == (report.prefills, report.measured_prefills)
    seen.check(report)


@pytest.mark.parametrize("name", ["streaming", "anchor-attention"])
@torch.no_grad()
def test_calls_in_parts(name: str) -> None:
    model, seen = hf_models.build("llama"), Seen()
    method = sp.default_registry().get(name)
    pipeline = attrs.evolve(method.pipeline(**method.small), workspace=1)
    with attach(model, pipeline, gate=None, tail=16, observe=seen) as handle:
        model(hf_models.prompt(300))
    assert all(result.parts is not None and result.parts.count > 1 for _, result in seen.calls)
    seen.check(handle.report())


@torch.no_grad()
def test_forwards_in_flight_and_models_that_come_back() -> None:
    """A prefill within another is one of its own; counting goes on over detaching and attaching."""
    model, ids, inner = hf_models.build("llama"), hf_models.prompt(120), [True]

    def observe(call: sp.AttentionCall, result: sp.Result) -> None:
        if inner.pop() if inner else False:
            model(ids)
            handle.detach()  # the outer forward ends as it began
            handle.bind()

    with attach(model, "streaming", gate=None, tail=0, recall_every=2, observe=observe, **STREAMING) as handle:
        model(ids)
        assert (2, 1) == (handle.report().prefills, handle.report().measured_prefills)
    before = handle.report()
    assert [1, 1] == [one.recall.calls for one in before.layers if one.recall is not None]
    model(ids)
    assert before == handle.report()
    with handle:
        model(ids)
    assert (3, 2) == (handle.report().prefills, handle.report().measured_prefills)
    copied = copy.deepcopy(model)
    with attach(copied, "streaming", gate=None, **STREAMING) as other:
        copied(ids)
    assert (1, 1) == (other.report().prefills, other.report().measured_prefills)


def test_first_heads_of_a_share_of_the_model() -> None:
    session = Session(METHOD, HostOptions(tail=0))
    session.run(attrs.evolve(CALL, first_head=8), Prefill())
    found = first_layer(session).recall
    assert found is not None
    assert 8 <= found.head < 12
    assert found.head - 8 == int(torch.argmin(_heads(CALL, METHOD.run(CALL))))


def _heads(call: sp.AttentionCall, result: sp.Result) -> torch.Tensor:
    kept = watched_recall(call, result).kept[0]
    return torch.minimum(kept[:, :SPREAD].mean(-1), kept[:, SPREAD:].mean(-1))


# Single rows


def test_one_row_that_loses_everything() -> None:
    """The last of a stretch that is looked at; the row before it is not, and nothing shows."""
    for row, lowest in ((599, 0.0), (598, 1.0)):
        call = one_lookup(1700, row, key=100)
        session = Session(sp.build("streaming", sink=16, window=64, block=16), HostOptions(tail=0))
        session.run(call, Prefill())
        found = first_layer(session).recall
        assert found is not None
        assert pytest.approx(lowest, abs=1e-3) == found.row_lowest
        assert pytest.approx(0.0 if row == 599 else 1.0, abs=1 / STEPS + 1e-3) == found.row_p1, "of 34 rows"
        assert found.least > 0.94


def made_of(rows: torch.Tensor, last: float) -> WatchedRecall:
    """rows: of the spread ones what each of two heads keeps, NaN where there is none."""
    kept = torch.cat([rows, torch.full((1, 2, LAST), last)], -1)
    return WatchedRecall(torch.zeros(1, SPREAD + LAST, dtype=torch.int64), ~kept[:, 0].isnan(), kept, SPREAD)


def test_rows_of_all_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """34 rows a call: of 306 the 1st percentile is the fourth from below. The last rows are none of them."""
    low = [0.0312, 0.2021, 0.4003, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99]
    heard: list[CallRecall] = []
    session = Session(METHOD, HostOptions(tail=0, recall_every=1), hear_recall=heard.append)
    for one in low:
        rows = torch.ones(1, 2, SPREAD) + 1e-6  # by rounding
        rows[0, 1, 5] = one
        monkeypatch.setattr(module, "watched_recall", lambda *_, rows=rows: made_of(rows, last=0.0125))
        session.run(CALL, Prefill())
    found = first_layer(session).recall
    assert found is not None
    assert 0.6 == found.row_p1
    assert pytest.approx(0.0125) == found.row_lowest
    assert [0.035, 0.205, 0.405, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99] == [one.row_p1 for one in heard]
    assert [pytest.approx(0.0125)] * 9 == [one.row_lowest for one in heard]
    monkeypatch.setattr(module, "watched_recall", lambda *_: made_of(torch.full((1, 2, SPREAD), 0.0), last=1.0))
    session.run(CALL, Prefill())
    found = first_layer(session).recall
    assert found is not None
    assert (0.0, 0.0, 10) == (found.row_p1, found.row_lowest, found.calls)


def test_rows_that_are_none_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.full((1, 2, SPREAD), torch.nan)
    rows[..., 3:5] = 0.25
    monkeypatch.setattr(module, "watched_recall", lambda *_: made_of(rows, last=1.0))
    session = Session(METHOD, HostOptions(tail=0))
    session.run(CALL, Prefill())
    found = first_layer(session).recall
    assert found is not None
    assert (0.25, 0.25, 0.25) == (found.mean, found.row_p1, found.row_lowest)


def test_calls_leave_no_more_than_their_counts() -> None:
    """What is kept of a layer has one size, however many calls there were; and so has what a call sends."""
    session = Session(METHOD, HostOptions(tail=0, recall_every=1))
    sizes = set()
    for call in (CALL, make(300, heads=4, kv_heads=2, batch=3), CALL, CALL):
        session.run(call, Prefill())
        session.report("h", "i")
        kept = session._watch._layers[0]
        sizes.add((tuple(kept.sums.shape), tuple(kept.below.shape)))
        assert 2 * (4 + 1) + 2 + STEPS + 1 == module._figures(call, METHOD.run(call)).numel()
    assert {((2, 4 + 1), (STEPS + 1,))} == sizes


class Unread(TorchDispatchMode):
    """Fails where a value is read on the host, which waits for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_measuring_reads_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    result, found, unread = METHOD.run(CALL), made_of(torch.rand(1, 2, SPREAD), last=1.0), cast(Any, Unread)
    monkeypatch.setattr(module, "watched_recall", lambda *_: found)  # whose kernels on a CPU may
    with unread():
        figures = module._figures(CALL, result)
    with unread(), pytest.raises(AssertionError):
        float(figures[0])


# strict_recall


def test_the_first_call_below_is_warned_of_and_each_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    heads = _heads(CALL, METHOD.run(CALL))
    heard: list[CallRecall] = []
    session = Session(METHOD, HostOptions(tail=0, recall_every=1, strict_recall=0.9), hear_recall=heard.append)
    with caplog.at_level(logging.WARNING, "sparseprefill"):
        for layer in (3, 1, 3):
            session.run(attrs.evolve(CALL, layer=layer), Prefill())
    assert [(3, True), (1, True), (3, True)] == [(one.layer, one.low) for one in heard]
    (record,) = caplog.records
    text = f"streaming: layer 3, head {int(heads.argmin())} keeps {float(heads.min()):.3f} of the attention mass"
    assert record.message.startswith(text)
    assert "less than strict_recall, 0.9" in record.message
    report = session.report("h", "i")
    assert {1: (1, 1), 3: (2, 2)} == {
        one.layer: (one.recall.calls, one.recall.low_calls) for one in report.layers if one.recall is not None
    }
    assert "recall below 0.9: 3 of 3 calls" in str(report).split("\n")


@pytest.mark.parametrize("name", ["dense", "streaming"])
def test_what_keeps_everything_is_not_below(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Rounding is none; and a call whose tail is all of it kept everything."""
    session = Session(sp.build(name), HostOptions(tail=300, strict_recall=1.0))
    session.run(CALL, Prefill())
    assert not caplog.records
    found = first_layer(session).recall
    assert found is not None
    assert 0 == found.low_calls
    assert found.mean == pytest.approx(1.0, **CLOSE)
    assert found.mean <= 1.0


# Nothing waits


class Later:
    """In the place of a CUDA event: tells when what went before it has happened."""

    def __init__(self) -> None:
        self.happened, self.waited = False, False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.waited |= not self.happened
        self.happened = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Later]:
    """Figures that arrive when the test says so."""
    made: list[Later] = []

    def of(call: sp.AttentionCall, figures: torch.Tensor) -> Any:
        made.append(Later())
        return module._Coming(call.layer, call.first_head, figures, made[-1])  # type: ignore[arg-type]

    monkeypatch.setattr(module._Coming, "of", of)
    return made


def test_figures_are_read_when_they_are_there(events: list[Later]) -> None:
    heard: list[CallRecall] = []
    session, prefill = Session(METHOD, hear_recall=heard.append), Prefill()
    for layer in range(3):
        session.run(attrs.evolve(CALL, layer=layer), prefill)
    assert [] == heard
    events[0].happened = events[2].happened = True
    session.run(CALL, Prefill())  # which is not measured, but looks
    assert [0] == [one.layer for one in heard], "in their order"
    events[1].happened = True
    session.read_recall()
    assert [0, 1, 2] == [one.layer for one in heard]
    assert not any(one.waited for one in events)


def test_a_report_waits_for_what_is_on_its_way(events: list[Later]) -> None:
    session, prefill = Session(METHOD), Prefill()
    for layer in range(2):
        session.run(attrs.evolve(CALL, layer=layer), prefill)
    assert [1, 1] == [one.recall.calls for one in session.report("h", "i").layers if one.recall is not None]
    assert [True, True] == [one.waited for one in events]


def test_what_is_on_its_way_is_bounded(events: list[Later], monkeypatch: pytest.MonkeyPatch) -> None:
    assert 4096 == module.WAITING
    monkeypatch.setattr(module, "WAITING", 3)
    session, prefill = Session(METHOD), Prefill()
    for layer in range(5):
        session.run(attrs.evolve(CALL, layer=layer), prefill)
    assert [True, True, False, False, False] == [one.waited for one in events]


def test_a_result_does_not_depend_on_being_measured() -> None:
    one, other = (Session(METHOD, HostOptions(recall_every=every)).run(CALL, Prefill()) for every in (1, 0))
    assert isinstance(one, sp.Result)
    assert isinstance(other, sp.Result)
    assert torch.equal(one.out, other.out)


def test_what_cannot_be_measured_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    session, prefill = Session(METHOD), Prefill()
    q = CALL.q.clone()
    q[0, 1, 280:] = float("nan")
    session.run(attrs.evolve(CALL, q=q), prefill)

    def full(*_: object) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(module, "watched_recall", full)
    assert isinstance(session.run(CALL, prefill), sp.Result)
    report = session.report("h", "i")
    assert {NONFINITE: 1, LOST: 1} == report.notes
    assert (None, None) == (report.recall, report.layers[0].recall)
    assert "recall in" not in str(report)


def test_padding_alone_says_nothing() -> None:
    session = Session(METHOD, HostOptions(tail=0))
    call = make(40, batch=2, starts=int32(40, 40))
    session.run(call, Prefill())
    assert first_layer(session).recall is None


# The report by hand


def test_figures_over_layers() -> None:
    def layer(index: int, **given: Any) -> LayerReport:
        return LayerReport(layer=index, mode="sparse", sparse_calls=1, recall=LayerRecall(**given))

    layers = (
        layer(0, mean=0.9, least=0.8, head=3, row_p1=0.25, row_lowest=0.2, calls=4, low_calls=1),
        LayerReport(layer=1),
        layer(2, mean=0.7, least=0.5, head=1, row_p1=0.3, row_lowest=0.1, calls=4, low_calls=4),
    )
    report = Report(
        method="m", host="h", implementation="i", min_query=16, layers=layers, prefills=205, measured_prefills=3
    )
    assert report.recall == pytest.approx(0.8)
    assert (0.5, 2, 1) == report.least_recall
    assert "recall in 3 of 205 prefills: 0.800, lowest 0.500 (layer 2, head 1)" in str(report).split("\n")
    assert ((0.25, 0), (0.1, 2)) == (report.row_p1, report.row_lowest)
    assert "recall of rows: 1st percentile 0.250 (layer 0), lowest 0.100 (layer 2)" in str(report).split("\n")
    assert "recall below 0.85: 5 of 8 calls" in str(attrs.evolve(report, strict_recall=0.85)).split("\n")
    nothing = attrs.evolve(report, layers=layers[1:2], strict_recall=0.5)
    assert (None, None) == (nothing.recall, nothing.least_recall)
    assert (None, None) == (nothing.row_p1, nothing.row_lowest)
    assert "recall" not in str(nothing)
