"""What a run has to show when Ctrl-C ends it: the files it has written, and what it had measured until then."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import typer

_files: list[str] = []


def begin() -> None:
    """A new run: nothing is written yet."""
    _files.clear()


def wrote(path: Path) -> None:
    """This run has written a file."""
    if str(path) not in _files:
        _files.append(str(path))


def files() -> str:
    """The files of this run, in words."""
    return f"written: {', '.join(_files)}" if _files else "nothing was written"


class Stop:
    """Ctrl-C ends the block and not the command, which then shows what it has: ``with Stop() as stop: ...``.

    heard: whether it came.
    """

    def __init__(self) -> None:
        self.heard = False

    def __enter__(self) -> Stop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.heard = kind is not None and issubclass(kind, KeyboardInterrupt)
        return self.heard

    def check(self, done: int) -> None:
        """Ends the command if Ctrl-C came before there was anything to show."""
        if self.heard and not done:
            raise typer.Abort

    def end(self, done: int, of: int, what: str) -> None:
        """Ends the command if Ctrl-C came, with 130 and a word on how far it got. Call it when the results are out."""
        from .render import note

        if self.heard:
            note(f"stopped after {done} of {of} {what}; {files()}")
            raise typer.Exit(130)
