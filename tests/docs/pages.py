"""Markdown pages taken apart: code blocks, headings, links. Plain text in, no parser needed for what we write."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
SKIP = re.compile(r"<!-- skip: (?P<reason>.+) -->")
FILE = re.compile(r"<!-- file: (?P<path>\S+) -->")
FENCED = re.compile(r"^\s*```.*?^\s*```\s*$", flags=re.M | re.S)
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
    """README, CONTRIBUTING, CHANGELOG, SECURITY and every page under docs/."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
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
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", text))


def headings(text: str) -> list[str]:
    """Titles of all levels, code marks removed."""
    return [title for _, title in outline(text)]


def outline(text: str) -> list[tuple[int, str]]:
    """Level and title of each heading, code marks removed."""
    found = re.finditer(r"^(#{1,6}) (.+)$", FENCED.sub("", text), flags=re.M)
    return [(len(match[1]), match[2].replace("`", "").strip()) for match in found]


def passages(text: str) -> Iterator[str]:
    """What is written once on a page: sections by their path of titles, paragraphs, list items, and three rows of a
    table one below the other (a single row may be the same in two tables). Fenced blocks and comments are left out.
    """
    path: list[str] = []
    for level, title in outline(text):
        path = [*path[: level - 1], title]
        yield "# " + " / ".join(path)
    plain = re.sub(r"<!--.*?-->|^#[^\n]*$", "", FENCED.sub("\n\n", text), flags=re.M | re.S)
    for paragraph in re.split(r"\n\s*\n", plain):
        if paragraph.lstrip().startswith("|"):
            rows = [" ".join(row.split()) for row in paragraph.strip().splitlines()][2:]
            yield from ("\n".join(rows[at : at + 3]) for at in range(max(1, len(rows) - 2)))
        else:
            yield from (" ".join(item.split()) for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", paragraph))


def repeated(text: str) -> list[str]:
    """Passages that a page has more than once."""
    return [passage for passage, times in Counter(passages(text)).items() if passage and times > 1]


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
