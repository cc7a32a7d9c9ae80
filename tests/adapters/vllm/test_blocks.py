"""What is known of vLLM's blocks is what was written to them, whatever the scheduler does with them."""

# ruff: noqa: SIM300 - asserts read expected == actual

from __future__ import annotations

import logging
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sparseprefill.adapters.serving.requests import Row
from sparseprefill.adapters.vllm.blocks import Blocks, watch
from sparseprefill.adapters.vllm.names import Names

from helpers.vllm_runners import runtime
from sparseprefill.breakeven.before import Before

SIZE, POOL = 4, 14
HOW = st.sampled_from(["", "rowmax", "bfla"])


def step(
    new: list[tuple[str, list[int], int]] | None = None,
    more: list[tuple[str, list[int] | None, int]] | None = None,
    resumed: set[str] | None = None,
    finished: set[str] | None = None,
    copies: list[tuple[int, int]] | None = None,
) -> Any:
    """What vLLM's scheduler sends: in its second group of layers, others have other tables."""
    more = more or []
    return SimpleNamespace(
        finished_req_ids=finished or set(),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=([99], ids), num_computed_tokens=done)
            for name, ids, done in new or []
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in more],
            resumed_req_ids=resumed or set(),
            new_block_ids=[None if ids is None else ([99], ids) for _, ids, _ in more],
            num_computed_tokens=[done for _, _, done in more],
        ),
        kv_cache_block_copies=copies,
    )


def known(size: int = SIZE) -> Blocks:
    return Blocks(group=1, size=size)


def counted(before: Before) -> tuple[int, int, int]:
    return before.sparse, before.dense, before.unknown


class Request:
    """blocks: its table. done: its tokens that are computed."""

    def __init__(self, tokens: list[int], blocks: list[int], done: int) -> None:
        self.tokens, self.blocks, self.done = tokens, blocks, done


class Engine(RuleBasedStateMachine):
    """A scheduler with a prefix cache of whole blocks, of which the one that was freed first is given away first; and
    beside it a literal account of who wrote each token of each block."""

    def __init__(self) -> None:
        super().__init__()
        self.ours, self.truth = known(), dict[tuple[int, int], str]()
        self.free, self.cached, self.users = list(range(POOL)), dict[tuple[int, ...], int](), Counter[int]()
        self.running, self.waiting, self.count = dict[str, Request](), dict[str, Request](), 0
        self.pending: list[Any] = []

    def take(self, **sent: Any) -> None:
        """A step begins; the one before is through its layers."""
        for write in self.pending:
            write()
        self.pending.clear()
        self.ours.take(step(**sent))

    def given(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        found, self.free = self.free[:count], self.free[count:]
        for block in found:
            self.cached = {prefix: at for prefix, at in self.cached.items() if at != block}
            self.users[block] += 1
        return found

    def hit(self, tokens: list[int]) -> list[int]:
        found = list[int]()
        while (end := (len(found) + 1) * SIZE) < len(tokens) and (
            block := self.cached.get(tuple(tokens[:end]))
        ) is not None:
            found.append(block)
        for block in found:
            self.users[block] += 1
            self.free = [one for one in self.free if one != block]
        return found

    def left(self, request: Request) -> None:
        for block in reversed(request.blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    def admit(self, name: str, tokens: list[int], again: bool, share: int) -> None:
        """A request comes, or comes back. share: tokens of a block behind its hits that it takes over from another."""
        blocks = self.hit(tokens)
        start, copies = len(blocks) * SIZE, []
        more = self.given(-(-len(tokens) // SIZE) - len(blocks))
        if more is None:
            self.left(Request(tokens, blocks, 0))
            if name in self.ours.tables:
                self.waiting[name] = Request(tokens, [], 0)
            return
        source = next(
            (
                one.blocks[start // SIZE]
                for one in self.running.values()
                if share
                and start + share < min(one.done + 1, len(tokens))
                and one.tokens[: start + share] == tokens[: start + share]
            ),
            None,
        )
        if source is not None:
            copies = [(source, more[0])]
            for i in range(SIZE):
                self.truth[more[0], i] = self.truth.get((source, i), "")
            start += share
        request = self.running[name] = Request(tokens, [*blocks, *more], start)
        if again:
            self.take(more=[(name, request.blocks, start)], resumed={name}, copies=copies)
        else:
            self.take(new=[(name, list(request.blocks), start)], copies=copies)
        if start:
            at = [self.truth[request.blocks[i // SIZE], i % SIZE] for i in range(start)]
            found = self.ours.before(Row(start, len(tokens), name))
            assert (sum(map(bool, at)), at.count(""), 0) == counted(found)
            assert set(filter(None, at)) == set(found.methods)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30), share=st.integers(0, SIZE - 1))
    def come(self, tokens: list[int], share: int) -> None:
        self.count += 1
        self.admit(str(self.count), tokens, again=False, share=share)

    @rule(data=st.data(), share=st.integers(0, SIZE - 1), again=st.booleans())
    @precondition(lambda self: self.waiting)
    def resume(self, data: st.DataObject, share: int, again: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        self.admit(name, self.waiting.pop(name).tokens, again=again, share=share)

    @rule(data=st.data(), how=HOW, count=st.integers(1, 12), at_once=st.booleans())
    @precondition(lambda self: self.running)
    def compute(self, data: st.DataObject, how: str, count: int, at_once: bool) -> None:
        """A chunk of a prompt; or a decoded token, of which nobody is told."""
        name = data.draw(st.sampled_from(sorted(self.running)))
        request, more = self.running[name], list[int]()
        if request.done == len(request.tokens):
            request.tokens.append(data.draw(st.integers(0, 1)))
            if request.done == len(request.blocks) * SIZE:
                given = self.given(1)
                if given is None:
                    request.tokens.pop()
                    return
                more = given
                request.blocks += more
            self.take(more=[(name, more or None, request.done)])
            self.truth[request.blocks[request.done // SIZE], request.done % SIZE] = ""
            request.done += 1
        else:
            end = min(request.done + count, len(request.tokens))
            self.take(more=[(name, None, request.done)])
            write = self.ours.writing(Row(request.done, end, name))
            if at_once:
                write(how)
            else:
                self.pending.append(lambda: write(how))
            for i in range(request.done, end):
                self.truth[request.blocks[i // SIZE], i % SIZE] = how
            request.done = end
        for end in range(SIZE, request.done + 1, SIZE):
            self.cached.setdefault(tuple(request.tokens[:end]), request.blocks[end // SIZE - 1])

    @rule(data=st.data(), preempted=st.booleans())
    @precondition(lambda self: self.running)
    def leave(self, data: st.DataObject, preempted: bool) -> None:
        """A request is over, aborted in the middle of its prompt, or preempted."""
        name = data.draw(st.sampled_from(sorted(self.running)))
        request = self.running.pop(name)
        self.left(request)
        if preempted:
            self.waiting[name] = request
        else:
            self.take(finished={name})

    @invariant()
    def holds_no_more_than_the_requests_there_are(self) -> None:
        assert set(self.ours.tables) <= set(self.running) | set(self.waiting)


Engine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestEngine = Engine.TestCase


def test_a_prefix_is_told_by_who_wrote_it_token_by_token() -> None:
    ours = known()
    ours.take(step(new=[("a", [3, 5, 8], 0)]))
    ours.writing(Row(0, 6, "a"))("rowmax")
    ours.writing(Row(6, 9, "a"))("")
    ours.take(step(finished={"a"}, new=[("b", [3, 5, 9], 8)]))
    assert Before(sparse=6, dense=2, methods=("rowmax",)) == ours.before(Row(8, 12, "b"))


def test_a_block_that_others_get_is_forgotten() -> None:
    ours = known()
    ours.take(step(new=[("a", [1, 2], 0)]))
    ours.writing(Row(0, 8, "a"))("rowmax")
    ours.take(step(finished={"a"}, new=[("b", [2, 1, 4], 0)]))
    ours.writing(Row(0, 4, "b"))("rowmax")  # what follows is decoded, as far as anybody hears
    ours.take(step(finished={"b"}, new=[("c", [2, 1, 6], 8)]))
    assert Before(sparse=4, dense=4, methods=("rowmax",)) == ours.before(Row(8, 12, "c"))


def test_a_request_that_nobody_told_of_is_unknown() -> None:
    assert Before(unknown=8, why="the server does not tell which keys they are") == known().before(Row(8, 12, "a"))
    known().writing(Row(8, 12, "a"))("rowmax")


def config(**store: Any) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(**store) if store else None)


class Runner:
    """vLLM's model runner V1, by what is asked of it."""

    def __init__(self) -> None:
        spec = SimpleNamespace(block_size=SIZE)
        groups = [SimpleNamespace(layer_names=[name], kv_cache_spec=spec) for name in ("other", "layer")]
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
        self.seen: list[Any] = []

    def _update_states(self, output: Any) -> str:
        self.seen.append(output)
        return "done"


def watched(runner: Any, **store: Any) -> Any:
    mine = runtime()
    mine.names = Names(lambda: runner)
    watch(mine, config(**store), "layer")
    return mine


def test_a_runner_tells_of_its_blocks_ahead_of_each_step() -> None:
    runner = Runner()
    mine = watched(runner)
    assert isinstance(mine.written, Blocks)
    watch(mine, config(), "layer")  # builders are made more than once
    first = step(new=[("a", [1, 2], 0)])
    assert ("done", [first]) == (runner._update_states(first), runner.seen)
    assert (1, SIZE, {"a": [1, 2]}) == (mine.written.group, mine.written.size, mine.written.tables)


def test_a_chunk_is_written_down_before_its_blocks_go_to_others() -> None:
    runner = Runner()
    mine = watched(runner)
    runner._update_states(step(new=[("a", [1, 2], 0)]))
    mine.prefills(object(), [Row(0, 8, "a", 8)], lambda _: {}, 2)
    (chunk,) = mine.chunks
    assert chunk is not None
    chunk.sparse = 1  # its second layer never comes
    runner._update_states(step(finished={"a"}, new=[("b", [1, 3], 4)]))
    assert counted(mine.written.before(Row(4, 8, "b"))) == (4, 0, 0)
    runner._update_states(step(finished={"b"}, new=[("c", [1, 2], 0), ("d", [1, 2], 4)]))
    assert counted(mine.written.before(Row(4, 8, "d"))) == (0, 4, 0)


def test_a_store_may_have_brought_what_is_there() -> None:
    mine = watched(runner := Runner(), kv_connector="OffloadingConnector")
    runner._update_states(step(new=[("a", [1, 2], 0)]))
    assert Before(unknown=8, why="OffloadingConnector may have brought them") == mine.written.before(Row(8, 9, "a"))


@pytest.mark.parametrize("runner", [None, SimpleNamespace()])
def test_a_runner_that_tells_nothing_leaves_it_unknown(runner: Any) -> None:
    found = watched(runner).written.before(Row(8, 9, "a"))
    assert Before(unknown=8, why="the server does not tell which keys they are") == found


def test_what_cannot_be_read_ends_no_engine_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    mine = watched(runner := Runner())
    for _ in range(2):
        assert "done" == runner._update_states(SimpleNamespace())
    (record,) = (one for one in caplog.records if one.levelno == logging.WARNING)
    said = "it is not known any more, after AttributeError: "
    assert f"sparseprefill: how cached tokens were computed: {said}" in record.getMessage()
    assert mine.written.before(Row(8, 9, "a")).why.startswith(said)


def test_a_step_costs_little() -> None:
    """A chunk of 8,192 tokens, and 256 rows that decode, a sixteenth of them in a new block: far less than a hundredth
    of the tens of milliseconds that such a step takes."""
    ours = known(16)
    names = [str(i) for i in range(256)]
    ours.take(step(new=[(name, [i], 0) for i, name in enumerate(names)]))
    begin = time.perf_counter()
    for n in range(20):
        decode: Any = [(name, [1000 + i] if i % 16 == 0 else None, 16) for i, name in enumerate(names)]
        ours.take(step(new=[(f"new {n}", list(range(2000, 2512)), 0)], more=decode))
        ours.writing(Row(0, 8192, f"new {n}"))("rowmax")
    assert (time.perf_counter() - begin) / 20 < 5e-3  # 0.4 ms where nothing else runs
