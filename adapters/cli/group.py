"""The end of a command: an error is one line and an exit code, never a traceback; Ctrl-C keeps what there is.

What stands in the way of a file is said before the work starts, or when it comes up. The files that a run has written
are remembered here, to be named when a signal ends it.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from sparseprefill.errors import SparsePrefillError, nearest

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SMALLER = "pass shorter lengths or smaller sizes, or free memory"
EXAMPLE = re.compile(r"such as ('.*?'|\S+?)[.,;]?(?=\s|$)")
"""A value in the help of whatever a command cannot do without."""
_files: list[str] = []


class CommandError(SparsePrefillError):
    """A command cannot do what was asked; the message says what would do."""


class StoppedError(Exception):
    """Ctrl-C, where the command itself did not hear it."""


def wrote(path: Path) -> None:
    """Remember a file that this run has written."""
    if str(path) not in _files:
        _files.append(str(path))


def written() -> str:
    """The files of this run, in words."""
    return f"written: {', '.join(_files)}" if _files else "nothing was written"


def lacks_memory(error: Exception) -> bool:
    """True for the errors of Python and of PyTorch, on a GPU and on a CPU, that say so."""
    said = any(words in str(error) for words in ("out of memory", "can't allocate memory"))
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and said)


class Stop:
    """Ctrl-C or SIGTERM ends the block and not the command, which then shows what it has: ``with Stop() as stop: ...``.

    Services and batch systems send SIGTERM where a person presses Ctrl-C. heard: whether one came. code: of the exit,
    130 after Ctrl-C and 143 after SIGTERM.
    """

    def __init__(self) -> None:
        self.heard, self.code = False, 130
        self._before: Any = None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, _terminated)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        self.heard = isinstance(error, KeyboardInterrupt)
        self.code = 143 if error is not None and error.args == (signal.SIGTERM,) else 130
        return self.heard

    def check(self, done: int) -> None:
        """End the command if a signal came before there was anything to show."""
        if self.heard and not done:
            raise typer.Abort if self.code == 130 else typer.Exit(self.code)

    def end(self, done: int, of: int, what: str, *, failed: bool = False) -> None:
        """End the command if a signal came, with its code and how far it got, or with 1 if something failed.

        Call it when the results are out.
        """
        from .render import note

        if self.heard:
            note(f"stopped after {done} of {of} {what}; {written()}")
            raise typer.Exit(self.code)
        if failed:
            raise typer.Exit(1)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


class Group(TyperGroup):
    """Commands that exit with 1 for errors of this library, 2 for options that do not parse, 130 for Ctrl-C."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line; see `typer.core.TyperGroup.main`."""
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        # Commands report fallbacks and broken plugins themselves; without a handler Python would print them as well.
        logging.getLogger("sparseprefill").addHandler(logging.NullHandler())
        _files.clear()
        if sys.stdout is None:  # closed, or a Windows program without a console
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - it stays
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names that its encoding lacks
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
            sys.stdout.flush()  # what does not fit is said here, not as Python ends
        except SparsePrefillError as error:
            _fail(str(error), 1)
        except (StoppedError, typer.Abort):
            _fail(f"stopped: {written()}", 130)
        except OSError as error:  # files have their own words, so this is standard output
            if error.errno not in _FULL:
                raise
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - else Python tries once more
            _fail(f"standard output: {error.strerror}; free space, or send it elsewhere", 1)
        except Exception as error:  # typer's usage errors have no public base class across its versions
            if lacks_memory(error):
                _fail(f"{next(iter(str(error).splitlines()), 'there is not enough memory')}: {_SMALLER}", 1)
            text = getattr(error, "format_message", None)
            if text is None:
                raise
            _fail(_unparsed(error) or f"{text()}{_example(error)}", getattr(error, "exit_code", 2))
        sys.exit(status if isinstance(status, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; typer would end in silence on Ctrl-C."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise StoppedError from error

    def get_params(self, ctx: Any) -> list[Any]:
        """Every parameter. A flag without a default is False: to make None of None typer imports pydantic."""
        made: list[Any] = super().get_params(ctx)
        for one in made:
            if getattr(one, "is_flag", False) and one.default is None:
                one.default = False
        return made

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names; for a word that names none, the nearest."""
        word = args[0]
        if not word.startswith("-") and self.get_command(ctx, word) is None:
            ctx.fail(f"there is no command {word!r}{nearest(word, self.list_commands(ctx))}")
        found = super().resolve_command(ctx, args)
        command = found[1]
        for one in () if command is None else command.params:
            _refuse_empty(one)
        return found


def _refuse_empty(parameter: Any) -> None:
    """Have an option or argument for paths refuse an empty one, which as a Path is the working directory."""
    process = parameter.process_value

    def checked(ctx: Any, value: Any) -> Any:
        found = process(ctx, value)
        given, made = (x if isinstance(x, list | tuple) else [x] for x in (value, found))
        if any(text == "" and isinstance(path, Path) for text, path in zip(given, made, strict=False)):
            raise CommandError(f"{max(parameter.opts, key=len)} '': it names no file; pass the path of one")
        return found

    parameter.process_value = checked


def _unparsed(error: Any) -> str:
    """Fault of an option's value, where typer only has pydantic's text of it; empty elsewhere."""
    cause, names = error.__cause__, getattr(getattr(error, "param", None), "opts", ())
    found = cause.errors() if names and hasattr(cause, "errors") else []
    if not found:
        return ""
    kind, message, limits, value = (found[0].get(key, "") for key in ("type", "msg", "ctx", "input"))
    bounds = {"greater_than_equal": ("ge", "or more"), "less_than_equal": ("le", "or less")}
    if kind in bounds:
        key, words = bounds[kind]
        remedy = f"{limits[key]} {words}"
    elif kind.startswith(("int", "float")):
        remedy = "a whole number" if kind.startswith("int") else "a number"
    else:
        said = message.removeprefix("Value error, ").rstrip(".")
        _, among, choices = said.partition(" is not one of ")
        remedy = f"one of {choices}" if among else f"another value: {said}"
    return f"{max(names, key=len)} {value}: pass {remedy}"


def _example(error: Any) -> str:
    """A whole command line, behind the error of one that lacks something; empty behind any other error."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ != "MissingParameter" or context is None:  # typer's class is private
        return ""
    words = ["sparseprefill", context.info_name]
    for one in context.command.params:
        if one.required:
            words += (
                [*one.opts[:1], *EXAMPLE.findall(one.help)]
                if one.opts[0].startswith("-")
                else EXAMPLE.findall(one.help)
            )
    return f" Such as: {' '.join(words)}"


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(status)


def check_writable(option: str, path: Path | None, *endings: str) -> None:
    """CommandError, before any work is done, where the file of an option cannot be written; None is no file.

    endings: that its name may have, where not any will do.
    """
    if path is None:
        return
    if endings and path.suffix.lower() not in endings:
        raise CommandError(f"{option} {path}: pass a name that ends in {' or '.join(endings)}")
    check_folder(option, path)
    if os.path.isdir(path):  # False, and no error, for a name that is too long
        raise CommandError(f"{option} {path}: that is a folder; name a file in it")
    there = os.path.exists(path)
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise unwritable(option, path, error) from error
    if not there:
        path.unlink()


def check_folder(option: str, path: Path) -> None:
    """CommandError where the folder that a path is to stand in is missing."""
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        raise CommandError(f"{option} {path}: there is no folder {folder}; make it with mkdir -p, or name another")


def unwritable(option: str, path: Path, error: OSError) -> CommandError:
    """The error for a file of an option that could not be written."""
    remedy = "free space, or name a path on another disk" if error.errno in _FULL else "pass a path that can be written"
    return CommandError(f"{option} {path}: {error.strerror}; {remedy}")


def write(option: str, path: Path, content: str | bytes) -> None:
    """Write the file of an option, text in UTF-8, whole or not at all; CommandError where that fails."""
    data = content.encode() if isinstance(content, str) else content
    try:
        _replace(path, data)
    except OSError as error:
        raise unwritable(option, path, error) from error
    wrote(path)


def _replace(path: Path, data: bytes) -> None:
    """Put a new file in the place of an old one. What is no file, such as a pipe, or stands in a folder that takes no
    other, is written to."""
    real = path.resolve()
    if real.exists() and not (real.is_file() and os.access(real.parent, os.W_OK)):
        real.write_bytes(data)
        return
    beside = real.with_name(f".{real.name}.new")
    try:
        beside.write_bytes(data)
        if real.exists():
            shutil.copymode(real, beside)
        beside.replace(real)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
