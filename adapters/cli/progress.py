"""Progress bars on standard error, so that standard output holds the result alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress as rich
from rich.console import Console

from ..progress import Progress


class Bars:
    """One bar for the contenders, with an estimate of the time left, one for what the present contender is doing."""

    def __init__(self, shown: rich.Progress, contenders: int) -> None:
        self._shown = shown
        self._all = shown.add_task("methods", total=contenders)
        self._now = shown.add_task("loading", total=None)

    def expect(self, contenders: int) -> None:
        """Begin anew, with so many contenders."""
        self._shown.reset(self._all, total=contenders)

    @contextmanager
    def contender(self, name: str) -> Iterator[Progress]:
        """Shows one contender; gives what to call on each step."""

        def progress(what: str, done: int, of: int) -> None:
            self._shown.update(self._now, description=f"{name}: {what}", completed=done, total=of)

        yield progress
        self._shown.advance(self._all)


@contextmanager
def bars(contenders: int) -> Iterator[Bars]:
    """Shows bars while the block runs, if standard error is a terminal; they vanish at its end."""
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left:"),
        rich.TimeRemainingColumn(),
    )
    console = Console(file=sys.stderr)  # as it is now: who redirects standard error later hides no bar
    with rich.Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=3600
    ) as shown:
        yield Bars(shown, contenders)
