"""The site as mkdocs builds it, without and with a browser. Each part skips itself where its tools are missing.

`tox -e browser` has both.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.pages import ROOT, name, pages

MEASURE = ROOT / "tests" / "adapters" / "browser" / "measure.py"
LONG = [page for page in pages() if len(page.read_text(encoding="utf-8").splitlines()) > 250]
BESIDE = {"README.md": "overview", "CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog"}


class Links(HTMLParser):
    """Links of a class, by what they say."""

    def __init__(self, of: str, html: str) -> None:
        super().__init__()
        self.of, self.said, self.found, self.inside = of, "", list[tuple[str, str]](), ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and self.of in (given.get("class") or "").split():
            self.inside, self.said = given.get("href") or "", ""

    def handle_data(self, data: str) -> None:
        self.said += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "a" and self.inside:
            self.found.append((" ".join(self.said.split()), self.inside))
            self.inside = ""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def built(page: Path) -> str:
    """Where a page stands on the site."""
    here = BESIDE.get(name(page)) or name(page).removeprefix("docs/").removesuffix(".md")
    return re.sub(r"README$", "index", here) + ".html"


def entries(nav: Any, title: str | None = None) -> Iterator[tuple[str | None, str]]:
    """Titles given to pages, and their paths, in the order of mkdocs.yml."""
    if isinstance(nav, str):
        yield title, nav
    elif isinstance(nav, dict):
        for said, one in nav.items():
            yield from entries(one, said)
    else:
        for one in nav:
            yield from entries(one)


def test_the_menu_opens_what_it_says(site: Path) -> None:
    """Each page once, in the order of mkdocs.yml; titles of groups open none."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    shown = [one for one in Links("md-nav__link", (site / "404.html").read_text()).found if "#" not in one[1]]
    wanted = list(entries(nav))
    assert [re.sub(r"(README)?\.md$", lambda end: f"{'index' if end[1] else ''}.html", path) for _, path in wanted] == [
        target.removeprefix("/") for _, target in shown
    ]
    assert [said or own for (said, _), (own, _) in zip(wanted, shown, strict=True)] == [own for own, _ in shown]
    assert dict(shown)["Write a plugin"] == "/write-a-plugin.html"


@pytest.mark.parametrize("page", LONG, ids=name)
def test_a_long_page_lists_its_contents(page: Path, site: Path) -> None:
    html = (site / built(page)).read_text()
    side = re.search(r'<div class="md-sidebar md-sidebar--secondary"([^>]*)>', html)
    assert side is not None
    assert "hidden" not in side[1]
    assert len([href for _, href in Links("md-nav__link", html).found if href.startswith("#")]) >= 3


def test_intervals_and_changes_stand_below_their_figures(site: Path) -> None:
    """In the same unit; no row is as high as its widest cell makes it on a narrow screen."""
    shown = {name: (site / f"{name}.html").read_text() for name in ("real-models", "real-models-each")}
    assert re.search(r'&nbsp;% <small class="interval">[\d.]+ to&nbsp;[\d.]+</small></td>', shown["real-models-each"])
    assert re.search(r'\d <small class="interval change">\(-\d+ \+\d+\)</small></td>', shown["real-models"])
    assert [name for name, html in shown.items() if re.search(r"% to [\d.]+(&nbsp;| )%\)</td>", html)] == []


def test_a_page_of_several_sections_lists_them_on_a_phone(site: Path) -> None:
    assert '<details class="contents">' in (site / "real-models.html").read_text()
    assert '<details class="contents">' not in (site / "methods.html").read_text()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    fetched = {
        (page.relative_to(site).as_posix(), address)
        for page in site.rglob("*.html")
        for address in re.findall(r"<(?:script|link|img)\b[^>]*\b(?:src|href)=\"?(https?:[^\s\">]+)", page.read_text())
    }
    assert fetched == set()
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")


def measured(width: int, *given: str) -> list[dict[str, Any]]:
    """What measure.py says about pages."""
    pytest.importorskip(
        "PyQt6.QtWebEngineCore", reason="needs PyQt6-WebEngine, a headless Chromium", exc_type=ImportError
    )
    done = subprocess.run(
        [sys.executable, str(MEASURE), str(width), *given], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_fits_a_browser(site: Path, width: int) -> None:
    """No page is wider than the screen. What is wider scrolls, and then a row's second cell begins on the screen."""
    paths = sorted(site.rglob("*.html"))
    for path, facts in zip(paths, measured(width, *map(str, paths)), strict=True):
        assert (facts["width"], facts["lost"], facts["broken"]) == (width, [], 0), path
        assert facts["needed"] <= width, path
        assert max(facts["second"], default=0) <= 0.6 * width, path


@pytest.mark.slow
def test_long_pages_show_their_contents_in_a_browser(site: Path) -> None:
    paths = [site / built(page) for page in LONG]
    shown = [facts["contents"] for facts in measured(1280, *map(str, paths))]
    assert [path.name for path, there in zip(paths, shown, strict=True) if not there] == []


@pytest.mark.parametrize("width", [390, 1280])
def test_search_finds_something_without_a_server(site: Path, width: int) -> None:
    for facts in measured(
        width, str(site / "index.html"), str(site / "methods" / "bfla.html"), "--search", "threshold"
    ):
        assert facts["found"], facts["width"]
