"""The checkout, laid out as its wheel: a folder to import the package from, with one file changed or none."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NAME, VERSION = PROJECT["project"]["name"], PROJECT["project"]["version"]
FOLDERS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]


def lay_out(site: Path) -> None:
    """Copy the packages into the folder `site`, with the metadata by which the registry finds the plugins."""
    for package, folder in sorted(FOLDERS.items()):
        to = site / package.replace(".", "/")
        shutil.copytree(ROOT / folder, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    facts = site / f"{NAME}-{VERSION}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n", encoding="utf-8")
    lines = (
        line
        for group, points in PROJECT["project"]["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in points.items()))
    )
    (facts / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def place(path: str) -> str:
    """Where a file of the checkout stands in the laid out folder: the longest folder wins."""
    package, folder = max(
        ((package, folder) for package, folder in FOLDERS.items() if path.startswith(folder + "/")),
        key=lambda pair: len(pair[1]),
    )
    return f"{package.replace('.', '/')}/{path[len(folder) + 1 :]}"


def changed(site: Path, to: Path, path: str, text: str) -> None:
    """A copy of `site` in `to` (hard links) in which the checkout's file `path` has another text."""
    shutil.copytree(site, to, copy_function=os.link)
    file = to / place(path)
    file.unlink()
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()
    file.write_text(text, encoding="utf-8")
