"""How the command line fails: one line on standard error and an exit code, never a traceback for a user's mistake."""

from __future__ import annotations

import logging
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from sparseprefill.errors import SparsePrefillError


class CommandError(SparsePrefillError):
    """A command cannot do what was asked; the message says what would do."""


class Group(TyperGroup):
    """Exit code 1 for errors of this library, 2 for options that do not parse."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line; see `typer.core.TyperGroup.main`."""
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        # Commands report fallbacks and broken plugins themselves; without a handler Python would print them as well.
        logging.getLogger("sparseprefill").addHandler(logging.NullHandler())
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except SparsePrefillError as error:
            _fail(str(error), 1)
        except typer.Abort:
            _fail("stopped", 130)
        except Exception as error:  # typer's usage errors have no public base class across its versions
            text = getattr(error, "format_message", None)
            if text is None:
                raise
            _fail(text(), getattr(error, "exit_code", 2))
        sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(status)
