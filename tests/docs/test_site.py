"""The site: every page has its place in the navigation, and every public name in the pages made from docstrings.

`tox -e docs` builds it, and fails for a link that leads nowhere.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

import sparseprefill as sp
from docs.pages import ROOT, name, outline, pages
from sparseprefill import testing

DOCS = ROOT / "docs"
SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
BESIDE = {"overview.md", "contributing.md", "changelog.md", "security.md"}
"""Pages that docs/tools/pages.py makes of the files beside docs/."""


def paths(nav: Any) -> Iterator[str]:
    """The paths of a navigation, titles left out."""
    if isinstance(nav, str):
        yield nav
    else:
        for one in nav.values() if isinstance(nav, dict) else nav:
            yield from paths(one)


def generated() -> list[str]:
    """What the pages under docs/api/ ask for, by dotted name."""
    return [
        name
        for page in sorted((DOCS / "api").glob("*.md"))
        for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), flags=re.M)
    ]


def test_every_page_is_in_the_navigation_once() -> None:
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} | BESIDE
    assert Counter(there) == Counter(paths(SITE["nav"])), "name each page once under nav in mkdocs.yml"


def test_the_menu_has_at_most_25_lines() -> None:
    """Its titles, and the pages of the one section that is open."""
    assert "navigation.sections" not in SITE["theme"]["features"]
    sections = [list(paths(next(iter(one.values())))) for one in SITE["nav"] if isinstance(one, dict)]
    assert len(SITE["nav"]) + max(map(len, sections)) <= 25
    assert "write-a-plugin.md" in SITE["nav"]  # which opens itself


def test_a_title_in_the_menu_opens_nothing() -> None:
    """With `navigation.indexes` it opens the section's first README, wherever that stands."""
    assert "navigation.indexes" not in SITE["theme"]["features"]


@pytest.mark.parametrize("page", pages(), ids=name)
def test_a_page_shows_its_contents(page: Path) -> None:
    """No page hides them, and a long one has some: a heading for each 100 lines."""
    text = page.read_text(encoding="utf-8")
    matter = yaml.safe_load(text.split("---")[1]) if text.startswith("---\n") else {}
    assert matter.get("hide", []) == []
    lines = len(text.splitlines())
    shown = [title for level, title in outline(text) if level > 1]
    assert lines <= 250 or len(shown) >= lines / 100, (
        f"{lines} lines need {lines // 100 + 1} headings or more: add some"
    )


def test_the_site_hides_no_contents() -> None:
    assert "toc.integrate" not in SITE["theme"]["features"]
    toc = next(one["toc"] for one in SITE["markdown_extensions"] if isinstance(one, dict) and "toc" in one)
    assert "toc_depth" not in toc


def test_search_works_from_a_folder() -> None:
    """Without a server a browser reads no index and starts no worker; without a network it fetches no substitute."""
    assert {"search", "offline"} <= set(map(str, SITE["plugins"]))
    assert SITE["use_directory_urls"] is False
    scripts = SITE["extra"]["polyfills"]
    assert any("iframe-worker" in script for script in scripts)
    assert [script for script in scripts if not (DOCS / script).is_file()] == []


PIECES = (".name", ".word", ".piece", ".change")
"""Classes that docs/tools/pages.py gives to short text alone."""


def test_no_column_of_tables_is_kept_in_one_line() -> None:
    """A long first cell would push the others off the screen."""
    rules = re.findall(r"([^{}]+)\{([^{}]*)\}", (DOCS / "site.css").read_text(encoding="utf-8"))
    kept = [one.strip() for selectors, body in rules if "nowrap" in body for one in selectors.split(",\n")]
    assert kept
    assert [one for one in kept if not one.endswith(PIECES)] == []


def test_files_beside_docs_are_there() -> None:
    text = (DOCS / "tools" / "pages.py").read_text(encoding="utf-8")
    sources = dict(re.findall(r'"(\S+)": "(\S+\.(?:md|txt))"', text))
    assert set(sources.values()) == BESIDE | {"license.txt", "citation.cff.txt"}
    assert [name for name in sources if not (ROOT / name).is_file()] == []


def test_every_public_name_is_generated_once() -> None:
    public = [f"sparseprefill.{name}" for name in sp.__all__]
    public += [f"sparseprefill.testing.{name}" for name in testing.__all__]
    asked = Counter(generated())
    wrong = {name: asked[name] for name in public if asked[name] != 1}
    assert wrong == {}, "put a line ::: NAME for each of these on one page under docs/api/"


@pytest.mark.parametrize("name", generated())
def test_every_generated_name_is_there(name: str) -> None:
    """A name that is gone would stop the site."""
    pkgutil.resolve_name(name)


ATTRS = sorted(name for name in sp.__all__ if isinstance(getattr(sp, name), type) and attrs.has(getattr(sp, name)))


@pytest.fixture(scope="module")
def griffe_core(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The package as the site reads it: core, with the plugins where they are imported."""
    griffe = pytest.importorskip("griffe")
    laid_out = tmp_path_factory.mktemp("sources")
    (laid_out / "sparseprefill").mkdir()
    for one in [*(ROOT / "core" / "sparseprefill").iterdir(), ROOT / "plugins"]:
        (laid_out / "sparseprefill" / one.name).symlink_to(one)
    extensions = griffe.load_extensions(str(DOCS / "tools" / "docstrings.py"))
    return griffe.load("sparseprefill", search_paths=[laid_out], extensions=extensions, allow_inspection=False)


@pytest.mark.parametrize("name", ATTRS)
def test_signatures_of_the_site_are_those_of_attrs(name: str, griffe_core: Any) -> None:
    kind = getattr(sp, name)
    module = kind.__module__.removeprefix("sparseprefill.")
    made = [one for one in griffe_core[f"{module}.{name}.__init__"].parameters if one.name != "self"]
    wanted = inspect.signature(kind).parameters.values()
    assert [one.name for one in wanted] == [one.name for one in made]
    assert [one.kind.description for one in wanted] == [one.kind.value for one in made]
    needed = [one.name for one in wanted if one.default is inspect.Parameter.empty]
    assert needed == [one.name for one in made if one.default is None or one.kind.value.startswith("variadic")]
