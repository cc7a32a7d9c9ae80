"""What the site does to pages: hooks of mkdocs, named in mkdocs.yml.

The pages in docs/ are read in the repository as well, so they link to files beside docs/, such as the changelog. Those
files become pages of the site, and links to them are turned there. Headings get the anchors that they have in the
repository, and the first mention of a public name on a page leads to what its docstring says. Docstrings are read from
the sources, so that nothing needs to be installed but mkdocs with its plugins.
"""

from __future__ import annotations

import os
import re
import tomllib
from html import unescape
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mkdocs.plugins import event_priority
from pymdownx.slugs import slugify

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
BESIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.txt",
    "CITATION.cff": "citation.cff.txt",
}
"""Files beside docs/, and what they are on the site."""
LINK = re.compile(r"(?<=\]\()(?!\w+:)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
WHOLE = re.compile(r"\[(?P<text>[^\]\[]*)\]\((?!\w+:)(?P<path>[^)\s#]+)\)")
NAMED = re.compile(r"^ *```.*?^ *```$|^#[^\n]*$|\[[^\]\[]*\]\(|`(?:sp\.)?(?P<name>\w+)`", flags=re.M | re.S)
"""Inline code that may be a public name; fenced blocks, headings and texts of links are skipped."""
CELL = re.compile(r"(?P<first><tr>\s*)?<td(?P<how>[^>]*)>(?P<text>.*?)</td>", flags=re.S)
NAME, TEXT = 20, 40
"""Up to so many characters a row's first cell is a name, and stays in one line; beyond so many any cell is text, for
which phones make room.
"""
INTERVAL = re.compile(r" \((?P<low>[\d.]+)(?P<unit>(?: |&nbsp;)%)? to (?P<high>[\d.]+)(?P=unit)?\)$")
"""An interval behind a figure in a table, which stands below it."""
CHANGE = re.compile(r" (?P<text>\([-+]\d+(?: [-+]\d+)?\))$")
"""Answers lost and won behind a count in a table, which stand below it, too."""
BLOCK = re.compile(r"(<pre.*?</pre>)", flags=re.S)
PIECE = re.compile(r"<code>(?P<text>[^<\n]{1,30})</code>")
"""Inline code short enough to stay in one line of text."""
WORD = 12
"""Up to so many characters it stays in one line of a table, too."""
PICTURE = re.compile(r'<img [^>]*src="(?P<path>[^"]+\.png)"[^>]*>')
SECTIONS = 3
"""From so many sections on, a page begins with the list of them on a phone."""
INVENTORIES = (
    "https://docs.python.org/3/objects.inv",
    "https://docs.pytorch.org/docs/stable/objects.inv",
)
"""Names of other projects that signatures link to; they are fetched."""


PUBLIC = {
    name.rpartition(".")[2]: name
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for name in re.findall(r"^::: (sparseprefill\.(?:testing\.)?\w+)$", page.read_text(encoding="utf-8"), flags=re.M)
}
"""Public names, and where they are generated."""
SOURCES = TemporaryDirectory(prefix="sparseprefill-docs-")
"""The package as it is imported, which lies in several folders of the repository."""


def on_startup(**kwargs: object) -> None:
    """Lays out the package: links to its folders, where pyproject.toml says that they are imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for name, folder in sorted(project["tool"]["setuptools"]["package-dir"].items()):
        place = Path(SOURCES.name, *name.split("."))
        if "." in name:
            place.symlink_to(ROOT / folder)
            continue
        place.mkdir(parents=True)
        for one in (ROOT / folder).iterdir():
            (place / one.name).symlink_to(one)


@event_priority(50)  # before mkdocstrings reads its options
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors as in the repository; names of PyTorch and Python where DOCS_INVENTORIES=1 allows to fetch them."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    handler = config.plugins["mkdocstrings"].config["handlers"]["python"]
    handler["paths"] = [SOURCES.name]
    if os.environ.get("DOCS_INVENTORIES") == "1":
        handler["inventories"] = [{"url": url, "domains": ["py", "std"]} for url in INVENTORIES]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files beside docs/."""
    from mkdocs.structure.files import File

    for source, target in BESIDE.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links that lead out of docs/, or into it from beside it."""
    here = page.file.src_uri
    sources = {target: source for source, target in BESIDE.items()}
    folder = PurePosixPath(sources.get(here, f"docs/{here}")).parent

    def turned(link: re.Match[str]) -> str:
        wanted = normpath(str(folder / link["path"]))
        target = BESIDE.get(wanted, wanted.removeprefix("docs/"))
        return relpath(target, str(PurePosixPath(here).parent)) + (link["anchor"] or "")

    def without(link: re.Match[str]) -> str:
        """Tests are no pages: their names stay, as text."""
        wanted = normpath(str(folder / link["path"]))
        return link["text"] if wanted.startswith("tests/") else link[0]

    markdown = WHOLE.sub(without, markdown)
    return LINK.sub(turned, markdown if here.startswith("api/") else named(markdown))


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Keeps figures with their per cent signs, and short code, in one line, and marks names, text and intervals for
    site.css. A page of several sections begins with their list, which site.css shows where the theme has no room for
    its own."""

    def marked(cell: re.Match[str]) -> str:
        text = INTERVAL.sub(r' <small class="interval">\g<low> to&nbsp;\g<high></small>', cell["text"])
        text = CHANGE.sub(r' <small class="interval change">\g<text></small>', text)
        long = len(unescape(re.sub(r"<[^>]*>", "", text)))
        kind = ' class="text"' if long > TEXT else ' class="name"' if cell["first"] and long <= NAME else ""
        return f"{cell['first'] or ''}<td{cell['how']}{kind}>{text}</td>"

    def joined(text: str) -> str:
        text = re.sub(r"(?<=\d)\s(?=%)", "&nbsp;", text)
        return PIECE.sub(
            lambda one: f'<code class="{"word" if len(one["text"]) <= WORD else "piece"}">{one["text"]}</code>', text
        )

    html = "".join(part if BLOCK.fullmatch(part) else joined(part) for part in BLOCK.split(html))
    html = PICTURE.sub(r'<a href="\g<path>">\g<0></a>', html)  # on a phone it opens in full
    sections = [part for title in page.toc.items for part in title.children]
    if len(sections) >= SECTIONS:
        listed = "".join(f'<li><a href="{part.url}">{part.title}</a></li>' for part in sections)
        contents = f'<details class="contents"><summary>On this page</summary><ul>{listed}</ul></details>'
        html = html.replace("</h1>", f"</h1>{contents}", 1)
    return CELL.sub(marked, html)


def named(markdown: str) -> str:
    """Links the first mention of each public name in the prose: classes as they are, functions behind ``sp.``."""
    seen: set[str] = set()

    def linked(found: re.Match[str]) -> str:
        name = found["name"]
        if name is None or name in seen or name not in PUBLIC or (name.islower() and "sp." not in found[0]):
            return found[0]
        seen.add(name)
        return f"[{found[0]}][{PUBLIC[name]}]"

    return NAMED.sub(linked, markdown)
