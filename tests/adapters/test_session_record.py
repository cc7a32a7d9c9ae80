"""What a session records and says: counts, densities, texts, warnings, and calls with a window."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.session import ledger
from sparseprefill.adapters.session import session as module
from sparseprefill.adapters.session.defaults import MIN_QUERY
from sparseprefill.adapters.session.ledger import LayerRecord, Ran, Room, Uncounted, sizes
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.prospects import NOT_CHOSEN
from sparseprefill.adapters.session.report import LayerRecall, LayerReport, Report
from sparseprefill.adapters.session.session import WHOLE, Fallback, Prefill, Session
from sparseprefill.adapters.session.watch import CallRecall

import sparseprefill as sp
from helpers.build import make
from helpers.stubs import Estimate
from helpers.tables import from_length
from sparseprefill.plan import Rounding

CALL = make(32, heads=4, kv_heads=2)
METHOD = sp.build("streaming", sink=8, window=8, block=8)


def uncounted(pairs: int = 0) -> Uncounted:
    """Something that holds so many pairs of every head, 32 bytes of memory, and 528 pairs a head allowed."""
    return Uncounted(CALL.geometry, pairs=torch.full((1, 4), pairs))


def test_a_layer_by_hand() -> None:
    record = LayerRecord(3)
    assert LayerReport(layer=3) == record.report(mean=False)
    record.count("sparse", (2, 5, 7))
    assert evolve(LayerReport(layer=3, mode="sparse", sparse_calls=1), batch=2, query_length=5, key_length=7) == (
        record.report(mean=False)
    )
    record.begin(1)
    record.measure(uncounted(132))
    record.keep(uncounted(66))
    assert (32, 1) == (record.held, len(record.waiting))
    found = record.report(mean=True)
    assert (198 / 1056, 132 / 528) == (found.density, found.mean_density)
    assert (0, []) == (record.held, record.waiting)
    assert (4 * 198, 4 * 1056) == record.pairs
    assert (4 * 132, 4 * 528) == record.total


def test_another_prefill_begins_from_nothing() -> None:
    record = LayerRecord(0)
    record.count("sparse", (1, 32, 32))
    record.begin(5)
    record.keep(uncounted(66))
    record.measure(uncounted(66))
    record.lost = True
    record.begin(5)
    assert (1, 32, True) == (len(record.waiting), record.held, record.lost)
    record.begin(6)
    assert ([], 0, False, (0, 0), 6) == (record.waiting, record.held, record.lost, record.pairs, record.serial)
    assert (4 * 66, 4 * 528) == record.total
    assert record.report(mean=False).density is None
    assert 66 / 528 == record.report(mean=True).mean_density


def test_layers_share_one_room() -> None:
    """Of 80 bytes 40 are taken: the first result waits as it is, and the second is counted at once."""
    room = Room(40)
    first, second = LayerRecord(0, room), LayerRecord(1, room)
    for record in (first, second):
        record.keep(uncounted(66), most=80)
    assert (72, 32, 0) == (room.held, first.held, second.held)
    for record in (first, second):
        record.report(mean=False)
    assert 40 == room.held


def test_a_layer_says_which_heads_stayed_in_16_bits() -> None:
    record, plan = LayerRecord(0), sp.Plan(sp.SparseMask.full(CALL))
    plain = sp.Result(CALL.q, CALL.q[..., 0], plan)
    for errors, wanted, text in (
        ([0.0, 0.2, 0.1, torch.nan], (1, 3), "8 bits, heads 1, 3 in 16"),
        ([0.0] * 4, (), "8 bits"),
    ):
        rounded = evolve(plain, rounded=Rounding("int8", torch.tensor([errors]), 0.1))
        record.ran(Ran.of(rounded, (1, 32, 32), 0), None)
        record.ran(Ran.of(plain, (1, 32, 32), 0), None)  # a chunk of it in 16 bits
        found = record.report(mean=False)
        assert found.in_16_bits == wanted
        assert str(found).endswith(text)
    record.ran(Ran.of(plain, (1, 32, 32), 1), None)
    assert record.report(mean=False).in_16_bits is None


@pytest.mark.parametrize("mode", ["dense", "window"])
def test_a_layer_that_ran_otherwise_last_has_no_density(mode: Any) -> None:
    record = LayerRecord(0)
    record.begin(0)
    record.measure(uncounted(66))
    record.count("sparse", (1, 1, 1))
    assert 0.125 == record.report(mean=False).density
    record.count(mode, (1, 1, 1))
    found = record.report(mean=False)
    assert (mode, None, 2) == (found.mode, found.density, found.calls)


def test_what_is_lost_leaves_the_density_unknown() -> None:
    record = LayerRecord(0)
    record.begin(0)
    record.count("sparse", (1, 1, 1))
    record.measure(uncounted(66))
    record.lost = True
    assert record.report(mean=False).density is None


def test_sizes_of_a_call() -> None:
    assert (2, 9, 14) == sizes(make(9, 14, batch=2))


def test_masks_that_wait_hold_their_lists() -> None:
    result = METHOD.run(CALL)
    waiting = Uncounted.of(result)
    assert (sum(mask.nbytes for mask in result.plan.computed()), None) == (waiting.held, waiting.pairs)
    computed, allowed = waiting.count()
    assert (int(result.mask.to_dense().sum()), 4 * 528) == (computed, allowed)


def test_the_text_of_a_layer() -> None:
    assert "layer   3  unused" == str(LayerReport(layer=3, batch=4))
    one = LayerReport(
        layer=12, mode="sparse", sparse_calls=2, window_calls=3, dense_calls=5, batch=1, query_length=8, key_length=16
    )
    assert 10 == one.calls
    assert "layer  12  sparse   10 calls  1 x 8 queries, 16 keys  density not counted" == str(one)
    one = evolve(one, mode="dense")
    assert "layer  12  dense    10 calls  1 x 8 queries, 16 keys" == str(one)
    one = evolve(one, mode="sparse", density=0.125)
    assert str(evolve(one, density=0.25)).endswith("16 keys  density 0.250")
    assert str(evolve(one, density=0.25, mean_density=0.5)).endswith("keys  density 0.250 (mean 0.500)")
    assert str(evolve(one, reasons={"small": 2, "window": 1})).endswith("density 0.125  dense: small (2x); window (1x)")


def test_the_text_of_a_report() -> None:
    report = Report(method="streaming", host="here", implementation="sdpa", min_query=16)
    assert "streaming on here (dense: sdpa; no grain)\ndense by length (fewer than 16 query rows): 0 forwards" == (
        str(report)
    )
    assert "streaming on here (dense: sdpa; no grain; dense tail 9 rows)" in str(evolve(report, tail=9))
    more = evolve(report, grain=8, short_forwards=3, layers=(LayerReport(layer=0),), notes={"seen": 2}, gate="a table")
    assert [
        "streaming on here (dense: sdpa; grain 8 tokens)",
        "layer   0  unused",
        "dense by length (fewer than 16 query rows): 3 forwards",
        "dense by break-even: a table",
        "note: seen (2x)",
    ] == str(more).split("\n")


def test_sums_over_layers() -> None:
    layers = (
        LayerReport(layer=0, density=0.2, reasons={"a": 1}),
        LayerReport(layer=1, reasons={"a": 2, "b": 3}),
        LayerReport(layer=2, density=0.4),
    )
    report = Report(method="m", host="h", implementation="i", min_query=16, layers=layers)
    assert {"a": 3, "b": 3} == report.fallbacks
    assert pytest.approx(0.3) == report.density
    assert evolve(report, layers=layers[1:2]).density is None


def test_a_session_reports_what_it_was_told() -> None:
    session = Session(METHOD)
    assert (16, 16, False, 128) == (session.min_query, MIN_QUERY, session.strict, session.tail)
    assert (sp.DenseRows(128),) == session.route.known[0].refiners
    assert METHOD is Session(METHOD, HostOptions(tail=0)).route.known[0]
    session.count_short()
    session.count_short()
    session.expect([4, 2])
    session.note("seen")
    session.note("seen")
    found = session.report("host", "own")
    assert ("streaming", "host", "own", 16, 1) == (
        found.method, found.host, found.implementation, found.min_query, found.grain
    )  # fmt: skip
    assert (2, {"seen": 2}, "", 128) == (found.short_forwards, found.notes, found.gate, found.tail)
    assert (LayerReport(layer=2), LayerReport(layer=4)) == found.layers


def test_the_fewest_rows_of_a_prefill() -> None:
    assert 2 == Session(METHOD, HostOptions(min_query=2)).min_query


def test_calls_with_a_window_run_all_of_its_keys() -> None:
    session, call = Session(METHOD), evolve(CALL, window=5, layer=1)
    result = session.run(call, Prefill())
    assert isinstance(result, sp.Result)
    assert 1.0 == result.density
    found = session.report("h", "i").layers[0]
    assert ("window", 1, 0, 0, None) == (
        found.mode, found.window_calls, found.sparse_calls, found.dense_calls, found.density
    )  # fmt: skip


class Refusing(sp.ReferenceExecutor):
    """Can run nothing."""

    def unsupported(self, call: sp.AttentionCall) -> str | None:
        return "not here"


def test_an_executor_that_cannot_run_a_window_leaves_it_to_the_host() -> None:
    session = Session(evolve(METHOD, executor=Refusing()))
    found = session.run(evolve(CALL, window=5), Prefill())
    assert Fallback("Refusing: not here") == found
    assert session.whole(CALL) is None
    assert {} == session.report("h", "i").notes


def test_whole_is_dense_attention_and_a_note() -> None:
    session = Session(METHOD)
    out = session.whole(CALL)
    assert out is not None
    torch.testing.assert_close(sp.build("dense").run(CALL).out, out)
    assert {WHOLE: 1} == session.report("h", "i").notes


def test_below_break_even_the_host_computes_which_is_no_failure() -> None:
    table = from_length(64)
    session = Session(METHOD, HostOptions(strict=True), gate=table)
    found = session.run(CALL, Prefill())
    assert isinstance(found, Fallback)
    assert found.small
    assert str(table) == session.report("h", "i").gate
    assert not Fallback("x").small


def test_what_a_gate_says_without_objecting_is_noted() -> None:
    session = Session(METHOD, gate=from_length(16, dtype="float64"))
    assert isinstance(session.run(CALL, Prefill()), sp.Result)
    assert [1] == list(session.report("h", "i").notes.values())
    for none in (None, False):
        assert Session(METHOD, gate=none).route.gate is None


@pytest.mark.parametrize("warn", [True, False])
def test_the_first_fallback_of_each_reason_is_logged(warn: bool, caplog: pytest.LogCaptureFixture) -> None:
    session = Session(METHOD, warn=warn)
    with caplog.at_level(logging.WARNING):
        for layer in (0, 1):
            for reason in ("one", "two"):
                assert Fallback(reason) == session.decline(layer, reason, (1, 2, 3))
    said = [record.getMessage() for record in caplog.records]
    assert (["streaming: layer 0 runs dense: one", "streaming: layer 0 runs dense: two"] if warn else []) == said
    found = session.report("h", "i")
    assert {"one": 2, "two": 2} == found.fallbacks
    assert (1, 2, 3) == (found.layers[1].batch, found.layers[1].query_length, found.layers[1].key_length)


def test_warnings_are_the_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Session(METHOD).decline(0, "one", (1, 2, 3))
    assert 1 == len(caplog.records)


@pytest.mark.parametrize("strict", [True, False])
def test_objections_are_fallbacks_unless_strict(strict: bool) -> None:
    session = Session(sp.Pipeline(Estimate(objection="never")), HostOptions(strict=strict), warn=False)
    if strict:
        with pytest.raises(sp.UnsupportedCallError, match=r"layer 0: .*Estimate: never"):
            session.run(CALL, Prefill())
        return
    found = session.run(CALL, Prefill())
    assert isinstance(found, Fallback)
    assert "Estimate: never" in found.reason


def test_an_observer_sees_sparse_calls() -> None:
    seen: list[Any] = []
    session = Session(METHOD, observe=lambda call, result: seen.append((call, result)))
    result = session.run(CALL, Prefill())
    session.run(evolve(CALL, window=5), Prefill())
    assert [(CALL, result)] == seen


@pytest.mark.parametrize("measure", [True, False])
def test_pairs_are_counted_at_once_or_when_asked(measure: bool) -> None:
    session, prefill = Session(METHOD, HostOptions(measure=measure, tail=0)), Prefill()
    session.run(CALL, prefill)
    record = session._records[0]
    assert measure == (not record.waiting)
    assert measure == bool(record.total[1])
    found = session.report("h", "i").layers[0]
    assert METHOD.run(CALL).density == found.density
    assert (found.density if measure else None) == found.mean_density


def test_masks_wait_as_long_as_all_layers_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of others the count waits, a number for each head, and their density is known as well."""
    result = METHOD.run(CALL)
    held = Uncounted.of(result).held
    assert 64 << 20 == module.KEPT_BYTES
    monkeypatch.setattr(module, "KEPT_BYTES", 2 * held)
    session, prefill = Session(METHOD, HostOptions(tail=0)), Prefill()
    for layer in range(3):
        session.run(evolve(CALL, layer=layer), prefill)
    assert [1, 1, 0] == [len(session._records[layer].waiting[0].lists) for layer in range(3)]
    assert 2 * held == session._room.held
    assert [result.density] * 3 == [one.density for one in session.report("h", "i").layers]


def test_what_is_counted_at_once_is_added_up_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 0)
    session, prefill = Session(METHOD, HostOptions(tail=0)), Prefill()
    parts = [evolve(CALL, q=CALL.q[:, :, at : at + 16], q_offset=at) for at in (0, 16)]
    done = [int(session.run(part, prefill).mask.to_dense().sum()) for part in parts]  # type: ignore[union-attr]
    assert sum(done) / (4 * 528) == session.report("h", "i").layers[0].density


@pytest.mark.parametrize("why", ["memory", "capture"])
def test_what_cannot_be_counted_says_so(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Uncounted) -> Uncounted:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(module, "KEPT_BYTES", 0)
    if why == "memory":
        monkeypatch.setattr(Uncounted, "counted", fail)
    else:
        monkeypatch.setattr(ledger, "recording", lambda: True)
    session = Session(METHOD, HostOptions(tail=0, recall_every=0))
    session.run(CALL, Prefill())
    found = session.report("h", "i")
    assert (None, True) == (found.density, session._records[0].lost)
    assert "32 keys  density not counted" in str(found)


def test_room_for_masks_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Uncounted.of(METHOD.run(CALL)).held
    monkeypatch.setattr(module, "KEPT_BYTES", 3 * held)
    session, first, second = Session(METHOD, HostOptions(tail=0)), Prefill(), Prefill()

    def at_once(prefill: Prefill, *layers: int) -> list[bool]:
        for layer in layers:
            session.run(evolve(CALL, layer=layer), prefill)
        return [not session._records[layer].waiting[0].lists for layer in layers]

    assert [False, False, False, True] == at_once(first, 0, 1, 2, 3)
    assert [False, True] == at_once(second, 0, 3), "as much as the layer's own of the prefill before"
    session.report("h", "i")
    assert [False] * 3 == at_once(second, 0, 1, 2), "nothing waits behind a report"
    assert [True] == at_once(second, 3)
    assert 3 * held == sum(one.held for one in session._records.values()) == session._room.held


def test_prefills_have_numbers_of_their_own() -> None:
    first, second = Prefill(), Prefill()
    assert first.serial != second.serial
    assert first.memory is not second.memory
    session = Session(METHOD)
    for prefill in (first, second, second):
        session.run(CALL, prefill)
    assert 2 == len(session._records[0].waiting)


def test_the_head_that_keeps_least_by_either_figure() -> None:
    spread = (0.9, 0.8)
    assert (0.8, 5) == CallRecall(0, 4, spread, ()).least
    assert (0.5, 4) == CallRecall(0, 4, spread, (0.5, 0.95)).least
    assert (0.8, 5) == CallRecall(0, 4, spread, (0.85, 0.95)).least
    with pytest.raises(ValueError, match="shorter"):
        _ = CallRecall(0, 4, spread, (0.9,)).least


def test_what_is_not_said_of_a_fallback_or_a_recall_is_nothing() -> None:
    found = Fallback("short")
    assert (False, False) == (found.chosen, found.small)
    assert 0 == LayerRecall(mean=0.9, least=0.8, head=1, row_p1=0.5, row_lowest=0.1, calls=2).low_calls


def test_what_waits_counts_each_time() -> None:
    record = LayerRecord(0)
    for held in (32, 64, 96):
        record.keep(uncounted(66))
        assert (held, held) == (record.held, record.room.held)


def skipping(pairs: int, gone: int) -> Uncounted:
    """Lists of so many pairs a head, of which some were left out by their logits."""
    return evolve(uncounted(pairs), skipped=torch.full((1, 4), gone))


def test_the_density_of_a_call_leaves_out_what_was_skipped() -> None:
    one = skipping(200, 30)
    computed, allowed = one.count()
    assert (4 * 170, computed / allowed) == (computed, float(one.density()))


def test_the_share_that_was_skipped_by_hand() -> None:
    """Of the pairs of the masks; those that were left out are not in the density."""
    record = LayerRecord(0)
    record.count("sparse", (1, 32, 32))
    record.begin(0)
    assert record.report(mean=False).skipped is None
    record.measure(skipping(132, 33))
    record.keep(skipping(132, 0))
    found = record.report(mean=False)
    assert (33 / 264, 231 / 1056) == (found.skipped, found.density)
    record.lost = True
    assert record.report(mean=False).skipped is None
    record.begin(1)
    assert record.report(mean=False).skipped is None
    record.measure(skipping(132, 0))
    assert 0.0 == record.report(mean=False).skipped
    for mode in ("dense", "window"):
        record.count(mode, (1, 32, 32))
        assert record.report(mean=False).skipped is None
    assert str(LayerReport(layer=0, mode="dense", skipped=0.125)).endswith("  skipped 0.125")


def test_whether_recall_is_measured() -> None:
    assert Session(METHOD).measures_recall is True
    assert Session(METHOD, HostOptions(recall_every=0)).measures_recall is False


def test_a_layer_that_is_only_named_has_no_cross_attention() -> None:
    session = Session(METHOD)
    session.expect([3])
    assert not session.cross(3)
    assert [0] == [one.cross_calls for one in session.report("h", "i").layers]


def test_what_a_gate_leaves_to_the_host_the_executor_may_compute_as_well() -> None:
    found = Session(METHOD, gate=from_length(64)).run(CALL, Prefill())
    assert isinstance(found, Fallback)
    assert (True, True) == (found.chosen, found.small)
    left = Session(METHOD, HostOptions(layers=[1])).run(CALL, Prefill())
    assert isinstance(left, Fallback)
    assert not left.chosen


def test_layers_like_one_that_a_gate_left_are_recorded_without_asking_again() -> None:
    session = Session(METHOD, HostOptions(layers=[0, 1]), gate=from_length(64))
    verdict = session.run(CALL, Prefill())
    assert isinstance(verdict, Fallback)
    for layer in (1, 2):
        session.again(layer, verdict, (1, 32, 40))
    found = session.report("h", "i").layers
    assert [{verdict.reason: 1}, {verdict.reason: 1}, {NOT_CHOSEN: 1}] == [one.reasons for one in found]
    assert (1, 32, 40) == (found[2].batch, found[2].query_length, found[2].key_length)
    every = Session(METHOD)
    every.again(7, verdict, (1, 32, 40))
    assert {verdict.reason: 1} == every.report("h", "i").fallbacks


def test_layers_that_were_not_seen_this_time() -> None:
    session = Session(METHOD)
    session.expect([5, 1])
    session.run(evolve(CALL, layer=3), Prefill())
    assert [1, 3] == session.missing({5})
    assert [] == session.missing({1, 3, 5, 7})


class Whole(sp.ReferenceExecutor):
    """Does not know how to skip."""

    def execute(self, call: sp.AttentionCall, plan: sp.Plan) -> sp.Result:
        return evolve(super().execute(call, evolve(plan, skip_below=None)), plan=plan)


def test_why_nothing_was_skipped_is_noted() -> None:
    short = Session(evolve(METHOD, refiners=(sp.SkipSoftmax(40.0, grain=None),)), HostOptions(tail=0))
    for _ in range(2):
        short.run(CALL, Prefill())
    ((note, count),) = short.report("h", "i").notes.items()
    assert "SkipSoftmax: below is 40 and the prompt is not longer, so nothing is skipped" == note
    assert 2 == count
    refined = evolve(METHOD, refiners=(sp.SkipSoftmax(4.0, grain=None),))
    session = Session(evolve(refined, executor=Whole()), HostOptions(tail=0))
    session.run(CALL, Prefill())
    assert ["the executor cannot skip tiles by their logits; it computed the whole mask"] == (
        list(session.report("h", "i").notes)
    )
    assert session.report("h", "i").layers[0].skipped is None
    skips = Session(refined, HostOptions(tail=0))
    skips.run(CALL, Prefill())
    assert {} == skips.report("h", "i").notes
    assert skips.report("h", "i").layers[0].skipped is not None
