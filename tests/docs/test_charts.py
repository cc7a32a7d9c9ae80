"""The bars in README and docs/benchmarks.md show the tables that the page has today."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image

from docs.pages import ROOT


@pytest.fixture(scope="module")
def charts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("charts", ROOT / "docs" / "tools" / "charts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source(path: Path) -> Any:
    """What the picture says it was drawn from."""
    with Image.open(path) as picture:
        return picture.info["Source"]


def test_pictures_are_of_the_tables_as_they_stand(charts: ModuleType) -> None:
    again = "run `PYTHONPATH=tests python docs/tools/charts.py`"
    assert source(charts.SPEED) == charts.digest(charts.SECTION), again
    assert source(charts.BENCH) == charts.digest(*charts.METHODS), again


def test_every_row_has_its_bar(charts: ModuleType, tmp_path: Path) -> None:
    text = charts.section(charts.SECTION)
    found = charts.rows(text)
    assert len(found) == sum(line.startswith("| ") for line in text.splitlines()) - 2
    assert {"5 / 64", "64 / 64"} <= {row.inside for row in found}
    assert charts.dense_answers(text) == 63
    charts.speed(tmp_path / "speed.png")
    assert source(tmp_path / "speed.png") == charts.digest(charts.SECTION)
    measured = charts.measured()
    assert {row.case.shape.length for row in measured} == {32768, 131072}
    assert all(0 < row.density <= 1 and row.recall is not None and row.speedup > 1 for row in measured)
