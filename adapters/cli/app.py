"""Where the `sparseprefill` command starts: checks that its extra is installed, then hands over to the commands."""

from __future__ import annotations

import sys
from importlib.util import find_spec

NEEDED = ("typer", "rich", "matplotlib", "jinja2")


def main() -> None:
    """Run the command line; without its extra, say how to install it and exit with 1."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        sys.exit(f'error: the command line needs {", ".join(lacking)}: pip install "sparseprefill[cli]"')
    from .commands import app

    app()
