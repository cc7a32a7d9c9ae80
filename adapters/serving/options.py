"""What a server's table `sparseprefill` may hold, checked before the engine serves anything."""

from __future__ import annotations

import threading
from collections.abc import Container, Mapping
from typing import Any

from attrs import field, frozen

from sparseprefill.breakeven.gate import AUTO, GateChoice
from sparseprefill.config import KEYS, from_config
from sparseprefill.errors import ParameterError, nearest, printed
from sparseprefill.pipeline import Pipeline
from sparseprefill.registry import Registry
from sparseprefill.route import Route
from sparseprefill.validate import MOST_ROWS

from ..session.defaults import TAIL
from ..session.watch import RECALL_EVERY, check_every, check_strict
from .wishes import OFF, SWITCH

TABLE = SWITCH
OWN = (
    *("chunk", "config", "copies", "layers", "log_interval", "log_level", "measure", "min_query", "profiles"),
    *("recall_every", "strict", "strict_recall", "tail", "warm_up"),
)
LEVELS = ("debug", "info", "warning", "error")
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
        return from_config(self.pipeline, registry=registry, at="" if isinstance(self.pipeline, str) else self.at)


@frozen(kw_only=True)
class Options:
    """The adapter's own options, and where its pipelines come from.

    source: of the pipeline for requests that ask for nothing. profiles: the same by name, for those that ask for one.
    chunk: tokens of a prompt between two cuts into chunks, whatever else is in a batch; None to cut as the server does.
    copies: whether kernels may copy K and V of a layer out of their pages where that is faster.
    log_interval: seconds between two summary lines in the log; 0 for none, None for the server's own interval.
    min_query: query rows from which a request's chunk runs sparse. layers: indices to run sparse; None for all.
    strict: refuse to start where a layer would stay dense. measure: count the density of every call at once.
    tail: last query rows of a prompt that get every key; 0 for none.
    recall_every: of how many prefills the recall of one is measured; 0 for none. strict_recall: below which a measured
    call is counted, and the first is logged as a warning; None for neither.
    warm_up: compile the kernels at start; None to do as the server
    does. log_level: of the library's messages in the server's log.
    """

    source: Source
    profiles: Mapping[str, Source] = field(factory=dict)
    chunk: int | None = None
    copies: bool = True
    log_interval: float | None = None
    min_query: int = MIN_QUERY
    layers: tuple[int, ...] | None = None
    strict: bool = False
    measure: bool = False
    tail: int = TAIL
    recall_every: int = RECALL_EVERY
    strict_recall: float | None = None
    warm_up: bool | None = None
    log_level: str = field(default="info")

    @property
    def gate(self) -> GateChoice:
        """What keeps prompts dense that are too short to gain: see `Source.gate`."""
        return self.source.gate

    def build(self, registry: Registry | None = None) -> Pipeline | Route:
        """The pipeline, or the route by length, that these options ask for: see `Source.build`."""
        return self.source.build(registry)

    def unknown(self, asked: object) -> str | None:
        """Why a request that asks for this is refused, or None."""
        known = (OFF, *self.profiles)
        if isinstance(asked, str) and asked in known:
            return None
        return f"{TABLE} is {printed(asked)}, which is not a profile of this engine{nearest(str(asked), known)}"


def read_table(table: object, without: Container[str] = ()) -> Options:
    """The options in a server's table; ParameterError names the key at fault.

    without: of our own keys those that mean nothing to this server.
    """
    own = [key for key in OWN if key not in without]
    if not isinstance(table, Mapping):
        raise ParameterError(f"{TABLE} is {table!r}: give a table of keys and values")
    for key in table:
        if key not in (*own, *KEYS):
            raise ParameterError(f"{TABLE}.{key} is unknown{nearest(str(key), (*own, *KEYS))}")
    level = table.get("log_level", "info")
    if level not in LEVELS:
        raise ParameterError(f"{TABLE}.log_level is {level!r}: use {', '.join(LEVELS)}")
    every = check_every(f"{TABLE}.recall_every", table.get("recall_every", RECALL_EVERY))
    return Options(
        source=_source(table, TABLE),
        profiles=_profiles(table.get("profiles", {})),
        chunk=_chunk(table.get("chunk")),
        copies=_switch("copies", table.get("copies", True)),
        log_interval=_seconds(table.get("log_interval")),
        min_query=_rows(table.get("min_query", MIN_QUERY)),
        layers=_layers(table.get("layers")),
        strict=_switch("strict", table.get("strict", False)),
        measure=_switch("measure", table.get("measure", False)),
        tail=_tail(table.get("tail", TAIL)),
        recall_every=every,
        strict_recall=check_strict(
            f"{TABLE}.strict_recall", table.get("strict_recall"), every, f"{TABLE}.recall_every"
        ),
        warm_up=_switch("warm_up", table["warm_up"]) if "warm_up" in table else None,
        log_level=level,
    )


def _source(table: Mapping[str, Any], at: str) -> Source:
    inline = {key: value for key, value in table.items() if key in KEYS}
    if "config" not in table:
        return Source(inline, at)
    if inline:
        raise ParameterError(f"{at}.config names a file that holds the pipeline: leave out {', '.join(inline)}")
    path = table["config"]
    if not isinstance(path, str) or not path:
        raise ParameterError(f"{at}.config is {path!r}: give the path of a .toml or .json file")
    return Source(path, at)


def _profiles(value: object) -> Mapping[str, Source]:
    here = f"{TABLE}.profiles"
    if not isinstance(value, Mapping):
        raise ParameterError(f"{here} is {value!r}: give a table of names, each with a table as {TABLE} itself")
    found: dict[str, Source] = {}
    for name, table in value.items():
        if not isinstance(name, str) or not name or name == OFF:
            raise ParameterError(f"{here} has the name {name!r}: use another name, which requests will pass")
        at = f"{here}.{name}"
        if not isinstance(table, Mapping):
            raise ParameterError(f"{at} is {table!r}: give a table of keys and values")
        for key in table:
            if key in OWN and key != "config":
                raise ParameterError(f"{at}.{key} applies to all requests: give it as {TABLE}.{key}")
            if key not in ("config", *KEYS):
                raise ParameterError(f"{at}.{key} is unknown{nearest(str(key), ('config', *KEYS))}")
        found[name] = _source(table, at)
    return found


def _chunk(value: object) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 2):
        raise ParameterError(f"{TABLE}.chunk is {value!r}: pass a number of tokens >= 2")
    return value


def _seconds(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < threading.TIMEOUT_MAX:
        raise ParameterError(f"{TABLE}.log_interval is {value!r}: pass seconds, or 0 for no summary")
    return float(value)


def _rows(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 2:
        raise ParameterError(f"{TABLE}.min_query is {value!r}: pass an integer >= 2, so that decoding stays dense")
    return value


def _tail(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_ROWS:
        raise ParameterError(f"{TABLE}.tail is {value!r}: pass a number of query rows from 0 to {MOST_ROWS}")
    return value


def _layers(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    good = isinstance(value, list | tuple) and all(isinstance(x, int) and not isinstance(x, bool) for x in value)
    if not good or not isinstance(value, list | tuple):
        raise ParameterError(f"{TABLE}.layers is {value!r}: give a list of layer indices")
    return tuple(value)


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(f"{TABLE}.{name} is {value!r}: use true or false")
    return value
