"""Prints what the benchmarks noted as a Markdown table, ready for docs/benchmarks.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    session = getattr(config, "_benchmarksession", None)
    rows = [bench for bench in getattr(session, "benchmarks", []) if bench.extra_info]
    if not rows:
        return
    import triton

    terminalreporter.section("figures")
    line = terminalreporter.write_line
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    line(f"{torch.cuda.get_device_name()}, {versions}, cuDNN {torch.backends.cudnn.version()}")
    line("")
    line("| tokens | what | median ms | of it estimating | density | cuDNN time / time | efficiency | recall |")
    line("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for bench in rows:
        info, stats = bench.extra_info, bench.stats
        name, _, case = bench.name.removeprefix("test_").rstrip("]").partition("[")
        what = f"{name} {case.removesuffix(str(info['length'])).rstrip('-')}".strip()
        kept = f"{info['recall']:.3f}" if "recall" in info else ""
        estimate = f"{info['estimate'] * 1e3:.2f}" if "estimate" in info else ""
        figures = f"{info['density']:.4f} | {info['speedup']:.2f} | {info['efficiency']:.2f} | {kept}"
        line(f"| {info['length']} | {what} | {stats.median * 1e3:.2f} | {estimate} | {figures} |")
