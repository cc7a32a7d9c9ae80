"""A step writes down how its rows were computed, and counts prompts and what a cache held before them."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from sparseprefill.adapters.serving.requests import Row
from sparseprefill.adapters.serving.tally import Tally
from sparseprefill.adapters.serving.wishes import OFF
from sparseprefill.adapters.serving.written import Methods, Write
from sparseprefill.adapters.session.kinds import Code, Why
from sparseprefill.adapters.session.session import Prefill
from sparseprefill.adapters.vllm.names import Names

import sparseprefill as sp
from sparseprefill.breakeven.before import Before
from sparseprefill.breakeven.table import Verdict

from .test_failures import HEADS, SIZE, runtime


class FromKeys:
    """A gate for calls of at least so many keys."""

    def __init__(self, least: int) -> None:
        self.least = least

    def judge(self, call: sp.AttentionCall, method: str) -> Verdict:
        return Verdict(call.kv_len >= self.least, reason="too short")


class Cache:
    """What a server's adapter keeps: here the rows that were written, and by what."""

    def __init__(self, before: Before | None = None) -> None:
        self.found, self.wrote = before or Before(), list[tuple[str | None, int, int, str]]()

    def before(self, row: Row) -> Before:
        return self.found

    def writing(self, row: Row) -> Write:
        return lambda method: self.wrote.append((row.name, row.start, row.end, method))


class Counts(Tally):
    """Metrics without their library."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = Counter[tuple[str, ...]]()

    def _count(self, name: str, amount: int, *labels: str) -> None:
        self.counted[name, *labels] += amount


class Server:
    """Steps of rows, of which each layer runs sparse or not."""

    def __init__(self, before: Before | None = None) -> None:
        self.counts = Counts()
        self.mine = runtime(sp.build("streaming"), self.counts)
        self.cache = self.mine.written = Cache(before)
        names = dict.fromkeys("abcd")
        self.mine.names = Names(lambda: SimpleNamespace(requests=names))

    def step(self, *rows: Row, sparse: tuple[int, ...] = (), layers: int = 2) -> None:
        self.mine.prefills(object(), rows, lambda _: {}, layers)
        for i, chunk in enumerate(self.mine.chunks):
            if chunk is not None:
                chunk.sparse = layers if i in sparse else 0
                chunk.reasons.update({} if i in sparse else {Why(Code.GATE, "too short"): layers})
                chunk.settle()

    @property
    def report(self) -> Any:
        return self.mine.report()


def test_each_row_is_written_down_once_it_is_computed() -> None:
    server = Server()
    rows = [Row(0, 40, "a", 90), Row(0, 40, "b", 40), Row(0, 4, "c", 4), Row(0, 40, "d", 40, OFF), Row(0, 40)]
    server.step(*rows, sparse=(0,))
    assert sorted(
        [("a", 0, 40, "streaming"), ("b", 0, 40, ""), ("c", 0, 4, ""), ("d", 0, 40, "")], key=lambda one: str(one[0])
    ) == sorted(server.cache.wrote, key=lambda one: str(one[0])), "but one that nobody names"


def test_a_chunk_of_which_one_layer_ran_sparse_is_sparse() -> None:
    server = Server()
    server.mine.prefills(object(), [Row(0, 40, "a", 40)], lambda _: {}, 3)
    (chunk,) = server.mine.chunks
    assert chunk is not None
    chunk.reasons[Why(Code.ERROR, "it failed")] += 2
    chunk.sparse += 1
    assert [] == server.cache.wrote
    server.mine.settle()
    assert [("a", 0, 40, "streaming")] == server.cache.wrote


def test_prompts_are_counted_once_with_what_a_cache_held_before_them() -> None:
    before = Before(sparse=1800, dense=100, unknown=7, methods=("streaming",), why="a store")
    server = Server(before)
    server.step(Row(1907, 1950, "a", 2000), Row(0, 40, "b", 40), sparse=(0,))
    server.step(Row(1950, 2000, "a", 2000), sparse=(0,))
    server.step(Row(0, 4, "c", 4))
    server.step(Row(0, 4, "d", 80))
    server.step(Row(4, 80, "d", 80), sparse=(0,))
    assert {"sparse behind sparse": 1, "dense": 2, "sparse": 1} == server.report.prompts
    assert {"sparse": 1800, "dense": 100, "unknown": 7} == server.report.cached
    text = str(server.report)
    assert "\nprompts: 2 dense, 1 sparse, 1 sparse behind sparse\n" in text
    assert "\ncached tokens before them: 100 dense, 1,800 sparse, 7 unknown" in text
    counted = {key: n for key, n in server.counts.counted.items() if key[0] in ("prompts", "cached_tokens")}
    assert {
        ("prompts", "sparse", "sparse"): 1,
        ("prompts", "dense", "nothing"): 2,
        ("prompts", "sparse", "nothing"): 1,
        ("cached_tokens", "sparse"): 1800,
        ("cached_tokens", "dense"): 100,
        ("cached_tokens", "unknown"): 7,
    } == counted


def test_a_preempted_request_is_told_anew_what_is_there() -> None:
    server = Server(Before(sparse=64))
    (first,) = server.mine.prefills(object(), [Row(0, 64, "a", 90)], lambda _: {})
    (again,) = server.mine.prefills(object(), [Row(48, 90, "a", 90)], lambda _: {})
    assert (None, Before(sparse=64)) == (first.before, again.before)


def test_a_server_that_keeps_nothing_of_its_cache_tells_nothing() -> None:
    server = Server()
    server.mine.written = None
    (prefill,) = server.mine.prefills(object(), [Row(48, 90, "a", 90)], lambda _: {})
    assert prefill.before is None


@pytest.mark.parametrize(("before", "sparse"), [(Before(sparse=60), True), (Before(dense=60), False)])
def test_layers_go_on_as_the_prefix_was_computed(before: Before, sparse: bool) -> None:
    """By their sizes the other way round: the gate finds one sparse and the other too small."""
    least = 1000 if sparse else 10
    session = runtime(sp.build("dense", block=16), gate=FromKeys(least)).session
    prefill, x = Prefill(begin=60, before=before), torch.randn(1, HEADS, 120, SIZE)
    for first in (60, 100):
        call = sp.AttentionCall(x[:, :, first : first + 40], x[:, :, : first + 40], x[:, :, : first + 40])
        outcome = session.run(evolve(call, prompt_lengths=140), prefill)
        how = "sparse" if sparse else "dense"
        said = f"behind cached tokens (60 computed {how}) the prompt goes on {how}"
        assert said in (session.report("M", "STOCK").notes if isinstance(outcome, sp.Result) else outcome.reason)
        assert sparse == isinstance(outcome, sp.Result)
        x = torch.randn(1, HEADS, 140, SIZE)


@pytest.mark.parametrize("place", ["before", "writing", "write"])
def test_what_cannot_be_kept_ends_nothing_and_is_said_once(place: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> Any:
        raise KeyError("block")

    server = Server(Before(sparse=48))
    setattr(server.cache, "writing" if place == "write" else place, fail if place != "write" else lambda row: fail)
    for name in "ab":
        server.step(Row(48, 90, name, 90), sparse=(0,))
    (record,) = caplog.records
    why = "it is not known any more, after KeyError: 'block'"
    assert f"sparseprefill: how cached tokens were computed: {why}" == record.getMessage()
    assert {"sparse behind sparse", "sparse behind unknown"} >= set(server.report.prompts)
    assert Before(unknown=5, why=why) == server.mine._before(Row(5, 9, "c"))


def test_numbers_of_methods_are_given_once_and_run_out() -> None:
    methods = Methods()
    assert [1, 2, 3, 2, 1] == [methods.number(name) for name in ("", "a", "b", "a", "")]
    assert Before(sparse=7, dense=2, unknown=1, methods=("a", "b"), why="x") == methods.before([1, 2, 3, 4], "x")
    assert Before(dense=2) == methods.before([0, 2], "x")
    assert Before() == methods.before([])
    found = [methods.number(f"{i}") for i in range(300)]
    assert max(found) == methods.LAST
    assert 300 - 252 == found.count(methods.UNKNOWN)
