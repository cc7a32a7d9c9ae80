"""Prints how pages stand in a real browser, a line for each: ``python measure.py WIDTH PAGE... [--search WORD]``.

``--search`` types a word into the site's search and waits for what it finds. Needs PyQt6-WebEngine, a Chromium.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import sys

os.environ["QT_QPA_PLATFORM"] = "offscreen"
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--no-sandbox --disable-gpu"

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

FACTS = """(() => {
    const right = one => one.getBoundingClientRect().right, left = one => one.getBoundingClientRect().left
    const outside = [...document.querySelectorAll("body *")].filter(one => right(one) > innerWidth + 1)
    const scrolls = one => one && (one.scrollWidth > one.clientWidth && right(one) <= innerWidth + 1
        && ["auto", "scroll"].includes(getComputedStyle(one).overflowX) || scrolls(one.parentElement))
    const tables = [...document.querySelectorAll("article table")].filter(one => scrolls(one.parentElement))
    return JSON.stringify({
        width: innerWidth,
        needed: document.documentElement.scrollWidth,
        images: document.images.length,
        unnamed: [...document.images].filter(one => !one.alt).length,
        broken: [...document.images].filter(one => !one.naturalWidth).length,
        outside: outside.map(one => one.tagName),
        lost: outside.filter(one => one.closest("article") && !scrolls(one)).map(one => one.tagName),
        second: tables.map(one => Math.max(...[...one.rows].map(row => row.cells[1] ? left(row.cells[1]) : 0))),
        contents: document.querySelector(".md-sidebar--secondary .md-nav__link")?.checkVisibility() ?? false,
        found: [...document.querySelectorAll(".md-search-result__link")].map(one => one.href),
    })
})()"""
SEARCH = """(() => {
    const field = document.querySelector(".md-search__input")
    document.querySelector("[data-md-toggle=search]").click()
    field.dispatchEvent(new Event("focus"))
    field.value = %s
    field.dispatchEvent(new KeyboardEvent("keyup"))
})()"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("width", type=int)
    parser.add_argument("pages", nargs="+")
    parser.add_argument("--search")
    given = parser.parse_args()
    app = QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.resize(given.width, 900)
    view.show()
    left = list(given.pages)

    def following() -> None:
        """The next page, or the end."""
        if left:
            view.load(QUrl.fromLocalFile(os.path.abspath(left.pop(0))))
        else:
            app.quit()

    def measured(facts: str, patience: int = 40) -> None:
        """Print what the page answered; a search has ten seconds to find something."""
        if given.search and patience and not json.loads(facts)["found"]:
            QTimer.singleShot(250, lambda: view.page().runJavaScript(FACTS, lambda one: measured(one, patience - 1)))
            return
        sys.stdout.write(f"{facts}\n")
        following()

    def asked() -> None:
        """What the page has to answer."""
        if given.search:
            view.page().runJavaScript(SEARCH % json.dumps(given.search))
        view.page().runJavaScript(FACTS, measured)

    # Pictures and boxes around tables need a moment to have their places.
    view.loadFinished.connect(lambda _: QTimer.singleShot(500, asked))
    following()
    sys.exit(app.exec())
