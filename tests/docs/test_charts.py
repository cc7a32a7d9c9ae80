"""Pictures and sentences of README and the pages show the tables that the pages have today."""

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
    assert source(charts.REAL) == charts.real_digest(), again
    assert source(charts.SPEED) == charts.digest(charts.SECTION), again
    assert source(charts.BENCH) == charts.digest(*charts.METHODS, charts.ROWMAX), again


def test_the_real_models_figures_are_in_readme_and_on_each_methods_page(charts: ModuleType) -> None:
    stale = [page.name for page, text in charts.lines().items() if page.read_text(encoding="utf-8") != text]
    assert stale == [], "run `PYTHONPATH=tests python docs/tools/charts.py`"
    tokens = charts.real_lengths()[0]
    (row,) = [one for one in charts.real_rows(tokens) if (one.method, one.setting) == ("bfla", "defaults")]
    page = (ROOT / "docs" / "methods" / "bfla.md").read_text(encoding="utf-8")
    other = row._replace(copies="12.3 %", prefill=9.87)
    assert f"keeps {row.copies}" in " ".join(page.split())
    changed = charts.with_line(page, charts.about(other, tokens))
    assert "12.3 %" in changed
    assert "9.87" in changed
    assert f"keeps {row.copies}" not in " ".join(changed.split())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "| 12.3 % |" in charts.with_rows(readme, [*charts.real_rows(tokens), other])
    with pytest.raises(ValueError, match=r"has none in real-models-each\.md"):
        charts.with_rows(readme, [row])


def test_the_real_model_has_a_bar_for_each_method_and_each_row_in_bold(charts: ModuleType, tmp_path: Path) -> None:
    tokens = charts.real_lengths()
    assert tokens[0] == "32,768"
    rows = charts.real_rows(tokens[0])
    assert len(rows) == len({row.label for row in rows})
    assert {"rowmax", "skip-softmax", "bfla"} <= {row.method for row in rows if row.setting == "defaults"}
    assert all(0 <= row.kept <= 110 and row.prefill > 1 for row in rows)
    charts.real(tmp_path / "real.png")
    assert source(tmp_path / "real.png") == charts.real_digest()


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
    assert [row.case.shape.length for row in measured if row.case.name == "rowmax *"] == [32768, 131072]
    assert all(0 < row.density <= 1 and row.recall is not None and row.speedup > 1 for row in measured)
