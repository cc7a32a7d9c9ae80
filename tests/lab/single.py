"""The one contender of tools that look at a single method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparseprefill.adapters.cli import options
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.evaluation.outcome import Contender

from sparseprefill.registry import default_registry


def single(
    method: Sequence[str] | None,
    settings: Sequence[str] | None,
    model: str | None,
    tail: int,
    configs: Sequence[Path] | None,
) -> Contender:
    """The method or configuration that is named, or rowmax; CommandError for several."""
    names = method or (() if configs else ["rowmax"])
    found = options.contenders(default_registry(), names, settings or (), model, tail, configs=configs or ())
    if len(found) != 1:
        raise CommandError(f"--method {', '.join(one.label for one in found)}: pass one method")
    return found[0]
