"""Star Attention on several GPUs over NCCL: the method of one GPU, and ranks that die or stall."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import fault_jobs, nccl_jobs, world
from helpers.patience import patient

COUNT = min(4, torch.cuda.device_count())
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")]
CLOSE, TIMEOUT = 1e-4, patient(6.0)
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "asleep": 0}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each rank returned; one start of the processes for all tests."""
    outcomes = world.run(nccl_jobs.everything, COUNT, 8192, seconds=150, device="cuda")
    assert [outcome.error for outcome in outcomes] == [""] * COUNT
    return [outcome.value for outcome in outcomes]


def test_every_case_equals_one_device(found: list[dict[str, Any]]) -> None:
    names = [name for name in found[0] if name.endswith("ranks")]
    assert len(names) == (len(nccl_jobs.CASES) + 2) * (COUNT - 1)
    for name in [*names, "rows merged by shares", "a batch"]:
        for each in (one[name] for one in found if name in one):
            assert each["apart"] <= CLOSE, (name, each)
            assert each["answers"] == each["wanted"], name


def test_bfloat16_is_close_and_the_same_on_every_rank(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["bfloat16"]["norm"] <= 0.03, one["bfloat16"]
        assert one["bfloat16"]["answers"] == found[0]["bfloat16"]["answers"]


def test_sampling_draws_the_same_on_every_rank(found: list[dict[str, Any]]) -> None:
    first = found[0]["sampling"]["drawn"]
    assert first[0] == first[1] != first[2]
    assert all(one["sampling"]["drawn"] == first for one in found)


def test_the_executor_alone_equals_exact_attention(found: list[dict[str, Any]]) -> None:
    for one in found:
        for name, (out, lse) in one["executor"].items():
            assert out <= 1e-2, (name, one["executor"])
            assert lse <= 2e-3, (name, one["executor"])


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[world.Outcome]]]:
    """Rank 1 fails in the middle of decoding, in each way; all at the same time, on the same GPUs."""
    folders = {name: tmp_path_factory.mktemp(name) for name in FAULTS}

    def run(name: str) -> tuple[Path, list[world.Outcome]]:
        given = (1, int(FAULTS[name]), str(folders[name]), TIMEOUT)
        stopped = [] if name == "killed" else [1]
        ranks = min(3, COUNT)
        return folders[name], world.run(fault_jobs.noted, ranks, *given, seconds=90, stopped=stopped, device="cuda")

    with ThreadPoolExecutor(len(FAULTS)) as threads:
        return dict(zip(FAULTS, threads.map(run, FAULTS), strict=True))


@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_fails_ends_the_others_in_time(
    name: str, faults: dict[str, tuple[Path, list[world.Outcome]]]
) -> None:
    folder, outcomes = faults[name]
    when = float((folder / "when").read_text())
    for rank, outcome in enumerate(outcomes):
        if rank == 1:
            continue
        log = folder / f"log{rank}"
        told = f"{outcome.value} {log.read_text() if log.exists() else ''}"
        # The device of a survivor may find out first that memory of the killed process is gone.
        assert "lost rank 1" in told or (name == "killed" and "failed in phase 2" in told), (rank, outcome, told)
        assert outcome.error in ("", "gone"), outcome  # it raised, or the watch ended it
        assert outcome.ended - when < TIMEOUT + patient(12), outcome
