"""The hooks. A plugin is a module (or object) that implements one or more of them, named in the entry-point group
``sparseprefill``:

    from sparseprefill import Method, hookimpl

    @hookimpl
    def sparseprefill_methods():
        return [Method(name="my-method", ...)]

    @hookimpl
    def sparseprefill_refiners():
        return {"my-refiner": MyRefiner}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from sparseprefill.method import Method
    from sparseprefill.stages import Corrector, MaskRefiner

PROJECT = "sparseprefill"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def sparseprefill_methods() -> Iterable[Method]:  # type: ignore[empty-body]
    """The methods that this plugin offers. Pure and cheap: import stages and kernels in `Method.build`."""


@hookspec
def sparseprefill_refiners() -> Mapping[str, type[MaskRefiner]]:  # type: ignore[empty-body]
    """The refiners that this plugin offers, by the name that configurations give them.

    Each is an attrs class whose fields are its parameters; the first line of its docstring is its summary. The classes
    are imported when this is called: import kernels where they are used.
    """


@hookspec
def sparseprefill_correctors() -> Mapping[str, type[Corrector]]:  # type: ignore[empty-body]
    """The correctors that this plugin offers, as `sparseprefill_refiners` does."""
