"""Our executor beside other people's kernels: ``python -m lab.peers`` (from tests/)."""

from __future__ import annotations

from .app import app

if __name__ == "__main__":
    app()
