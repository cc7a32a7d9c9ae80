"""Progress bars on standard error, so that standard output holds the result alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as rich
from rich.console import Console
from rich.text import Text

from sparseprefill.profiles.progress import Progress

FIGURES, LEFT = 42, 16
"""Cells that counts and times take beside the words, and the time left alone."""
NARROW, WIDE = 60, 80
"""Columns of a terminal from which counts and the time so far are shown, and a bar."""


class Bars:
    """One bar for the contenders, with an estimate of the time left, one for what the present contender is doing.

    room: cells for the words before the figures.
    """

    def __init__(self, shown: rich.Progress, contenders: int, room: int) -> None:
        self._shown, self._room = shown, room
        self._all = shown.add_task("methods", total=contenders)
        self._now = shown.add_task("loading", total=None)

    def expect(self, contenders: int) -> None:
        """Begin anew, with so many contenders."""
        self._shown.reset(self._all, total=contenders)

    @contextmanager
    def contender(self, name: str) -> Iterator[Progress]:
        """Shows one contender; gives what to call on each step."""

        def progress(what: str, done: int, of: int) -> None:
            words = f"{name}: {what}"
            if len(words) > self._room:  # figures are never cut, so words are
                words = f"{words[: self._room - 1]}…"
            self._shown.update(self._now, description=words, completed=done, total=of)

        yield progress
        self._shown.advance(self._all)

    def finished(self, said: str) -> None:
        """A line on standard error, above the bars, at once; a file gets it, too."""
        self._shown.console.print(Text(said, style="dim"), soft_wrap=True)
        self._shown.console.file.flush()


@contextmanager
def bars(contenders: int) -> Iterator[Bars]:
    """Shows bars while the block runs, if standard error is a terminal; they vanish at its end. A file gets none."""
    console = Console(file=sys.stderr)  # as it is now: who redirects standard error later hides no bar
    width = console.width
    length = 0 if width < WIDE else min(40, width - WIDE + 10)
    times = [rich.TextColumn("left:"), rich.TimeRemainingColumn()]
    columns: list[rich.ProgressColumn] = [rich.TextColumn("{task.description}")]
    columns += [rich.BarColumn(length)] if length else []
    columns += [rich.MofNCompleteColumn()] if width >= NARROW else []
    columns += [rich.TimeElapsedColumn()] if width >= NARROW else []
    room = max(8, width - (FIGURES if width >= NARROW else LEFT) - (length + 1 if length else 0))
    shown = sys.stderr.isatty() and console.is_terminal
    with rich.Progress(
        *columns, *times, console=console, transient=True, disable=not shown, speed_estimate_period=3600
    ) as progress:
        yield Bars(progress, contenders, room)
