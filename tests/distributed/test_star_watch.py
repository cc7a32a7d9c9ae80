"""The thread that ends a wait which the host cannot leave: on a failure, or without progress, it aborts the group."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sparseprefill.adapters.star import ranks as module
from sparseprefill.adapters.star import watch
from sparseprefill.adapters.star.ranks import RankError, Ranks
from torch._C._distributed_c10d import HashStore

from helpers.patience import patient


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(watch, "POLL", 0.01)
    monkeypatch.setattr(watch, "GRACE", 0.1)
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Ranks(timeout=0.2)
    dist.destroy_process_group()


@pytest.mark.parametrize("told", [True, False])
def test_a_stuck_run_is_aborted_and_then_ended(ranks: Ranks, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda group: ended.append("aborted"))
    monkeypatch.setattr("os._exit", lambda status: ended.append(f"exit {status}"))
    thread = watch.Watch(ranks)
    thread.start()
    if told:
        ranks.store.set("failed", "rank 3 failed")

    def work() -> None:
        with ranks.run("a test"):
            until = time.monotonic() + patient(10)
            while len(ended) < 2 and time.monotonic() < until:
                time.sleep(0.01)

    with pytest.raises(RankError, match="rank 3 failed" if told else "made no progress for 0.2 s"):
        work()
    thread.join(patient(10))
    assert ended == ["aborted", f"exit {watch.EXIT}"]


class Work:
    """A collective. fails: whether a wait raises, one after the other, and as it does the collective has ended."""

    def __init__(self, *fails: bool) -> None:
        self.fails, self.waits = fails, 0

    def is_completed(self) -> bool:
        return self.waits > 0

    def wait(self, timeout: timedelta) -> None:
        self.waits += 1
        if self.fails[self.waits - 1]:
            raise RuntimeError(f"not within {timeout}")


def test_a_collective_that_ends_as_a_wait_runs_out_has_not_failed(ranks: Ranks) -> None:
    late = Work(True, False)
    ranks.wait(late, torch.zeros(1))
    assert late.waits == 2


def test_one_that_failed_is_told(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.1)
    broken = Work(True, True)
    with pytest.raises(RankError, match="rank 0 found a connection closed"):
        ranks.wait(broken, torch.zeros(1))
    assert broken.waits == 2


def test_an_idle_or_busy_group_is_left_alone(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], [0]

    def sleep(seconds: float) -> None:
        looks[0] += 1
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)  # so that the machine's pace plays no part
    monkeypatch.setattr(watch, "time", clock)
    monkeypatch.setattr(module, "time", clock)
    thread = watch.Watch(ranks)
    thread.start()

    def passes(seconds: float) -> None:
        now[0] += seconds
        seen, until = looks[0], time.monotonic() + patient(30)
        while looks[0] < seen + 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert looks[0] >= seen + 2

    passes(0.4)  # idle for longer than the timeout
    with ranks.run("a test"):
        for _ in range(4):
            passes(0.15)
            ranks.gather(torch.zeros(1))
    assert thread.is_alive()
    assert watch.Watch.of(ranks, torch.device("cpu")) is None


def test_of_ranks_that_all_answer_the_one_behind_is_named(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "size", 2)
    ranks.begun = 3
    ranks.store.set("here/1", "1")
    with pytest.raises(RankError, match=r"lost rank 1 \(it answers, but began 1 collectives and others 3\): rank 0 is"):
        ranks.lost("is bored")


def test_a_rank_that_is_missed_answers(ranks: Ranks) -> None:
    ranks.gather(torch.zeros(1))
    assert not ranks.store.check(["here/0"])
    ranks.store.set("asked", "")
    ranks.hear()
    assert ranks.store.get("here/0") == b"1"
