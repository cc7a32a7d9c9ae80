"""Sessions by their options' names alone."""

from __future__ import annotations

from typing import Any

from attrs import fields_dict
from sparseprefill.adapters.session.options import HostOptions
from sparseprefill.adapters.session.session import Session


def session(pipeline: Any, **given: Any) -> Session:
    """A session, with fields of `HostOptions` among its own arguments."""
    options = {name: given.pop(name) for name in fields_dict(HostOptions) if name in given}
    return Session(pipeline, HostOptions(**options), **given)
