"""What ``additional_config["sparseprefill"]`` may hold, checked before the engine serves anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from sparseprefill.breakeven.gate import AUTO, GateChoice
from sparseprefill.config import KEYS, from_config
from sparseprefill.errors import ParameterError, nearest
from sparseprefill.pipeline import MOST_ROWS, Pipeline
from sparseprefill.registry import Registry
from sparseprefill.route import Route

from ..session.session import TAIL
from ..session.watch import RECALL_EVERY, check_every, check_strict

TABLE = "sparseprefill"
OWN = (
    *("config", "layers", "log_level", "measure", "min_query"),
    *("recall_every", "strict", "strict_recall", "tail", "warm_up"),
)
LEVELS = ("debug", "info", "warning", "error")
MIN_QUERY = 128
"""Query rows from which a chunk of a prompt is worth a mask: those of one tile."""


@frozen(kw_only=True)
class Options:
    """The adapter's own options, and the table (or the path of a file) that `from_config` makes a pipeline of.

    min_query: query rows from which a request's chunk runs sparse. layers: indices to run sparse; None for all.
    strict: refuse to start where a layer would stay dense. measure: count the density of every call at once.
    tail: last query rows of a prompt that get every key; 0 for none.
    recall_every: of how many prefills the recall of one is measured; 0 for none. strict_recall: below which a measured
    call is counted, and the first is logged as a warning; None for neither.
    warm_up: compile the kernels at start; None to do as vLLM does with its own. log_level: of the library's messages in
    vLLM's log.
    """

    pipeline: Mapping[str, Any] | str
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
        """The gate that the pipeline does not bring along: by default the break-even table for the device."""
        return None if isinstance(self.pipeline, str) or "gate" in self.pipeline else AUTO

    def build(self, registry: Registry | None = None) -> Pipeline | Route:
        """The pipeline. registry: where methods are looked up, by default all that are installed.

        ParameterError or UnknownMethodError name the key at fault.
        """
        at = "" if isinstance(self.pipeline, str) else TABLE
        return from_config(self.pipeline, registry=registry, at=at)


def parse(additional: object) -> Options:
    """The options in vLLM's ``additional_config``; ParameterError names the key at fault."""
    table = additional.get(TABLE) if isinstance(additional, Mapping) else None
    if table is None:
        example = '--additional-config \'{"sparseprefill": {"method": "streaming"}}\''
        raise ParameterError(f"the backend CUSTOM is selected, but no method: add {example}")
    if not isinstance(table, Mapping):
        raise ParameterError(f"{TABLE} is {table!r}: give a table of keys and values")
    for key in table:
        if key not in (*OWN, *KEYS):
            raise ParameterError(f"{TABLE}.{key} is unknown{nearest(str(key), (*OWN, *KEYS))}")
    level = table.get("log_level", "info")
    if level not in LEVELS:
        raise ParameterError(f"{TABLE}.log_level is {level!r}: use {', '.join(LEVELS)}")
    every = check_every(f"{TABLE}.recall_every", table.get("recall_every", RECALL_EVERY))
    return Options(
        pipeline=_source(table),
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


def _source(table: Mapping[str, Any]) -> Mapping[str, Any] | str:
    inline = {key: value for key, value in table.items() if key in KEYS}
    if "config" not in table:
        return inline
    if inline:
        raise ParameterError(f"{TABLE}.config names a file that holds the pipeline: leave out {', '.join(inline)}")
    path = table["config"]
    if not isinstance(path, str) or not path:
        raise ParameterError(f"{TABLE}.config is {path!r}: give the path of a .toml or .json file")
    return path


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
