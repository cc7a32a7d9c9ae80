"""The packages, and the README as a package index shows it; everything else stands in pyproject.toml.

Packages lie in three folders, those of `package-dir` there; setuptools by itself can only search one.

On an index, the README's links into the repository lead nowhere. Where pyproject.toml names its address
([project.urls], Source), they become links to the files of that address. Until it does, their texts stay without them,
and pictures are left out.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
FENCED = re.compile(r"(^```.*?^```$)", flags=re.M | re.S)
PICTURE = re.compile(r"!\[(?P<text>[^\]]*)\]\((?!\w+:)(?P<path>[^)#\s]+)\)\n*")
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?!\w+:)(?P<path>[^)\s]+)\)")


def described(readme: str, source: str | None) -> str:
    """The README for an index. source: the repository's address, or None."""
    parts = FENCED.split(readme)
    return "".join(part if at % 2 else turned(part, source) for at, part in enumerate(parts))


def turned(prose: str, source: str | None) -> str:
    """The same for text without fenced blocks."""
    if source is None:
        return LINK.sub(r"\g<text>", PICTURE.sub("", prose))
    there = source.rstrip("/")
    pictured = PICTURE.sub(rf"![\g<text>]({there}/raw/main/\g<path>)\n\n", prose)
    return LINK.sub(rf"[\g<text>]({there}/blob/main/\g<path>)", pictured)


def packages(folders: Mapping[str, str]) -> list[str]:
    """The names of all packages. folders: where those of a name lie, as `package-dir` says."""
    found: list[str] = []
    for top, folder in folders.items():
        found += [top, *(f"{top}.{name}" for name in find_packages(str(ROOT / folder)))]
    return found


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    urls = project["project"].get("urls", {})
    setup(
        packages=packages(project["tool"]["setuptools"]["package-dir"]),
        long_description=described((ROOT / "README.md").read_text(encoding="utf-8"), urls.get("Source")),
        long_description_content_type="text/markdown",
    )
