"""Start of the `sparseprefill` command: checks that its extra is installed, then hands over to the commands."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from sparseprefill.errors import extra

NEEDED = ("typer", "rich", "matplotlib", "jinja2")
LIGHT = {"vllm-report": "vllm", "vllm-check": "vllm", "sglang-report": "sglang", "replay": "cli"}
"""Commands for servers, which draw nothing, and the extra that each needs."""


def main() -> None:
    """Run the command line; without its extra, say how to install it and exit with 1."""
    light = sys.argv[1:2] and sys.argv[1] in LIGHT
    lacking = [name for name in (NEEDED[:2] if light else NEEDED) if find_spec(name) is None]
    if lacking:
        wanted = LIGHT[sys.argv[1]] if light else "cli"
        sys.exit(f"error: the command line needs {', '.join(lacking)}: {extra(wanted)}")
    from .commands import app

    app()
