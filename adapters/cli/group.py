"""How the command line fails: one line on standard error and an exit code, never a traceback for a user's mistake."""

from __future__ import annotations

import logging
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from sparseprefill.errors import SparsePrefillError, nearest

from . import kept


class CommandError(SparsePrefillError):
    """A command cannot do what was asked; the message says what would do."""


_SMALLER = "pass shorter lengths or smaller sizes, or free memory"


class StoppedError(Exception):
    """Ctrl-C, where the command itself did not hear it."""


class Group(TyperGroup):
    """Exit code 1 for errors of this library, 2 for options that do not parse, 130 for Ctrl-C."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line; see `typer.core.TyperGroup.main`."""
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        # Commands report fallbacks and broken plugins themselves; without a handler Python would print them as well.
        logging.getLogger("sparseprefill").addHandler(logging.NullHandler())
        kept.begin()
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except SparsePrefillError as error:
            _fail(str(error), 1)
        except (StoppedError, typer.Abort):
            _fail(f"stopped: {kept.files()}", 130)
        except MemoryError as error:
            _fail(f"{error or 'there is not enough memory'}: {_SMALLER}", 1)
        except RuntimeError as error:  # of PyTorch, on a GPU and on a CPU
            if not any(word in str(error) for word in ("out of memory", "can't allocate memory")):
                raise
            _fail(f"{str(error).splitlines()[0]}: {_SMALLER}", 1)
        except Exception as error:  # typer's usage errors have no public base class across its versions
            text = getattr(error, "format_message", None)
            if text is None:
                raise
            _fail(text(), getattr(error, "exit_code", 2))
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
        return super().resolve_command(ctx, args)


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(status)
