"""What is known of a prefix in SGLang's radix cache is what was written there, whatever was evicted since."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import gc
import time
from array import array
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sparseprefill.adapters.serving.requests import Row
from sparseprefill.adapters.sglang.runtime import LEAST, written_of
from sparseprefill.adapters.sglang.texts import FORGOTTEN as FORGOTTEN_WITHIN
from sparseprefill.adapters.sglang.texts import PIECE, Texts, together

from sparseprefill.breakeven.before import Before

FORGOTTEN = FORGOTTEN_WITHIN.format(tokens=16)
HOW = st.sampled_from(["", "rowmax", "bfla"])


class Req:
    """As much of SGLang's request as is asked for."""

    def __init__(self, rid: str, tokens: list[int], salt: str | None = None) -> None:
        self.rid, self.extra_key, self.cache_salt = rid, None, salt
        self.full_untruncated_fill_ids = array("q", tokens)


def counted(before: Before) -> tuple[int, int, int]:
    return before.sparse, before.dense, before.unknown


class Engine(RuleBasedStateMachine):
    """A radix cache by the letter: of every page that it holds, behind its prefix, who wrote each of its tokens.

    What is told of it may be wrong by a piece for each prompt of a conversation, and no more.
    """

    page, word = 1, PIECE

    def __init__(self) -> None:
        super().__init__()
        self.requests, self.cache, self.count = dict[str, Req](), dict[tuple[int, ...], list[str]](), 0
        self.ours = Texts(self.requests.get, page=self.page)
        self.done, self.ways, self.turns = dict[str, int](), [(list[int](), 1)], dict[str, int]()
        self.wrote = dict[str, list[str]]()

    def add(self, name: str, how: str, start: int, end: int) -> None:
        """Tokens that a request computed; of its whole pages those that came first stay."""
        tokens, wrote = tuple(self.requests[name].full_untruncated_fill_ids), self.wrote[name]
        wrote += [how] * (end - start)
        for at in range(start // self.page * self.page, end - self.page + 1, self.page):
            there = self.cache.setdefault(tokens[: at + self.page], wrote[at : at + self.page])
            wrote[at : at + self.page] = there

    def compute(self, name: str, size: int, how: str) -> None:
        start, tokens = self.done[name], len(self.requests[name].full_untruncated_fill_ids)
        end = max((start + size) // self.page, start // self.page + 1) * self.page
        end = self.done[name] = min(end, tokens)
        self.ours.writing(Row(start, end, name))(how)
        self.add(name, how, start, end)

    @rule(data=st.data(), words=st.lists(st.integers(0, 1), max_size=3), size=st.integers(1, 60), how=HOW)
    def come(self, data: st.DataObject, words: list[int], size: int, how: str) -> None:
        """A request comes, finds what is there, and computes its first chunk. It goes on with what was said before."""
        self.count += 1
        name, own = f"{self.count}", [10_000 + self.count]
        way, self.turns[name] = data.draw(st.sampled_from(self.ways))
        tokens = [*way, *(word for word in words for _ in range(self.word)), *own]
        self.requests[name] = Req(name, tokens)
        pages = range((len(tokens) - 1) // self.page * self.page, 0, -self.page)
        found = next((n for n in pages if tuple(tokens[:n]) in self.cache), 0)
        each = [self.cache[tuple(tokens[:n])] for n in range(self.page, found + 1, self.page)]
        self.wrote[name] = [how for page in each for how in page]
        if found:
            wrote = Counter(self.wrote[name])
            before = self.ours.before(Row(found, len(tokens), name))
            dense = wrote.pop("", 0)
            near = self.turns[name] * together(self.page)
            assert found == before.tokens
            assert before.unknown < near
            assert abs(before.sparse - wrote.total()) < near
            assert abs(before.dense - dense) < near
        self.done[name] = found
        self.compute(name, size, how)

    @rule(data=st.data(), size=st.integers(1, 60), how=HOW)
    @precondition(lambda self: self.requests)
    def go_on(self, data: st.DataObject, size: int, how: str) -> None:
        """A chunk, or where the prompt is over its answer, with which the conversation may go on."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests[name]
        tokens = list(request.full_untruncated_fill_ids)
        if self.done[name] < len(tokens):
            self.compute(name, size, how)
            return
        start = len(tokens)
        tokens += [1_000_000 * int(name) + n for n in range(size)]
        request.full_untruncated_fill_ids = array("q", tokens)
        self.add(name, "", start, len(tokens))
        self.ways.append((tokens, self.turns[name] + 1))
        self.leave(name)

    @rule(data=st.data())
    @precondition(lambda self: self.requests)
    def abort(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(sorted(self.requests))))

    def leave(self, name: str) -> None:
        del self.requests[name], self.done[name], self.wrote[name]
        self.ours.forget(name)

    @rule(data=st.data(), count=st.integers(1, 80))
    def evict(self, data: st.DataObject, count: int) -> None:
        """Ends first, and nothing that a request uses."""
        used = {
            tuple(request.full_untruncated_fill_ids[:n])
            for name, request in self.requests.items()
            for n in range(self.page, self.done[name] + 1, self.page)
        }
        for _ in range(count):
            inner = {prefix[: -self.page] for prefix in self.cache}
            leaves = sorted(set(self.cache) - inner - used)
            if leaves:
                del self.cache[data.draw(st.sampled_from(leaves))]

    @invariant()
    def holds_no_more_than_the_requests_there_are(self) -> None:
        assert set(self.ours._texts) <= set(self.requests)


class PagedEngine(Engine):
    """Prompts part within pages."""

    page, word = 64, 40


class OddPagedEngine(Engine):
    page, word = 5, 7


SETTINGS = settings(max_examples=60, stateful_step_count=25, deadline=None)
Engine.TestCase.settings = PagedEngine.TestCase.settings = OddPagedEngine.TestCase.settings = SETTINGS
TestEngine, TestPagedEngine, TestOddPagedEngine = Engine.TestCase, PagedEngine.TestCase, OddPagedEngine.TestCase


class Server:
    """Requests that come one after the other."""

    def __init__(self, **more: Any) -> None:
        self.requests = dict[str, Req]()
        self.ours = Texts(self.requests.get, **more)

    def run(self, name: str, tokens: list[int], cached: int, how: str, end: int = 0, salt: str | None = None) -> Before:
        self.requests[name] = Req(name, tokens, salt)
        before = self.ours.before(Row(cached, end or len(tokens), name))
        self.ours.writing(Row(cached, end or len(tokens), name))(how)
        return before


LONG = list(range(4572))


def test_the_beginning_of_a_sparse_prompt_is_known_to_the_page() -> None:
    server = Server()
    server.run("a", LONG, 0, "rowmax")
    found = server.run("b", LONG[:1800] + [9] * 3072, 1800, "rowmax")
    assert Before(sparse=1792, unknown=8, methods=("rowmax",), why=FORGOTTEN) == found
    assert "sparse" == found.mostly


def test_pages_in_which_prompts_part_are_not_shared() -> None:
    """Behind a system prompt of 1,000 tokens, in pages of 64."""
    server, system = Server(page=64), LONG[:1000]
    first, second = [*system, *range(10_000, 17_000)], [*system, *range(20_000, 27_000)]
    server.run("a", first, 0, "rowmax")
    server.run("b", second, 960, "rowmax")
    assert Before(sparse=8000, methods=("rowmax",)) == server.run("c", [*first, *[7] * 100], 8000, "rowmax")


def test_what_was_answered_is_dense() -> None:
    server = Server()
    server.run("a", LONG[:1805], 0, "rowmax")
    found = server.run("b", LONG[:2005] + [9] * 100, 2005, "rowmax")
    assert Before(sparse=1805, dense=200, methods=("rowmax",)) == found
    found = server.run("c", LONG[:2005] + [9] * 400, 2105, "")
    assert Before(sparse=1905, dense=200, methods=("rowmax",)) == found


def test_a_request_that_was_aborted_finds_its_own() -> None:
    server = Server()
    server.run("a", LONG, 0, "rowmax", end=2048)
    server.ours.forget("a")
    assert Before(sparse=2048, methods=("rowmax",)) == server.run("a", LONG, 2048, "rowmax")


def test_the_last_token_of_a_prompt_that_is_there_already_changes_nothing() -> None:
    server = Server()
    server.run("a", LONG, 0, "rowmax")
    server.run("b", LONG[:512], 511, "")
    found = server.run("c", [*LONG[:4000], 9], 4000, "")
    assert Before(sparse=4000, methods=("rowmax",)) == found
    assert Before(sparse=512, dense=100, methods=("rowmax",)) == server.run("d", [*LONG[:512], *[7] * 101], 612, "")


def test_of_two_that_compute_the_same_at_once_the_first_counts() -> None:
    server = Server()
    rows = []
    for name, own in (("a", 1), ("b", 2)):
        server.requests[name] = Req(name, [*LONG[:1600], *[own] * 160])
        rows.append(server.ours.writing(Row(0, 1760, name)))
    rows[0]("rowmax")
    rows[1]("")
    assert Before(sparse=1760, methods=("rowmax",)) == server.run("c", [*LONG[:1600], *[1] * 320], 1760, "")
    found = server.run("d", [*LONG[:1600], *[2] * 320], 1760, "")
    assert Before(sparse=1600, dense=160, methods=("rowmax",)) == found


def test_what_was_computed_again_behind_an_eviction_goes_before_what_stood_there() -> None:
    """Even where the answer is what another prompt had there."""
    server = Server()
    server.run("a", LONG[:1600], 0, "rowmax")
    assert 320 == server.run("b", LONG[:704], 320, "").sparse
    assert Before(sparse=320, dense=680, methods=("rowmax",)) == server.run("c", [*LONG[:1000], 9, 9], 1000, "")


def test_salts_keep_prefixes_apart() -> None:
    server = Server()
    server.run("a", LONG, 0, "rowmax")
    found = server.run("b", [*LONG, 1], 4572, "", salt="sparseprefill='off';")
    assert Before(unknown=4572, why=FORGOTTEN) == found


def test_pages_that_nobody_asks_for_are_forgotten() -> None:
    server = Server(most=300)
    server.run("a", LONG[:3200], 0, "rowmax")
    for n in range(4):
        assert 1600 == server.run(f"b{n}", [*LONG[:1600], 9, n], 1600, "rowmax").sparse
        server.run(f"c{n}", [1000 + n] * 1600, 0, "")
    assert 300 == len(server.ours._known)
    assert Before(unknown=3200, why=FORGOTTEN) != server.run("d", [*LONG[:1600], 7], 1600, "")
    assert 0 == server.run("e", [*LONG[:3200], 7], 3200, "").dense


def test_a_request_that_nobody_knows_is_unknown() -> None:
    ours = Texts(dict[str, Any]().get)
    assert Before(unknown=64, why="the server does not tell which keys they are") == ours.before(Row(64, 128, "a"))
    ours.writing(Row(64, 128, "a"))("rowmax")
    assert {} == ours._known


def test_another_request_of_the_same_id_is_another() -> None:
    server = Server()
    server.run("a", LONG, 0, "rowmax")
    server.requests.clear()
    gc.collect()
    assert Before(unknown=64, why=FORGOTTEN) == server.run("a", [5] * 100, 64, "")


def vars_of(found: Any) -> tuple[int, int]:
    return found.page, found.most


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({}, ""),
        ({"enable_hierarchical_cache": True}, ""),
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend file may have brought them"),
        ({"enable_lmcache": True}, "--enable-lmcache may have brought them"),
        ({"enable_flexkv": True}, "--enable-flexkv may have brought them"),
    ],
)
def test_a_store_outside_may_have_brought_what_is_there(flags: dict[str, Any], why: str) -> None:
    runner = SimpleNamespace(server_args=SimpleNamespace(**flags), max_total_num_tokens=1 << 20, page_size=64)
    found = written_of(runner)
    if why:
        assert Before(unknown=9, why=why) == found.before(Row(9, 20, "a"))
        found.writing(Row(9, 20, "a"))("rowmax")
    else:
        assert isinstance(found, Texts)
        assert (64, 1 << 15) == (found.page, found.most)
    assert vars_of(written_of(SimpleNamespace(server_args=SimpleNamespace()))) == (1, LEAST)


def test_a_chunk_costs_little() -> None:
    """8,192 tokens, far less than a hundredth of the tens of milliseconds that their step takes."""
    server, count = Server(), 16
    tokens = list(range(8192 * count))
    server.requests["a"] = Req("a", tokens)
    begin = time.perf_counter()
    for first in range(0, len(tokens), 8192):
        server.ours.writing(Row(first, first + 8192, "a"))("rowmax")
    assert (time.perf_counter() - begin) / count < 5e-3  # 0.4 ms where nothing else runs
