"""Prints how a page stands in a real browser: ``python measure.py PAGE WIDTH``. Needs PyQt6-WebEngine, a Chromium."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys

os.environ["QT_QPA_PLATFORM"] = "offscreen"
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--no-sandbox --disable-gpu"

from PyQt6.QtCore import QTimer, QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

FACTS = """JSON.stringify({
    width: innerWidth,
    needed: document.documentElement.scrollWidth,
    images: document.images.length,
    unnamed: [...document.images].filter(one => !one.alt).length,
    broken: [...document.images].filter(one => !one.naturalWidth).length,
    outside: [...document.querySelectorAll("body *")].filter(one => one.getBoundingClientRect().right > innerWidth + 1)
        .map(one => one.tagName),
})"""

if __name__ == "__main__":
    app = QApplication(sys.argv)
    view = QWebEngineView()
    view.resize(int(sys.argv[2]), 900)
    view.show()

    def measured(facts: str) -> None:
        """Print what the page answered, and end."""
        sys.stdout.write(f"{facts}\n")
        app.quit()

    def loaded(_: bool) -> None:
        """Ask once pictures have their places."""
        QTimer.singleShot(500, lambda: view.page().runJavaScript(FACTS, measured))

    view.loadFinished.connect(loaded)
    view.load(QUrl.fromLocalFile(os.path.abspath(sys.argv[1])))
    sys.exit(app.exec())
