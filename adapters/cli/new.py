"""The command `new`: writes a plugin package that works, for you to change."""

from __future__ import annotations

import keyword
import os
import re
import shutil
import tempfile
import typing
from pathlib import Path
from typing import Annotated

import typer

from . import render
from .group import CommandError, check_folder, wrote

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
"""Names of methods, as `Method` takes them, that make names of classes too."""
PREFIX = "sparseprefill-"


def new(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The name of the method or refiner: lower-case words joined by hyphens, such as my-method.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to make; by default sparseprefill-NAME here.")
    ] = None,
    refiner: Annotated[bool, typer.Option("--refiner", help="A refiner instead of a method.")] = False,
) -> None:
    """Write a plugin package with your own method, with tests: the contract, and a law on drawn calls.

    The method works as it is: it keeps the key columns that the last queries look at, and a local band. Change its
    estimator in stages.py and its parameters in config.py. A refiner works, too: it gives the first layers every key.
    pytest FOLDER is the one command that checks the package.
    """
    _check_name(name)
    folder = Path(f"{PREFIX}{name}") if output is None else output
    check_folder("--output", folder)
    if os.path.lexists(folder):
        raise CommandError(f"{folder} exists; pass another name, or another folder with --output")
    _check_free(name)
    try:
        _write(folder, name, "refiner" if refiner else "plugin")
    except OSError as error:
        raise CommandError(f"{folder}: {error.strerror}; pass a folder that can be made with --output") from error
    wrote(folder)
    render.line(f"written: {folder}", whole=True)
    for command in (f'pip install -e "{folder}[test]"', f"sparseprefill show {name}", f"pytest {folder}"):
        typer.echo(f"next: {command}")  # in one piece, however narrow the terminal


def package_of(name: str) -> str:
    """The name that Python imports."""
    return f"{PREFIX}{name}".replace("-", "_")


def _check_name(name: str) -> None:
    if NAME.fullmatch(name) and not name.startswith(PREFIX):
        return
    near = "-".join(re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()))
    near = near.removeprefix(PREFIX)
    example = near if NAME.fullmatch(near) else "my-method"
    raise CommandError(
        f"{name!r} is not a name for a method or refiner: pass lower-case words joined by hyphens, the first beginning "
        f"with a letter, without {PREFIX!r}, such as {example}"
    )


def _check_free(name: str) -> None:
    """CommandError where a method, a refiner or a plugin has this name: two of one stop each other from loading."""
    from sparseprefill.registry import default_registry

    for record in default_registry().plugins():
        offered = {"method": record.methods, "refiner": record.refiners, "plugin": (record.name,)}
        what = next((what for what, names in offered.items() if name in names), None)
        if what is not None:
            raise CommandError(f"a {what} {name!r} is installed already, from {record.source}; pass another name")


def _class_of(name: str) -> str:
    """The beginning of its classes' names; "My" stands in front where Python or this library has such a class."""
    import sparseprefill

    title = "".join(map(str.capitalize, name.split("-")))
    taken = any(hasattr(one, f"{title}{end}") for one in (sparseprefill, typing) for end in ("", "Estimator", "Config"))
    return f"My{title}" if keyword.iskeyword(title) or taken else title


def _write(folder: Path, name: str, kind: str) -> None:
    """A package of a kind, whole or not at all."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("sparseprefill.adapters.cli", f"templates/{kind}")
    made = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    words = {"name": name, "package": package_of(name), "title": _class_of(name)}
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
    try:
        root = beside / folder.name
        for template in made.list_templates(extensions=["jinja"]):
            path = root / re.sub(r"^package\b", words["package"], template.removesuffix(".jinja"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made.get_template(template).render(words), encoding="utf-8")
        root.rename(folder)
    finally:
        shutil.rmtree(beside)
