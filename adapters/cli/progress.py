"""Progress bars on standard error, so that standard output holds the result alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..demo.compare import Told


class Bars:
    """One bar for the contenders, one for what the present contender is doing."""

    def __init__(self, progress: Progress, contenders: int) -> None:
        self._progress = progress
        self._all = progress.add_task("methods", total=contenders)
        self._now = progress.add_task("loading", total=None)

    @contextmanager
    def contender(self, name: str) -> Iterator[Told]:
        """Shows one contender; gives what to call on each step."""

        def told(what: str, done: int, of: int) -> None:
            self._progress.update(self._now, description=f"{name}: {what}", completed=done, total=of)

        yield told
        self._progress.advance(self._all)


@contextmanager
def bars(contenders: int) -> Iterator[Bars]:
    """Shows bars while the block runs, if standard error is a terminal; they vanish at its end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Bars(progress, contenders)
