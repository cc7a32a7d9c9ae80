"""The one hook. A plugin is a module (or object) with an implementation of it, named in the entry-point group
``sparseprefill``:

    from sparseprefill import Method, hookimpl

    @hookimpl
    def sparseprefill_methods():
        return [Method(name="my-method", ...)]
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from sparseprefill.method import Method

PROJECT = "sparseprefill"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def sparseprefill_methods() -> Iterable[Method]:  # type: ignore[empty-body]
    """The methods that this plugin offers. Pure and cheap: import stages and kernels in `Method.build`."""
