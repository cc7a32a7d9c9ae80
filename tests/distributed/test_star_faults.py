"""A rank that dies, stalls, fails or was given something else ends all others, with the reason, in time."""

from __future__ import annotations

import signal

import pytest

from distributed import fault_jobs, world


@pytest.mark.parametrize(("who", "phase"), [(1, 1), (0, 2), (2, 2)])
def test_a_rank_that_is_killed_ends_the_others(who: int, phase: int) -> None:
    outcomes = world.run(fault_jobs.ends, 3, who, signal.SIGKILL, phase, 60.0)
    assert outcomes[who].error == "gone"
    for rank in {0, 1, 2} - {who}:
        assert f"lost rank {who}: " in outcomes[rank].value, outcomes
        assert outcomes[rank].seconds < 30  # of a timeout of 60


@pytest.mark.parametrize("phase", [1, 2])
def test_a_rank_that_stalls_ends_the_others_after_the_timeout(phase: int) -> None:
    outcomes = world.run(fault_jobs.ends, 3, 2, signal.SIGSTOP, phase, 1.0, stopped=[2])
    for rank in (0, 1):
        assert "lost rank 2: " in outcomes[rank].value, outcomes
        assert "waited 1 s" in outcomes[rank].value
        assert outcomes[rank].seconds < 30


@pytest.mark.parametrize(
    ("memory", "reason"), [(True, "ran out of memory in phase 1: CUDA out"), (False, "failed in phase 1: KeyError")]
)
@pytest.mark.parametrize("who", [0, 2])
def test_what_fails_on_one_rank_is_reported_by_all(who: int, memory: bool, reason: str) -> None:
    for outcome in world.run(fault_jobs.fails, 3, who, memory):
        first, again = outcome.value
        assert f"rank {who} {reason}" in first
        assert f"rank {who} {reason}" in again
        assert "start again" in again


@pytest.mark.parametrize("what", ["sizes", "weights", "contexts", "questions", "options", "inner"])
def test_what_differs_over_the_ranks_is_named_at_once(what: str) -> None:
    for outcome in world.run(fault_jobs.differs, 3, what):
        assert f"{what} differs over the ranks: rank 0 has " in outcome.value, outcome
        assert outcome.seconds < 15  # of a timeout of 20


def test_a_rank_that_never_comes_is_named() -> None:
    outcomes = world.run(fault_jobs.late, 2, stopped=[1])
    assert "lost rank 1: rank 0 waited 1 s before start" in outcomes[0].value


def test_the_model_is_its_own_again() -> None:
    assert [outcome.value for outcome in world.run(fault_jobs.works, 2)] == [1, 1]
