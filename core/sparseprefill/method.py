"""The offer of a plugin: the hooks, and Method, a named pipeline with validated parameters.

A plugin is a module (or object) that implements one or more hooks, named in the entry-point group ``sparseprefill``:

    from sparseprefill import Method, hookimpl

    @hookimpl
    def sparseprefill_methods():
        return [Method(name="my-method", ...)]

    @hookimpl
    def sparseprefill_refiners():
        return {"my-refiner": MyRefiner}

    @hookimpl
    def sparseprefill_kernels():
        return [Family(name="my-kernel", ...)]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pluggy
from attrs import Attribute, field, fields, frozen, has

from sparseprefill.errors import ParameterError, SparsePrefillError, nearest, printable, printed, told
from sparseprefill.profiles.table import NeededTable
from sparseprefill.validate import NAME, fitting, is_name

# Whoever lists methods, such as `sparseprefill --help`, does not wait for torch: it is imported where one is built.
if TYPE_CHECKING:
    from sparseprefill.kernels.family.record import Family
    from sparseprefill.pipeline import Pipeline
    from sparseprefill.stages import Corrector, MaskRefiner

PROJECT = "sparseprefill"
"""The entry-point group of plugins, and what the names of hooks begin with."""
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
FLOOR = "recall"
"""A parameter that every method has besides its own: see `Pipeline.with_recall`."""


@frozen
class Later:
    """A function of a module that is imported when it is called: so whoever lists methods does not wait for torch."""

    module: str
    function: str = "pipeline"

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function."""
        return getattr(import_module(self.module), self.function)(*arguments, **named)


class _Table(Mapping[str, Any]):
    """A table that nobody writes to, and that can be copied, pickled and hashed as any other parameter."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items))  # values may have no hash

    def __repr__(self) -> str:
        return repr(self._items)


def method_table(value: Any) -> Any:
    """The converter of a parameter that takes another method (`a_method`): nobody may write to its table."""
    return _Table(value) if isinstance(value, Mapping) else value


def a_method(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """method name, table, or none"""
    if value is None or isinstance(value, str | Mapping):
        return
    from sparseprefill.pipeline import Runner
    from sparseprefill.stages import PatternEstimator, missing

    if isinstance(value, type) or (not isinstance(value, Runner) and missing(value, PatternEstimator)):
        wanted = "a method's name, a table as of sparseprefill.from_config, a Pipeline, an estimator, or None"
        raise ParameterError(f"{attribute.name} is {printed(value)}: pass {wanted}")


def _check_config(_: object, __: object, value: Any) -> None:
    if not (isinstance(value, type) and has(value)):
        raise ParameterError(
            f"Method.config is {printed(value)}: pass an attrs class (frozen, kw_only) of the parameters"
        )
    if FLOOR in (one.alias for one in fields(value)):
        raise ParameterError(f"Method.config has the field {FLOOR}, the name of every method's recall floor: rename it")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _check_full(method: Method, attribute: Attribute[Any], value: Any) -> None:
    if value is not None:
        _check_parameters(method, attribute, value)


def _check_parameters(method: Method, attribute: Attribute[Any], value: Any) -> None:
    """A table of the method's own parameters, and of the floor that every method has."""
    name = f"Method.{attribute.name}"
    if not isinstance(value, Mapping):
        raise ParameterError(f"{name} is {printed(value)}: pass a table of parameters by name, such as {{'block': 64}}")
    known = [str(one.alias) for one in fields(method.config) if one.init]
    for key in value:
        if key not in (*known, FLOOR):
            raise ParameterError(
                f"{name} names {printed(key)}, which {method.config.__name__} does not have{nearest(told(key), known)}"
            )


def _check_search(method: Method, attribute: Attribute[Any], value: Any) -> None:
    _check_parameters(method, attribute, value)
    for key, values in value.items():
        if not isinstance(values, Sequence) or isinstance(values, str | bytes):
            raise ParameterError(f"Method.search[{key!r}] is {printed(values)}: pass a list of values to try")


def _check_table(method: Method, _: object, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, NeededTable):
        raise ParameterError(f"Method.table is {printed(value)}: pass a NeededTable, or None")
    if value.parameter not in (one.alias for one in fields(method.config)):
        raise ParameterError(f"Method.table is of {value.parameter!r}, which {method.config.__name__} does not have")
    if not NAME.fullmatch(value.command):
        raise ParameterError(
            f"Method.table.command is {printed(value.command)}: use lower-case words joined by hyphens"
        )


@frozen(kw_only=True)
class Method:
    """A method, as a plugin registers it.

    name: how users ask for it. summary: one line. paper: title and section, or a link; empty if there is none.
    config: attrs class of the parameters, with defaults and validators. build: makes the Pipeline of a config; stages
    and kernels are imported there, so that listing methods stays cheap (see `Later`).
    full: parameters at which the mask holds every causal key, for the contract check "full mask == dense"; {} where the
    defaults do, None where none are known, and the law is not tried.
    small: parameters that make the method sparse on a few hundred tokens, for contract checks.
    search: values to try of each parameter that `sparseprefill fit` searches; empty if there is nothing to search.
    table: what it needs to know of each model, measured once; None if it needs nothing.
    """

    name: str = field(validator=fitting("Method", is_name, "lower-case words joined by hyphens, such as 'my-method'"))
    summary: str = field(validator=fitting("Method", _is_text, "one line of text"))
    config: type = field(validator=_check_config)
    build: Callable[[Any], Pipeline] = field(
        validator=fitting("Method", callable, "a function that makes a Pipeline of a config")
    )
    paper: str = field(default="", validator=fitting("Method", _is_text, "a title or a link, or an empty text"))
    full: Mapping[str, Any] | None = field(default=None, validator=_check_full)
    small: Mapping[str, Any] = field(factory=dict, validator=_check_parameters)
    search: Mapping[str, Sequence[Any]] = field(factory=dict, validator=_check_search)
    table: NeededTable | None = field(default=None, validator=_check_table)

    @property
    def stand_in(self) -> Mapping[str, Any]:
        """Parameters at which it runs where there is no model: instead of the table that it needs."""
        return {} if self.table is None else self.table.stand_in

    def configure(self, parameters: Mapping[str, Any]) -> Any:
        """A config; ParameterError names an unknown parameter, or the field, bound and value that do not fit.

        ``recall``, which every method has (`Pipeline.with_recall`), is checked and is no part of the config.
        """
        if FLOOR in parameters:
            from sparseprefill.refiners.recall import floor_of

            floor_of(parameters[FLOOR])
        parameters = {name: value for name, value in parameters.items() if name != FLOOR}
        known = [str(attribute.alias) for attribute in fields(self.config) if attribute.init]
        for name in parameters:
            if name not in known:
                raise ParameterError(f"{self.name} has no parameter {printed(name)}{nearest(name, known)}")
        return configured(self.name, self.config, parameters)

    def pipeline(self, /, **parameters: Any) -> Pipeline:
        """Validate the parameters and build; StageError where the plugin's `build` raises or returns nonsense.

        Besides the method's own parameters there is ``recall``, a floor under what it keeps: `Pipeline.with_recall`.
        """
        from sparseprefill.pipeline import Pipeline
        from sparseprefill.stages import Answer, Guard

        config = self.configure(parameters)
        pipeline: Pipeline = Guard(self, self.name).ask("build", Answer.of(Pipeline), config)
        return pipeline.with_recall(parameters.get(FLOOR))


def configured(name: str, kind: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    """An object of a plugin's class; ParameterError whatever its validators raise. name: of whom, for messages."""
    try:
        return kind(**parameters)
    except Exception as error:  # a plugin's own validator may raise anything
        if isinstance(error, SparsePrefillError) and printable(error):
            raise
        shown = ", ".join(f"{key}={printed(value)}" for key, value in parameters.items())
        raise ParameterError(f"{name}({shown}): {told(error)}") from error


@hookspec
def sparseprefill_methods() -> Iterable[Method]:  # type: ignore[empty-body]
    """The methods that this plugin offers. Pure and cheap: import stages and kernels in `Method.build`."""


@hookspec
def sparseprefill_refiners() -> Mapping[str, type[MaskRefiner]]:  # type: ignore[empty-body]
    """The refiners that this plugin offers, by the name that configurations give them.

    Each is an attrs class whose fields are its parameters; the first line of its docstring is its summary. The classes
    are imported when this is called: import kernels where they are used.
    """


@hookspec
def sparseprefill_correctors() -> Mapping[str, type[Corrector]]:  # type: ignore[empty-body]
    """The correctors that this plugin offers, as `sparseprefill_refiners` does."""


@hookspec
def sparseprefill_kernels() -> Iterable[Family]:  # type: ignore[empty-body]
    """The attention kernels that this plugin offers, as records: `kernels.family.record.Family`.

    Records are made when this is called; what launches is imported in their functions.
    """
