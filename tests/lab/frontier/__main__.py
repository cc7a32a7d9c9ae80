"""What settings cost and keep on a model, side by side: ``python -m lab.frontier`` (from tests/)."""

from __future__ import annotations

from .app import app

if __name__ == "__main__":
    app()
