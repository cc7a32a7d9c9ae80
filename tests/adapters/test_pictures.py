"""Pictures: no place stays empty, panels that look alike say so, and no line goes through two points."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from sparseprefill.adapters.cli import page, picture
from sparseprefill.adapters.cli.picture import Panel
from sparseprefill.adapters.evaluation.outcome import Contender, Layer, Outcome, Sketch

import sparseprefill as sp
from lab.bench import plot as bench_plot
from lab.bench.case import Case
from lab.bench.measure import Row
from lab.bench.shape import Shape

CALL = sp.AttentionCall(*(torch.randn(1, 1, 512, 8) for _ in range(3)))


FULL = Sketch.of(sp.SparseMask.full(CALL))


def local(window: int) -> Sketch:
    return Sketch.of(sp.build("streaming", sink=32, window=window, block=32).plan(CALL, sp.Memory()).mask)


def panel(name: str, mask: Sketch | None) -> Panel:
    return Panel(name, "density", 512, mask)


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (2, 2), (4, 4), (5, 5), (7, 4), (10, 5), (12, 4)])
def test_every_place_is_taken(count: int, columns: int) -> None:
    figure = picture.sheet([panel(f"m{i}", local(64 * (i + 1))) for i in range(count)])
    figure.draw_without_rendering()
    *panels, bar = figure.axes
    assert len(panels) == count
    lefts = [round(axis.get_position().x0, 2) for axis in panels]
    assert len(set(lefts[:columns])) == columns
    last = panels[columns * ((count - 1) // columns) :]
    middle = (last[0].get_position().x0 + last[-1].get_position().x1) / 2
    assert middle == pytest.approx((panels[0].get_position().x0 + panels[columns - 1].get_position().x1) / 2, abs=0.02)
    assert bar.get_position().y1 < min(axis.get_position().y0 for axis in panels), "the scale stands below"
    assert "share of a cell's pairs" in bar.get_xlabel()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 13])
def test_no_words_overlap_or_are_cut(count: int) -> None:
    names = ["share-prefill, rescued as in bfla", "anchor-attention", "dense (stock)"]
    shown = [
        Panel(names[i % 3], "density 100.0%, recall 100.0%\nlowest row 100%", 512, local(64 * (i + 1)))
        for i in range(count)
    ]
    figure = picture.sheet(shown, ("What each prefill computes:", "layer 12, head 31, 131,072 tokens"))
    figure.set_dpi(100)
    figure.draw_without_rendering()
    *panels, _ = figure.axes
    words = [one for axis in panels for one in (*axis.texts, axis.title)]
    boxes = [one.get_window_extent() for one in words]
    assert figure._suptitle is not None  # type: ignore[attr-defined]
    boxes.append(figure._suptitle.get_window_extent())  # type: ignore[attr-defined]
    for i, one in enumerate(boxes):
        assert one.x0 >= 0
        assert one.x1 <= figure.bbox.x1
        assert one.y1 <= figure.bbox.y1
        assert not any(one.overlaps(other) for other in boxes[i + 1 :])


def test_a_method_that_skips_while_it_runs_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: drawn.append(self))
    pipeline = sp.build("skip-softmax")
    found = Outcome(
        Contender("skip-softmax", pipeline),
        tokens=512,
        layers=(Layer(0, 0.25, (0.9,), rows=torch.tensor([[1.0, 0.031, 1.0]])),),
        mask=FULL,
    )
    picture.draw([found], 0, 0, tmp_path / "masks.png")
    assert "75% of the layer's pairs\nare skipped while it runs" in drawn[0].axes[0].get_xlabel()
    assert drawn[0].axes[0].get_title() == "density 100.0%, recall 90.0%\nlowest row 3%"
    dense = attrs.evolve(found, layers=(Layer(0, 1.0, (1.0,), reason="why"),))
    picture.draw([dense], 0, 0, tmp_path / "masks.png")
    assert drawn[1].axes[0].get_title() == "density 100.0%, recall 100.0%"


def test_the_page_says_what_the_lowest_row_of_a_head_kept() -> None:
    kept = torch.tensor([[1.0, 0.5], [0.031, 1.0]])
    layer = Layer(3, 0.25, (0.75, 0.5), rows=kept, lowest=(1, FULL))
    (made,) = page._masks(Outcome(Contender("m"), tokens=512, layers=(layer,)))
    assert made.what == "Mask of layer 3, head 1"
    assert made.said == "recall 50.0%, 3.1% in the lowest row that was looked at"


def rows(*lengths: int) -> list[Row]:
    def row(name: str, length: int, seconds: float, recall: float | None) -> Row:
        case = Case(table="methods", name=name, shape=Shape(length=length))
        return Row(case=case, seconds=seconds, dense=1.0, baseline="cuDNN", density=0.5, recall=recall)

    return [row(name, n, s, r) for n in lengths for name, s, r in (("tiles 0.5", 0.5, None), ("bfla", 0.25, 0.9))]


@pytest.mark.parametrize(("lengths", "lines"), [((1024,), False), ((1024, 2048), False), ((1024, 2048, 4096), True)])
def test_bars_of_speed_up_and_lines_from_three_lengths_on(
    lengths: tuple[int, ...], lines: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: drawn.append(self))
    assert bench_plot.draw(rows(*lengths), tmp_path / "bench.png", "an H200")
    (figure,) = drawn
    times, kept = figure.axes
    assert "an H200; dense: cuDNN" in str(figure.get_suptitle())
    assert len(times.patches) == (0 if lines else 2 * len(lengths))
    joined = [line for line in (*times.lines, *kept.lines) if line.get_linestyle() == "-"]
    assert len(joined) == (2 if lines else 0)
    assert all(np.size(line.get_xdata()) >= 3 for line in joined)
    if not lines:
        assert {round(bar.get_width(), 6) for bar in times.patches if isinstance(bar, Rectangle)} == {2.0, 4.0}


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    failed = [Row(case=row.case, error="out of memory") for row in rows(1024)]
    assert not bench_plot.draw(failed, tmp_path / "bench.png", "an H200")
    assert not (tmp_path / "bench.png").exists()
