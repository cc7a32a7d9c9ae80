"""Parameters of a method that nothing reads, so that whatever a user passes changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import NOTHING, fields

from sparseprefill.memory import Memory
from sparseprefill.method import Method
from sparseprefill.testing.cases import standard_calls


def unread(method: Method) -> list[str]:
    """Names of parameters that neither `build` nor a call of its pipeline reads.

    Tried at the defaults, at `Method.small` and at each value that `fit` would try; once read is enough.
    """
    values = ({key: value} for key, several in method.search.items() for value in several)
    left = {one.name: str(one.alias) for one in fields(method.config) if one.init}
    needed = {str(one.alias) for one in fields(method.config) if one.default is NOTHING}
    base = {**{key: value for key, value in method.small.items() if key in needed}, **method.stand_in}
    for given in ({}, method.small, *values):
        if not left:
            break
        for name in _read(method, {**base, **given}):
            left.pop(name, None)
    return list(left.values())


def _read(method: Method, given: Mapping[str, Any]) -> set[str]:
    """Names that are read of a config, by whoever holds it, from its making on."""
    own, seen, made = method.config, set[str](), False

    def look(config: Any, name: str) -> Any:
        if made:
            seen.add(name)
        return object.__getattribute__(config, name)

    plain = method.configure(given)
    watched = type(own.__name__, (own,), {"__getattribute__": look, "__module__": own.__module__})
    config = watched(**{str(one.alias): getattr(plain, one.name) for one in fields(own) if one.init})
    made = True
    pipeline = method.build(config)
    call = next(iter(standard_calls("cpu", torch.float32)))
    if not pipeline.unsupported(call):
        pipeline.run(call, Memory())
    return seen
