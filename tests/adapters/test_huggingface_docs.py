"""Every example of the adapter's page runs, one after the other in one namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"


def test_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 5
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}[{number}]", "exec"), namespace)
    assert "layer   0  sparse" in capsys.readouterr().out
