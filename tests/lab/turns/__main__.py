"""What a sparse prefill does to several turns on a real model: ``python -m lab.turns`` (from tests/)."""

from __future__ import annotations

from .app import app

if __name__ == "__main__":
    app()
