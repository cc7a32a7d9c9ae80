"""What a run has to show when a signal ends it: the files it has written, and what it had measured until then."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

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


class Terminated(KeyboardInterrupt):
    """SIGTERM came, which services and batch systems send where a person presses Ctrl-C."""


class Stop:
    """Ctrl-C or SIGTERM ends the block and not the command, which then shows what it has: ``with Stop() as stop: ...``.

    heard: whether one came. code: of the exit, 130 after Ctrl-C and 143 after SIGTERM.
    """

    def __init__(self) -> None:
        self.heard, self.code = False, 130
        self._before: Any = None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._terminated)
        return self

    @staticmethod
    def _terminated(number: int, frame: FrameType | None) -> None:
        raise Terminated

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        self.heard = kind is not None and issubclass(kind, KeyboardInterrupt)
        if kind is not None and issubclass(kind, Terminated):
            self.code = 128 + signal.SIGTERM
        return self.heard

    def check(self, done: int) -> None:
        """Ends the command if a signal came before there was anything to show."""
        if self.heard and not done:
            raise typer.Abort if self.code == 130 else typer.Exit(self.code)

    def end(self, done: int, of: int, what: str) -> None:
        """Ends the command if a signal came, with its code and how far it got. Call it when the results are out."""
        from .render import note

        if self.heard:
            note(f"stopped after {done} of {of} {what}; {files()}")
            raise typer.Exit(self.code)
