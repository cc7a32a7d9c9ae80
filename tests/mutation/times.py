"""A plugin of pytest: writes the seconds that every passed test took to the file that MUTATION_TIMES names."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

_seconds: dict[str, float] = defaultdict(float)
_passed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Setup, call and teardown together; a test that is skipped has no call that passed."""
    _seconds[report.nodeid] += report.duration
    if report.when == "call" and report.passed:
        _passed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Workers report to the process that started them, which writes."""
    if not hasattr(session.config, "workerinput"):
        text = json.dumps({name: seconds for name, seconds in _seconds.items() if name in _passed})
        Path(os.environ["MUTATION_TIMES"]).write_text(text, encoding="utf-8")
