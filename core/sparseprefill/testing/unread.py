"""Parameters of a method that nothing reads, so that whatever a user passes changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attrs import NOTHING, fields

from sparseprefill.call import AttentionCall
from sparseprefill.errors import MaskError, StageError, printed
from sparseprefill.memory import Memory
from sparseprefill.method import Method
from sparseprefill.pipeline import Pipeline
from sparseprefill.stages import Answer, Guard
from sparseprefill.testing.cases import describe


def unread(method: Method, calls: Iterable[AttentionCall], parameters: Mapping[str, Any]) -> list[str]:
    """Names of parameters that neither `build` nor these calls of its pipeline read.

    Tried with `parameters`, at the defaults, at `Method.small` and at each value that `fit` would try; once read is
    enough, and later calls run only while something is left. AssertionError where a call fails.
    """
    values = ({key: value} for key, several in method.search.items() for value in several)
    left = {one.name: str(one.alias) for one in fields(method.config) if one.init}
    needed = {str(one.alias) for one in fields(method.config) if one.default is NOTHING}
    known = {**method.small, **parameters}
    base = {**{key: value for key, value in known.items() if key in needed}, **method.stand_in}
    for call in calls:
        for given in (parameters, {}, method.small, *values):
            if not left:
                return []
            for name in _read(method, {**base, **given}, call):
                left.pop(name, None)
    return list(left.values())


def _read(method: Method, given: Mapping[str, Any], call: AttentionCall) -> set[str]:
    """Names that are read of a config, by whoever holds it, once it is made."""
    own, seen = method.config, set[str]()

    def look(config: Any, name: str) -> Any:
        seen.add(name)
        return object.__getattribute__(config, name)

    watched = type(own.__name__, (own,), {"__getattribute__": look, "__module__": own.__module__, "__slots__": ()})
    config = method.configure(given)
    object.__setattr__(config, "__class__", watched)  # in place: converters take what users give, not what they made
    try:
        pipeline: Pipeline = Guard(method, method.name).ask("build", Answer.of(Pipeline), config)
        if not pipeline.unsupported(call):
            pipeline.run(call, Memory())
    except (MaskError, StageError) as error:
        at = ", ".join(f"{name}={printed(value)}" for name, value in given.items()) or "its defaults"
        raise AssertionError(f"{method.name}: with {at} it fails on {describe(call)}: {error}") from error
    return seen
