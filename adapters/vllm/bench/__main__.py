"""``python -m sparseprefill.adapters.vllm.bench equal|ttft|load|decode|answers|pages|requests``."""

from __future__ import annotations

import sys
from importlib.util import find_spec

NEEDED = ("typer", "rich")


def main() -> None:
    """Run a command; without the extra ``cli``, say how to install it and exit with 1."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if lacking:
        sys.exit(f'error: the benchmark needs {", ".join(lacking)}: pip install "sparseprefill[cli]"')
    from .app import app

    app()


if __name__ == "__main__":
    main()
