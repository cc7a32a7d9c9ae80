"""One mutant, and many at a time: each in a process forked from this one, which has imported what is dear to import."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

import pytest
from attrs import frozen

from mutation.checkout import ROOT, changed
from mutation.mutants import Mutant, Source
from mutation.touch import Touch

Outcome = Literal["killed", "killed at import", "killed by a crash", "timed out", "survived", "no tests", "no verdict"]
PRELOADED = ("torch", "numpy", "hypothesis", "attrs", "pluggy", "transformers")
MEMORY = 16 << 30  # bytes that one process may hold
PATIENCE, FACTOR = 30.0, 4.0  # time limit in seconds: so much, and so many times what the tests take without a mutant


@frozen
class Trial:
    """mutant: what was tried. by: the test that failed, or where there is no verdict what pytest printed.

    tests: how many were chosen.
    """

    mutant: Mutant
    outcome: Outcome
    by: str = ""
    tests: int = 0
    seconds: float = 0.0


class Chosen:
    """A plugin of pytest: runs the tests named, in that order, from the same random numbers, and notes what fails."""

    def __init__(self, tests: Sequence[str], notes: Path) -> None:
        self._rank = {name: rank for rank, name in enumerate(tests)}
        self._notes = notes

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """What was not chosen is dropped."""
        items[:] = sorted((one for one in items if one.nodeid in self._rank), key=lambda one: self._rank[one.nodeid])

    def pytest_runtest_setup(self) -> None:
        """A kill must repeat."""
        import torch

        torch.manual_seed(0)
        random.seed(0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported."""
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that fails, before or after its call as well."""
        self._note(report)

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed:
            with self._notes.open("a", encoding="utf-8") as notes:
                notes.write(report.nodeid + "\n")


def preload() -> None:
    """Before the first fork. No thread is started and no device touched."""
    for name in PRELOADED:
        importlib.import_module(name)


def _run(site: Path, box: Path, tests: Sequence[str], options: Sequence[str]) -> None:
    """In the forked process: the tests, with the package of `site`."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.open(box / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ROOT)
    sys.path.insert(0, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
    switched_off = [word for name in ("cacheprovider", "xdist", "cov", "benchmark") for word in ("-p", f"no:{name}")]
    # Plugins of pytest among what was imported ahead: their asserts are not what is tested.
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main([*files, "-q", *quiet, *switched_off, *options], plugins=[Chosen(tests, box / "failed")])
    sys.stdout.flush()
    os._exit(int(code))


def _start(site: Path, box: Path, tests: Sequence[str], options: Sequence[str] = ("-x",)) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_run, args=(site, box, tests, options))
    process.start()
    return process


def _end(process: BaseProcess) -> None:
    """With whatever it has started."""
    if process.pid is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
    process.join()


def _judge(code: int | None, by: str) -> Outcome:
    """From the exit code and the first failure. Without one nothing is known, whatever the code."""
    if by:
        return "killed" if code == pytest.ExitCode.TESTS_FAILED else "killed at import"
    if code == pytest.ExitCode.OK:
        return "survived"
    return "killed by a crash" if code is not None and code < 0 else "no verdict"


def tried(
    mutants: Sequence[Mutant], sources: dict[str, Source], touch: Touch, site: Path, box: Path, jobs: int
) -> Iterator[Trial]:
    """Every mutant's end, in the order in which they end; so many at a time as `jobs` says."""
    waiting = [(mutant, touch.select(mutant)) for mutant in mutants]
    waiting.sort(key=lambda pair: touch.seconds(pair[1]))  # the longest are begun first: taken from the end
    running: dict[int, tuple[BaseProcess, Mutant, list[str], Path, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant, tests = waiting.pop()
            if not tests:
                yield Trial(mutant, "no tests")
                continue
            folder = box / f"trial-{len(waiting)}"
            folder.mkdir()
            changed(site, folder / "site", mutant.path, sources[mutant.path].mutate(mutant))
            process = _start(folder / "site", folder, tests)
            running[process.sentinel] = process, mutant, tests, folder, time.monotonic()
        wait(list(running), timeout=1.0)
        for sentinel, (process, mutant, tests, folder, begun) in list(running.items()):
            spent = time.monotonic() - begun
            late = spent > PATIENCE + FACTOR * touch.seconds(tests)
            if process.is_alive() and not late:
                continue
            code = process.exitcode
            _end(process)
            notes = folder / "failed"
            by = notes.read_text(encoding="utf-8").split("\n")[0] if notes.exists() else ""
            outcome: Outcome = "timed out" if late and code is None else _judge(code, by)
            if outcome == "no verdict":
                by = (folder / "log").read_text(encoding="utf-8")[-2000:] if (folder / "log").exists() else ""
            yield Trial(mutant, outcome, by, len(tests), spent)
            shutil.rmtree(folder)
            del running[sentinel]


def false_killers(tests: Sequence[str], site: Path, box: Path) -> list[str]:
    """Those among the tests that killed mutants which fail without one, run as they were then."""
    folder = box / "unchanged"
    folder.mkdir()
    process = _start(site, folder, tests, options=())
    process.join()
    notes = folder / "failed"
    failed = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
    if process.exitcode and not failed:
        failed = [f"pytest ended with {process.exitcode}:\n{(folder / 'log').read_text(encoding='utf-8')}"]
    return failed
