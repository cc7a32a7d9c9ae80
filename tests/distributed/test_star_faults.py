"""A rank that dies, stalls, fails or was given something else ends all others, with the reason, in time."""

from __future__ import annotations

import signal

import pytest

from distributed import fault_jobs, world
from helpers.patience import patient


@pytest.mark.parametrize(("who", "phase"), [(1, 1), (0, 2), (2, 2)])
def test_a_rank_that_is_killed_ends_the_others(who: int, phase: int) -> None:
    outcomes = world.run(fault_jobs.ends, 3, who, signal.SIGKILL, phase, fault_jobs.LONG)
    assert outcomes[who].error == "gone"
    for rank in {0, 1, 2} - {who}:
        assert f"lost rank {who}: " in outcomes[rank].value, outcomes
        assert outcomes[rank].seconds < fault_jobs.LONG / 2


@pytest.mark.parametrize("phase", [1, 2])
def test_a_rank_that_stalls_ends_the_others_after_the_timeout(phase: int) -> None:
    outcomes = world.run(fault_jobs.ends, 3, 2, signal.SIGSTOP, phase, 1.0, stopped=[2])
    for rank in (0, 1):
        assert "lost rank 2: " in outcomes[rank].value, outcomes
        assert "waited 1 s" in outcomes[rank].value
        assert outcomes[rank].seconds < fault_jobs.LONG / 2


@pytest.mark.parametrize(
    ("who", "phase", "memory", "reason"),
    [
        (0, 1, True, "ran out of memory in phase 1: CUDA out"),
        (2, 1, False, "failed in phase 1: KeyError"),
        (0, 2, False, "failed in phase 2: KeyError"),
        (2, 2, True, "ran out of memory in phase 2: CUDA out"),
    ],
)
def test_what_fails_on_one_rank_is_reported_by_all(who: int, phase: int, memory: bool, reason: str) -> None:
    for outcome in world.shared(3).run(fault_jobs.fails, who, phase, memory):
        first, again = outcome.value
        assert f"rank {who} {reason}" in first
        assert f"rank {who} {reason}" in again
        assert "start again" in again


DIFFERENT = {
    "start": [
        *("sizes", "weights", "model", "dtype", "timeout", "inner"),
        *("inner.estimator.window", "inner.estimator.weights"),
    ],
    "encode": ["contexts"],
    "generate": ["questions", "before", "seed", "options.max_new_tokens", "generation_config", "the call"],
}


@pytest.mark.parametrize(("call", "what"), [(call, what) for call, each in DIFFERENT.items() for what in each])
def test_what_differs_over_the_ranks_is_named_at_once(call: str, what: str) -> None:
    named = "options.generation_config.max_new_tokens" if what == "generation_config" else what
    for outcome in world.shared(3).run(fault_jobs.differs, what):
        assert f"{named} differs over the ranks: rank 0 has " in outcome.value, outcome
        told = f"{call}: ", "logits: " if what == "the call" else f"{call}: "  # the rank that is first speaks for all
        assert outcome.value.startswith(told), outcome
        assert outcome.seconds < fault_jobs.LONG / 2


def test_settings_that_are_equal_are_equal_wherever_they_were_made() -> None:
    """Objects and functions whose repr has an address, in a pipeline and among the options of `generate`."""
    assert [outcome.value for outcome in world.shared(3).run(fault_jobs.differs, "same")] == ["went on"] * 3


def test_a_rank_that_never_comes_is_named() -> None:
    outcomes = world.run(fault_jobs.late, 2)
    assert "lost rank 1: rank 0 waited 1 s before start" in outcomes[0].value


POISONED = {"phase 1": 1, "keys": 0, "values": 1, "tail": 2, "logits": 1, "sampling": 1, "scores": 0}
POISONED["rows merged by shares"] = 1


@pytest.mark.parametrize("where", POISONED)
def test_nan_of_one_rank_is_an_error_of_all(where: str) -> None:
    for outcome in world.shared(3).run(fault_jobs.poisoned, POISONED[where], where):
        before, found, again = outcome.value
        assert before == "went on", outcome
        assert found.startswith("the scores of the next token hold NaN"), outcome
        assert "start again" in again


def test_the_model_is_its_own_again() -> None:
    assert [outcome.value for outcome in world.shared(2).run(fault_jobs.works)] == [1, 1]


def test_patience_is_a_positive_factor() -> None:
    from helpers import patience

    assert patient(2.0) == 2.0 * patience.PATIENCE
    assert patience.factor("2.5") == 2.5
    for text in ("0", "-1", "inf", "nan", "much"):
        with pytest.raises(ValueError, match=patience.VARIABLE):
            patience.factor(text)
