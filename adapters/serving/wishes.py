"""Wishes of a request, in the arguments that its server passes on."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from attrs import frozen

from sparseprefill.errors import printed

SWITCH = "sparseprefill"
"""The argument by which a request asks for a profile."""
OFF = "off"
"""The wish of a request for the server's own attention."""
ALIKE = 0.8
"""Part of `SWITCH` that another argument's name may share before it is taken for a mistyped one."""
MISTYPED = f"the request has an argument that looks like {SWITCH} and is another"
LONGEST, FORBIDDEN = 128, frozenset("@/\\\0")
"""Characters of a salt, and those that it must not have: stores write salts into keys and names of files."""
EMPTY = f"the request asks for nothing by name ({SWITCH}: null)"


@frozen
class Unknown:
    """In the place of what a request asks for, where that cannot be told: it runs dense.

    why: for report and metrics, without the request's own words. detail: for the log, with them.
    """

    why: str
    detail: str = ""


def wish(extra: Mapping[str, object] | None) -> object:
    """The wish in a request's extra arguments: None for nothing, Unknown where it cannot be made out."""
    if not extra:
        return None
    why = mistyped(extra)
    if why is not None:
        return Unknown(MISTYPED, why)
    return Unknown(EMPTY) if SWITCH in extra and extra[SWITCH] is None else extra.get(SWITCH)


def asks(extra: Mapping[str, object]) -> bool:
    """True if extra arguments ask for something, or try to."""
    return SWITCH in extra or mistyped(extra) is not None


def mistyped(extra: Iterable[str], what: str = "argument of a request") -> str | None:
    """Reason for refusing names one of which looks like `SWITCH` and is another, or None. what: they are names of."""
    found = next((key for key in extra if key != SWITCH and _resembles(str(key))), None)
    return None if found is None else f"{printed(found)} is no {what}; did you mean {SWITCH!r}?"


@functools.lru_cache(256)
def _resembles(key: str) -> bool:
    letters = re.sub("[^a-z]", "", key.lower())
    return letters.startswith(SWITCH) or bool(get_close_matches(letters, [SWITCH], cutoff=ALIKE))


def salt(extra: Mapping[str, object], own: str | None) -> str | None:
    """Salt that keeps a request's keys apart in a prefix cache: its own salt, and what it asks for; so that no other
    request can have the same. It is one that any store takes."""
    if asks(extra):
        made = f"{SWITCH}={extra.get(SWITCH)!r};{own or ''}"
    elif own and own.startswith(SWITCH):
        made = f"{SWITCH};{own}"
    else:
        return own
    if len(made) <= LONGEST and FORBIDDEN.isdisjoint(made):
        return made
    return f"{SWITCH}:{hashlib.sha256(made.encode()).hexdigest()}"
