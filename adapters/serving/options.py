"""The server's table `sparseprefill`, checked before the engine serves anything."""

from __future__ import annotations

import threading
from collections.abc import Container, Mapping
from typing import Any

from attrs import asdict, field, fields, frozen

from sparseprefill.breakeven.gate import AUTO, GateChoice
from sparseprefill.config import KEYS, as_data, check_keys, from_config
from sparseprefill.errors import ParameterError, UnknownMethodError, nearest, printed
from sparseprefill.pipeline import Pipeline
from sparseprefill.registry import Registry
from sparseprefill.route import Route
from sparseprefill.structure import structure, table
from sparseprefill.validate import flag, maybe, number, one_of, whole

from ..session.options import PREFILL_ROWS, HostOptions
from .wishes import OFF, SWITCH, mistyped

TABLE = SWITCH
NO_GATE = 'set "gate": false'
"""The words of a server's table for no gate, for messages."""
MIN_QUERY = 128
"""Query rows from which a chunk of a prompt is worth a mask: those of one tile."""


@frozen
class Source:
    """The table (or the path of a file) that `from_config` makes a pipeline of. at: where it stands, for messages."""

    pipeline: Mapping[str, Any] | str
    at: str = TABLE

    @property
    def gate(self) -> GateChoice:
        """The gate that the pipeline does not bring along: by default the break-even table for the device."""
        return None if isinstance(self.pipeline, str) or "gate" in self.pipeline else AUTO

    def build(self, registry: Registry | None = None) -> Pipeline | Route:
        """The pipeline. registry: where methods are looked up, by default all that are installed.

        ParameterError or UnknownMethodError name the key at fault.
        """
        if not isinstance(self.pipeline, str):
            with as_data():
                return from_config(self.pipeline, registry=registry, at=self.at)
        try:
            return from_config(self.pipeline, registry=registry)
        except (ParameterError, UnknownMethodError) as error:
            raise type(error)(f"{self.at}.config: {error}") from error


@frozen(kw_only=True)
class Settings(HostOptions):
    """The adapter's own options, beside those of every host (`HostOptions`).

    chunk: tokens of a prompt between two cuts into chunks, whatever else is in a batch; None to cut as the server does.
    copies: whether kernels may copy K and V of a layer out of their pages where that is faster.
    log_interval: seconds between two summary lines in the log; 0 for none, None for the server's own interval.
    min_query: query rows from which a request's chunk runs sparse. warm_up: compile the kernels at start; None to do as
    the server does. log_level: of the library's messages in the server's log.
    """

    chunk: int | None = field(default=None, validator=maybe(whole(2)))
    copies: bool = field(default=True, validator=flag())
    log_interval: float | None = field(default=None, validator=maybe(number(0, threading.TIMEOUT_MAX)))
    min_query: int = field(default=MIN_QUERY, validator=PREFILL_ROWS)
    warm_up: bool | None = field(default=None, validator=maybe(flag()))
    log_level: str = field(default="info", validator=one_of("debug", "info", "warning", "error"))


OWN = tuple(one.name for one in fields(Settings))


@frozen(kw_only=True)
class Options(Settings):
    """The adapter's own options, and where its pipelines come from.

    source: of the pipeline for requests that ask for nothing. profiles: the same by name, for those that ask for one.
    """

    source: Source
    profiles: Mapping[str, Source] = field(factory=dict)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Sources of all pipelines: first of that for requests that ask for nothing."""
        return self.source, *self.profiles.values()

    def build(self, registry: Registry | None = None) -> Pipeline | Route:
        """The pipeline, or the route by length, that these options ask for: see `Source.build`."""
        return self.source.build(registry)

    def unknown(self, asked: object) -> str | None:
        """Reason for which a request that asks for this is refused, or None."""
        known = (OFF, *self.profiles)
        if isinstance(asked, str) and asked in known:
            return None
        return f"{TABLE} is {printed(asked)}, which is not a profile of this engine{nearest(str(asked), known)}"

    def refusal(self, extra: Mapping[str, object]) -> str | None:
        """Reason for which a request with these extra arguments is refused, or None."""
        why = mistyped(extra)
        return self.unknown(extra[SWITCH]) if why is None and SWITCH in extra else why


def read_table(given: object, without: Container[str] = ()) -> Options:
    """The options in a server's table; ParameterError names the key at fault.

    without: of our own keys those that mean nothing to this server.
    """
    own, facts = [key for key in OWN if key not in without], table(given, TABLE)
    check_keys(facts, (*own, "config", "profiles", *KEYS), TABLE)
    found: Settings = structure(Settings, {key: facts[key] for key in own if key in facts}, TABLE, short=True)
    found.check(TABLE)
    profiles = _profiles(facts.get("profiles", {}))
    return Options(source=_source(facts, TABLE), profiles=profiles, **asdict(found, recurse=False))


def _source(facts: Mapping[str, Any], at: str) -> Source:
    inline = {key: value for key, value in facts.items() if key in KEYS}
    if "config" not in facts:
        return Source(inline, at)
    if inline:
        raise ParameterError(f"{at}.config names a file that holds the pipeline: leave out {', '.join(inline)}")
    path = facts["config"]
    if not isinstance(path, str) or not path:
        raise ParameterError(f"{at}.config is {path!r}: give the path of a .toml or .json file")
    return Source(path, at)


def _profiles(value: object) -> Mapping[str, Source]:
    here = f"{TABLE}.profiles"
    if not isinstance(value, Mapping):
        raise ParameterError(f"{here} is {value!r}: give a table of names, each with a table as {TABLE} itself")
    found: dict[str, Source] = {}
    for name, given in value.items():
        if not isinstance(name, str) or not name or name == OFF:
            raise ParameterError(f"{here} has the name {name!r}: use another name, which requests will pass")
        at = f"{here}.{name}"
        facts = table(given, at)
        for key in facts.keys() & {*OWN, "profiles"}:
            raise ParameterError(f"{at}.{key} applies to all requests: give it as {TABLE}.{key}")
        check_keys(facts, ("config", *KEYS), at)
        found[name] = _source(facts, at)
    return found
