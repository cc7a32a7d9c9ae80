"""Progress bars on standard error, so that standard output holds the result alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import frozen
from rich import progress as rich
from rich.console import Console
from rich.table import Column
from rich.text import Text

from sparseprefill.profiles.table import Progress, Steps

NARROW, WIDE = 60, 80
"""Columns of a terminal from which counts and the time so far are shown, and a bar."""


@frozen
class Bars:
    """One bar for the contenders or settings, with an estimate of the time left, one for what the present one is doing.

    whole, now: rich's numbers of the two bars.
    """

    shown: rich.Progress
    whole: rich.TaskID
    now: rich.TaskID

    def expect(self, contenders: int) -> None:
        """Begin anew, with so many contenders."""
        self.shown.reset(self.whole, total=contenders)

    @contextmanager
    def contender(self, name: str) -> Iterator[Progress]:
        """Shows one contender; gives what to call on each step."""

        def progress(what: str, done: int, of: int) -> None:
            self.doing(f"{name}: {what}", done, of)

        yield progress
        self.shown.advance(self.whole)

    def settings(self, name: str) -> Steps:
        """Begin anew, with the settings of a search; gives what to call on each."""
        self.shown.reset(self.whole, description=f"{name}: settings", total=None)
        return lambda done, of: self.shown.update(self.whole, completed=done, total=of)

    def doing(self, what: str, done: int, of: int) -> None:
        """Shows what is being done now, such as the layers of a prefill."""
        self.shown.update(self.now, description=what, completed=done, total=of)

    def finished(self, said: str) -> None:
        """A line on standard error, above the bars, at once; a file gets it, too."""
        self.shown.console.print(Text(said, style="dim"), soft_wrap=True)
        self.shown.console.file.flush()


@contextmanager
def bars(contenders: int) -> Iterator[Bars]:
    """Shows bars while the block runs, if standard error is a terminal; they vanish at its end. A file gets none."""
    console = Console(file=sys.stderr)  # as it is now: who redirects standard error later hides no bar
    width = console.width
    length = 0 if width < WIDE else min(40, width - WIDE + 10)
    words = Column(no_wrap=True, overflow="ellipsis", ratio=1)  # figures are never cut, so words are
    columns: list[rich.ProgressColumn] = [rich.TextColumn("{task.description}", table_column=words)]
    columns += [rich.BarColumn(length)] if length else []
    columns += [rich.MofNCompleteColumn(), rich.TimeElapsedColumn()] if width >= NARROW else []
    columns += [rich.TextColumn("left:"), rich.TimeRemainingColumn()]
    hidden = not (sys.stderr.isatty() and console.is_terminal)
    with rich.Progress(
        *columns, console=console, transient=True, disable=hidden, speed_estimate_period=3600, expand=True
    ) as progress:
        whole, now = progress.add_task("methods", total=contenders), progress.add_task("loading", total=None)
        yield Bars(progress, whole, now)
