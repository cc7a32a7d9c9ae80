"""``python -m sparseprefill.adapters.cli``, and through core's own file of this name ``python -m sparseprefill``."""

from __future__ import annotations

from .app import main

main()
