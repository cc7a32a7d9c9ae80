"""Tables and bars on terminals of every width: columns leave, digits stay; in a file everything stands."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sparseprefill.adapters.cli.render import Table, width

from helpers.examples import few_of
from helpers.terminal import Terminal

HEADS = ("method", "setting", "answers", "KL", "worst", "same", "recall", "density", "prefill", "speed-up")
ROWS = (
    ("dense (stock)", "", "37 / 37", "", "", "", "100.0%", "100.0%", "7.01 s", "1.00"),
    ("anchor-attention", "theta=12.0, step=16", "36 / 37", "0.0012", "0.0183", "99.8%", "88.7%", "14.5%", "3 s", "1.7"),
    ("streaming", "window=131072, sink=1024", "1 / 37", "0.4312", "12.01", "9.8%", "8.7%", "1.5%", "103.9 s", "12.79"),
)  # fmt: skip
DROP = ("worst", "same", "recall", "prefill", "KL", "density")
TABLE = f"""
from sparseprefill.adapters.cli.render import show
from sparseprefill.adapters.cli.render import Table
more = {{"remarks": ["a remark"], "notes": "what columns mean", "words": ("setting",), "drop": {DROP!r}}}
show(Table(title="what was measured", heads={HEADS!r}, rows={ROWS!r}, **more))
"""
BARS = """
import time
from sparseprefill.adapters.cli.progress import bars
with bars(3) as shown:
    for _ in range(3):
        with shown.contender("sample-attention, 131,072 tokens") as progress:
            for done in range(8):
                progress("prefill of the prompt", 1000 + done, 1200)
                time.sleep(0.1)
print("done")
"""


def figures(*least: int, drop: tuple[str, ...] = ()) -> Table:
    """Columns of figures, so wide."""
    return Table(heads=[f"c{i}" for i in range(len(least))], rows=[["9" * cells for cells in least]], drop=drop)


def test_what_fits_stays_as_it_is() -> None:
    assert figures(5, 6, 7).fitted(width([5, 6, 7])) == {0: 5, 1: 6, 2: 7}


def test_columns_leave_in_the_order_that_is_given_then_from_the_right() -> None:
    made = figures(5, 6, 7, 8, drop=("c1", "c0", "gone"))
    order = [list(made.fitted(room)) for room in range(width([5, 6, 7, 8]), 0, -1)]
    distinct = [one for index, one in enumerate(order) if index == 0 or one != order[index - 1]]
    assert distinct == [[0, 1, 2, 3], [0, 2, 3], [0, 2], [0]]


def test_words_share_what_is_left_over() -> None:
    rows = [["streaming", "theta=12.0, step=16, block=128", "few words"]]
    made = Table(heads=["name", "setting", "why"], rows=rows, words=["setting", "why"])
    for room, cells in ((9, [9]), (width([9, 16, 9]), [9, 16, 9]), (width([9, 20, 9]), [9, 20, 9]), (200, [9, 30, 9])):
        assert list(made.fitted(room).values()) == cells


@given(st.lists(st.tuples(st.integers(2, 30), st.integers(0, 60)), min_size=1, max_size=8), st.integers(1, 200))
def test_nothing_is_wider_than_the_room_or_narrower_than_it_can_be(sizes: list[tuple[int, int]], room: int) -> None:
    heads = [f"c{i}" for i in range(len(sizes))]
    rows = [["9" * word + " x" * more for word, more in sizes]]
    made = Table(heads=heads, rows=rows, words=heads[1:])
    spans = [(max(word, min(16, word + 2 * more)), word + 2 * more) for word, more in sizes]
    spans[0] = (spans[0][1], spans[0][1])
    kept = made.fitted(room)
    assert next(iter(kept)) == 0
    assert all(spans[i][0] <= cells <= spans[i][1] for i, cells in kept.items())
    assert len(kept) == 1 or width(kept.values()) <= room
    if len(kept) < len(sizes):  # one more would not have fitted
        assert width(least for least, _ in spans[: len(kept) + 1]) > room


def cells(text: str) -> list[list[str]]:
    """The cells of a table's rows, by the heads' line."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().startswith("method"))
    return [re.split(r" {2,}", line.strip()) for line in lines[at:] if line.strip()]


@pytest.mark.parametrize("room", [40, 60, 80, 120])
def test_a_terminal_drops_columns_and_never_digits(room: int) -> None:
    code, text = Terminal(["-c", TABLE], room).end()
    assert code == 0, text
    assert all(len(line.rstrip()) <= room for line in text.splitlines())
    heads = cells(text)[0]
    missing = [head for head in HEADS if head not in heads]
    leaving = [*DROP, *(head for head in reversed(HEADS) if head not in DROP)]
    assert missing == sorted(leaving[: len(missing)], key=HEADS.index)
    assert missing or room == 120
    if missing:
        assert f"No room for {', '.join(missing)}: a wider terminal shows them" in " ".join(text.split())
    for row in ROWS:
        for head, cell in zip(HEADS, row, strict=True):
            if head in heads:
                assert all(re.search(rf"(?<!\S){re.escape(word)}(?!\S)", text) for word in cell.split())
    assert "speed-up" in heads or room == 40
    assert "a remark" in text


def test_a_file_has_every_column() -> None:
    done = subprocess.run([sys.executable, "-c", TABLE], capture_output=True, text=True, check=True)
    assert list(HEADS) == cells(done.stdout)[0]
    assert "No room" not in done.stdout
    assert "theta=12.0," in done.stdout


@pytest.mark.parametrize("room", few_of([40, 60, 80, 120], [40, 80]))
def test_a_terminal_has_a_bar_with_the_time_left(room: int) -> None:
    code, text = Terminal(["-c", BARS], room).end()
    assert code == 0, text
    shown = [line for line in text.replace("\r", "\n").splitlines() if "left:" in line]
    assert shown
    assert all(len(line) <= room for line in shown)
    begun = [line for line in shown if not line.startswith("loading")]
    assert all(re.search(r"left: (\d:\d\d:\d\d|-:--:--)$", line) for line in begun), begun
    assert any(re.search(r"left: \d:\d\d:\d\d$", line) for line in shown if line.startswith("methods"))
    assert (room >= 60) == any(re.search(r"\s100\d/1200 ", line) for line in shown)
    assert (room >= 80) == any("━" in line for line in shown)
    assert "done" in text


def test_a_file_has_no_bar() -> None:
    """Not even where colours are forced, as on build servers."""
    done = subprocess.run([sys.executable, "-c", BARS], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
    forced = {"FORCE_COLOR": "1", "PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", BARS], env=forced, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
