"""Stores of keys beside an engine's own cache that may not keep apart what requests ask for.

An engine's cache does, by the request's salt (`wishes.salt`). A store that knows a prompt by its tokens alone hands the
keys of one profile to a request for another. So with such a store nothing may be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparseprefill.errors import printed

from .wishes import OFF, SWITCH, asks


def objection(extra: Mapping[str, object], stores: Sequence[str], remedy: str) -> str | None:
    """Reason for refusing a request with these extra arguments, or None. stores: those that are not known to keep
    requests apart. remedy: which stores do."""
    if not stores or not asks(extra):
        return None
    asked = printed(extra.get(SWITCH))
    return (
        f"{SWITCH} is {asked}, but {_named(stores)} not known to keep apart what requests ask for, so this one might "
        f"read keys that another left there: leave {SWITCH} out, or {remedy}"
    )


def warning(stores: Sequence[str], remedy: str) -> str | None:
    """The words on such stores when a server starts, or None where there are none."""
    if not stores:
        return None
    return (
        f"{_named(stores)} not known to keep apart what requests ask for: those that ask for {OFF!r} or a profile are "
        f"refused; {remedy} to serve them"
    )


def _named(stores: Sequence[str]) -> str:
    return f"{', '.join(stores)} {'is' if len(stores) == 1 else 'are'}"
