"""Markdown pages taken apart: code blocks, headings, links. Plain text in, no parser needed for what we write."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
SKIP = re.compile(r"<!-- skip: (?P<reason>.+) -->")
FILE = re.compile(r"<!-- file: (?P<path>\S+) -->")
LINK = re.compile(r"(?<!\\)\[[^\]\[]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block. line: of its first line of code, from 1.

    skip: the reason given before it. output: what it prints. file: the file that it is a part of, from docs/.
    """

    language: str
    code: str
    line: int
    skip: str | None = None
    output: str | None = None
    file: str | None = None

    @property
    def runs(self) -> bool:
        """Whether it is Python to be run."""
        return self.language == "python" and self.skip is None and self.file is None


def pages() -> list[Path]:
    """README, CONTRIBUTING, CHANGELOG and every page under docs/."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [page for page in top if page.exists()] + sorted((ROOT / "docs").rglob("*.md"))


def name(page: Path) -> str:
    """The page's path from the root, for test ids."""
    return page.relative_to(ROOT).as_posix()


def blocks(text: str) -> list[Block]:
    """Fenced blocks, with the comment in front of each.

    ``<!-- skip: reason -->``: not run. ``<!-- output -->``: what the Python block before it prints.
    ``<!-- file: path -->``: not run, but a part of that file.
    """
    found: list[Block] = []
    lines = text.splitlines()
    comment = ""
    at = 0
    while at < len(lines):
        line = lines[at].strip()
        if not line.startswith("```"):
            comment = line if line.startswith("<!--") else comment if not line else ""
            at += 1
            continue
        indent = len(lines[at]) - len(lines[at].lstrip())
        end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == "```"), len(lines))
        code = "\n".join(row[indent:] for row in lines[at + 1 : end])
        skip, file = SKIP.fullmatch(comment), FILE.fullmatch(comment)
        if comment == "<!-- output -->" and found:
            last = found.pop()
            found.append(replace(last, output=code))
        else:
            language = (line[3:].split() or [""])[0]
            reason, path = skip["reason"] if skip else None, file["path"] if file else None
            found.append(Block(language, code, at + 2, reason, file=path))
        comment = ""
        at = end + 1
    return found


def prose(text: str) -> str:
    """The page without its fenced blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^\s*```.*?^\s*```\s*$", "", text, flags=re.M | re.S))


def headings(text: str) -> list[str]:
    """Titles of all levels, code marks removed."""
    bare = re.sub(r"^\s*```.*?^\s*```\s*$", "", text, flags=re.M | re.S)
    return [match[1].replace("`", "").strip() for match in re.finditer(r"^#{1,6} (.+)$", bare, flags=re.M)]


def anchors(text: str) -> set[str]:
    """What links may name after ``#``."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings(text)}


def links(text: str) -> list[str]:
    """Targets of links and images that point into the repository."""
    targets = [match["target"] for match in LINK.finditer(prose(text))]
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def section(text: str, title: str) -> str:
    """The text under a second-level heading."""
    parts = re.split(r"^## ", text, flags=re.M)
    return next((part for part in parts[1:] if part.splitlines()[0].strip() == title), "")
