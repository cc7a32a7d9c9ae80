"""A terminal of a given width: what a command shows there, and how it takes Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from threading import Thread

from helpers.patience import PATIENCE

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TAKES_INTERRUPTS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Becomes a Python with the arguments behind. What a shell runs in the background, tests perhaps, ignores Ctrl-C, as
does all that it starts."""


class Terminal:
    """Runs Python with standard output and standard error on a terminal of so many columns."""

    def __init__(self, arguments: Sequence[str], columns: int, environment: Mapping[str, str] | None = None) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        settings = {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **(environment or {})}
        command = [sys.executable, "-c", TAKES_INTERRUPTS, *arguments]
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=kept | settings)
        os.close(theirs)
        self._file, self._parts = ours, list[bytes]()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._file, 1 << 16)
            except OSError:  # nobody holds the other end
                return
            if not part:
                return
            self._parts.append(part)

    @property
    def shown(self) -> str:
        """All that was shown so far, without colours."""
        text = b"".join(self._parts).decode("utf-8", "replace")
        return ESCAPES.sub("", text).replace("\r\n", "\n")

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        """Until the text is shown; AssertionError where it does not come."""
        ends = time.monotonic() + seconds * PATIENCE
        while text not in self.shown:
            assert self._process.poll() is None, self.shown
            assert time.monotonic() < ends, self.shown
            time.sleep(0.02)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def end(self, seconds: float = 120.0) -> tuple[int, str]:
        """Waits for the end: exit code, and all that was shown."""
        try:
            code = self._process.wait(seconds * PATIENCE)
        finally:
            self._process.kill()
        self._reader.join(seconds)
        os.close(self._file)
        return code, self.shown
