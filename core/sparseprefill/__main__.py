"""``python -m sparseprefill``: the command line. It is a host, which core does not import, so it is started by name."""

from __future__ import annotations

from runpy import run_module

run_module("sparseprefill.adapters.cli", run_name="__main__")
