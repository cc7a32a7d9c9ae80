"""Files that a command writes: what stands in the way is said before the work starts, or when it comes up."""

from __future__ import annotations

import os
from pathlib import Path

from .group import CommandError, wrote


def check_writable(option: str, path: Path, *endings: str) -> None:
    """CommandError, before any work is done, where the file of an option cannot be written.

    endings: that its name may have, where not any will do.
    """
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
    return CommandError(f"{option} {path}: {error.strerror}; pass a path that can be written")


def write(option: str, path: Path, text: str) -> None:
    """Write the file of an option, in UTF-8; CommandError where that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(option, path, error) from error
    wrote(path)
