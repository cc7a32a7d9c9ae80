"""The environment variables by which servers load some of their plugins alone."""

from __future__ import annotations

from collections.abc import Collection

from .wishes import SWITCH


def left_out(variable: str, named: Collection[str] | None) -> str | None:
    """Reason for which a server does not load this library, with the remedy, or None.

    variable: what names the plugins that are loaded. named: those of its value, as the server reads it; None where it
    loads all.
    """
    if named is None or SWITCH in named:
        return None
    right = ",".join([*(name.strip() for name in named if name.strip() not in ("", SWITCH)), SWITCH])
    return f"{variable} is {','.join(named)!r}, which leaves {SWITCH} out: set {variable}={right}, or unset it"
