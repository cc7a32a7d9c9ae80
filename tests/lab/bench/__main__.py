"""The tables of docs/benchmarks.md and docs/benchmarks-more.md: ``python -m lab.bench`` (from tests/)."""

from __future__ import annotations

from .app import app

if __name__ == "__main__":
    app()
