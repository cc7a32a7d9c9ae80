"""Which tests touch which lines, and how long each takes: one run of the tests under coverage, with its contexts."""

# ruff: noqa: T201 - a command prints
# What only `tox -e mutants` installs.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from attrs import frozen
from coverage import CoverageData

from mutation.checkout import ROOT, place
from mutation.mutants import Mutant

# Time that the tests of one mutant may take by themselves, in seconds: those that touch its lines, and then those that
# touch its file (what a line computes once may be kept, and only the first test that needs it is seen there).
LINES, FILE = 60.0, 20.0


@frozen
class Touch:
    """tests: seconds that each takes. lines: of each file of the checkout, the tests that run a line."""

    tests: dict[str, float]
    lines: dict[str, dict[int, frozenset[str]]]

    def select(self, mutant: Mutant) -> list[str]:
        """Tests that may notice a mutant, the likeliest and shortest first."""
        lines = self.lines.get(mutant.path, {})
        every = frozenset[str]().union(*lines.values())
        first, last = mutant.lines
        near = frozenset[str]().union(*(lines.get(line, ()) for line in range(first, last + 1)))
        if not mutant.called:  # what a class is declared to be shows in tests that run none of the file's lines
            files = {name.partition("::")[0] for name in every} | self._naming(mutant.within.partition(".")[0])
            near = every = frozenset(name for name in self.tests if name.partition("::")[0] in files)
        return [*self._short(near, LINES), *self._short(every - near, FILE)]

    def seconds(self, tests: Sequence[str]) -> float:
        """That they take together."""
        return sum(self.tests[one] for one in tests)

    def _naming(self, kind: str) -> set[str]:
        """Files of tests that name a class: what attrs writes for it is no line of its file."""
        files = {name.partition("::")[0] for name in self.tests} if kind else set[str]()
        word = re.compile(rf"\b{kind}\b")
        return {file for file in files if word.search((ROOT / file).read_text(encoding="utf-8"))}

    def _short(self, tests: frozenset[str], limit: float) -> list[str]:
        kept: list[str] = []
        total = 0.0
        for one in sorted(tests, key=lambda name: (self.tests[name], name)):
            total += self.tests[one]
            if total > limit and kept:
                break
            kept.append(one)
        return kept


def measure(site: Path, box: Path, paths: Sequence[str], tests: Sequence[str], jobs: int) -> Touch:
    """Run the tests with the unchanged package of `site`; those that fail are left out. Ends where none runs."""
    rules, data, times = box / "coveragerc", box / "coverage", box / "times.json"
    files = {path: str(site / place(path)) for path in paths}
    rules.write_text("\n  ".join([f"[run]\ndata_file = {data}\ninclude =", *files.values()]) + "\n", encoding="utf-8")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "mutation.times"]
    options += ["-n", str(jobs), "--dist", "worksteal"]
    options += ["--cov", f"--cov-config={rules}", "--cov-context=test", "--cov-report="]
    environment = os.environ | {"COVERAGE_CORE": "ctrace", "MUTATION_TIMES": str(times)}
    environment["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, env=environment, check=False)
    if done.returncode == pytest.ExitCode.TESTS_FAILED:  # what fails without a mutant says nothing of one
        print("Some tests fail without a mutant: they are left out.", flush=True)
    elif done.returncode:
        sys.exit("The tests do not run, so no mutant can fail them.")
    found = CoverageData(str(data))
    found.read()
    known: dict[str, float] = json.loads(times.read_text(encoding="utf-8"))
    lines = {}
    for path, file in files.items():
        contexts = found.contexts_by_lineno(file)
        # A context is "test|phase", and empty while a file is imported.
        names = {line: frozenset(name.rpartition("|")[0] for name in some) for line, some in contexts.items()}
        lines[path] = {line: frozenset(name for name in some if name in known) for line, some in names.items()}
    return Touch(known, lines)
