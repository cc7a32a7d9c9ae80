"""``python -m sparseprefill.adapters.huggingface TOOL ...``: run a tool in which the name ``sparseprefill`` is known.

TOOL: a command that a package installs, such as ``lm_eval``, a module, or a script. The reports of the models that were
attached by the name go to the standard error when it ends.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from runpy import run_module, run_path

from sparseprefill.errors import SparsePrefillError

from .api import register
from .handle import Handle


def main() -> None:
    """Run the tool that the arguments name, with the rest of them."""
    _, *sys.argv = sys.argv
    if not sys.argv or sys.argv[0].startswith("-"):
        sys.exit("usage: python -m sparseprefill.adapters.huggingface TOOL [its arguments]")
    from .by_name import TOLD

    handles: list[Handle] = []
    TOLD.append(handles.append)
    try:
        register()
    except SparsePrefillError as error:
        sys.exit(f"error: {error}")
    try:
        _run(sys.argv[0])
    finally:
        for handle in handles:
            sys.stderr.write(f"\n{handle.report()}\n")
        if not handles:
            sys.stderr.write("sparseprefill: no model ran under attn_implementation=sparseprefill\n")


def _run(tool: str) -> None:
    found = list(entry_points(group="console_scripts", name=tool))
    if found:
        sys.exit(found[0].load()())
    if tool.endswith(".py"):
        run_path(tool, run_name="__main__")
    else:
        run_module(tool, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
