"""The notebook runs from top to bottom, and shows what it says: a right answer, a floor that lifts the recall."""

from __future__ import annotations

import json
from base64 import b64decode
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from docs.pages import ROOT

NOTEBOOK = ROOT / "docs" / "examples" / "first-look.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


SMALLER = {'"multikey", 8192': '"multikey", 4096', "range(3)": "range(1)"}
"""What the cells do often, or at a length that a picture needs."""


@pytest.mark.thorough
def test_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__notebook__"}
    sources = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
    assert all(any(word in source for source in sources) for word in SMALLER)
    for number, source in enumerate(sources):
        smaller = reduce(lambda text, pair: text.replace(*pair), SMALLER.items(), source)
        exec(compile(smaller, f"cell {number}", "exec", dont_inherit=True), names)
    plt.close("all")
    assert names["sparse"] == names["expected"] == names["dense"]
    layers = names["report"].layers
    assert all(layer.density is not None and layer.density < 0.75 for layer in layers), "below 0.5 at 8,192 tokens"
    assert len(names["moved"]) == len(names["times"]["bfla"]) == len(layers)
    assert max(names["moved"]) > 0.0
    assert names["least"]["columns"] < names["least"]["both"] < names["least"]["with a floor"]


def test_notebook_holds_what_its_cells_printed_and_drew() -> None:
    shown = [
        (cell["execution_count"], [one["output_type"] for one in cell["outputs"]])
        for cell in CELLS
        if cell["cell_type"] == "code"
    ]
    words, picture = ["stream"], ["display_data"]
    assert shown == [(1, words), (2, words), (3, picture), (4, picture), (5, words)]
    drawn = [one for cell in CELLS for one in cell.get("outputs", []) if one["output_type"] == "display_data"]
    assert all(b64decode(one["data"]["image/png"])[1:4] == b"PNG" for one in drawn)
