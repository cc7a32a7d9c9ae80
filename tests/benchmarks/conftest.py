"""Prints what the benchmarks measured as Markdown tables, ready for docs/benchmarks.md."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.run import ROWS
from lab.bench import facts
from lab.bench.markdown import markdown


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not ROWS:
        return
    terminalreporter.section("figures")
    found = facts.machine(torch.device("cuda"))
    terminalreporter.write_line(", ".join(f"{name} {value}" for name, value in found.items()))
    for line in markdown(ROWS).splitlines():
        terminalreporter.write_line(line)
