"""What the options of `compare` and `demo` mean: contenders and their parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import fields_dict

from sparseprefill import structure
from sparseprefill.errors import ParameterError, nearest

from ..demo.settings import HYBRIDS, PARAMETERS
from ..session.defaults import TAIL
from .group import CommandError

if TYPE_CHECKING:
    from sparseprefill.pipeline import Pipeline
    from sparseprefill.registry import Registry
    from sparseprefill.route import Route

    from ..evaluation.outcome import Contender

AROUND = ("refiners", "corrector")
"""What a configuration puts around a method; ``--set`` takes it like a parameter."""
DENSE = "dense"
"""The registry's method that computes the same, through the sparse executor; left out unless it is named."""


def contenders(
    registry: Registry,
    names: Sequence[str],
    settings: Sequence[str],
    suiting: Mapping[str, Mapping[str, Any]] | None = None,
    tail: int = TAIL,
    floor: Any = None,
) -> list[Contender]:
    """The methods to compare, built: those named, or every one that is registered.

    suiting: parameters that suit the model, by method. settings: texts ``name.parameter=value``, over them; refiners
    and a corrector may be set like parameters, as in a configuration. tail: last rows that get every key, as of
    `attach`. floor: of the recall of every method but dense, unless it has a setting of its own. Raises CommandError or
    the library's own errors for what does not fit.
    """
    from ..evaluation.outcome import Contender

    chosen = list(dict.fromkeys(names)) or [name for name in registry.methods() if name != DENSE]
    made = []
    for name, changed in changes([registry.get(name).name for name in chosen], settings).items():
        parameters = {**(suiting or {}).get(name, {}), **floored(name, floor), **changed}
        made.append(Contender(name, _built(registry, name, parameters), parameters, tail))
    return made


def named(settings: Sequence[str], known: Collection[str]) -> list[str]:
    """The methods that texts ``name.parameter=value`` are about, of those known."""
    names = [setting(text, "--set")[0] for text in settings]
    return [name for name in names if name in known]


def changes(names: Sequence[str], settings: Sequence[str], option: str = "--set") -> dict[str, dict[str, Any]]:
    """What texts ``name.parameter=value`` change, by method and parameter; CommandError where one is of no method."""
    made: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in settings:
        method, parameter, value = setting(text, option)
        if method not in made:
            raise CommandError(
                f"{option} {text}: {method!r} is not among the methods of this run{nearest(method, made)}"
            )
        made[method][parameter] = value
    return made


def suited(model: str | None) -> dict[str, Any]:
    """Parameters that suit the embedded model, by method; none for another. model: its path, None for the embedded."""
    return dict(PARAMETERS) if model is None else {}


def _built(registry: Registry, name: str, given: Mapping[str, Any]) -> Pipeline | Route:
    """A method with its parameters, and with the refiners and corrector that stand among them."""
    own = fields_dict(registry.get(name).config)
    if not any(key in given and key not in own for key in AROUND):
        made: Pipeline | Route = registry.build(name, **given)
        return made
    from sparseprefill.config import from_config
    from sparseprefill.method import FLOOR

    around = {key: given[key] for key in (*AROUND, FLOOR) if key in given and key not in own}
    parameters = {key: value for key, value in given.items() if key not in around}
    return from_config({"method": name, "parameters": parameters, **around}, registry=registry, at=name)


def floored(name: str, floor: Any) -> dict[str, Any]:
    """The parameter that puts a floor under a method's recall; dense needs none."""
    from sparseprefill.method import FLOOR

    return {} if floor is None or name == DENSE else {FLOOR: floor}


def configured(paths: Sequence[Path], hybrids: bool, tail: int = TAIL) -> list[Contender]:
    """Contenders from configuration files, named by their `name` or the file, and the hybrids that ship."""
    from sparseprefill.config import from_config

    from ..evaluation.outcome import Contender

    tables = HYBRIDS if hybrids else {}
    made = [Contender(name, from_config(dict(table)), table, tail) for name, table in tables.items()]
    for path in paths:
        pipeline = from_config(path)
        made.append(Contender(pipeline.name, pipeline, {"config": str(path)}, tail))
    return made


def profiled(paths: Sequence[Path], tail: int = TAIL) -> list[Contender]:
    """Contenders from profiles, named by the file."""
    from sparseprefill.registry import default_registry

    from ..evaluation.outcome import Contender

    return [
        Contender(path.name, default_registry().build(profile=path), {"profile": str(path)}, tail) for path in paths
    ]


def setting(text: str, option: str = "--set") -> tuple[str, str, Any]:
    """Method, parameter and value of a text ``method.parameter=value``; CommandError for another."""
    target, equals, value = text.partition("=")
    method, dot, parameter = target.strip().rpartition(".")
    if not (equals and dot and method and parameter and value.strip()):
        raise CommandError(f"{option} {text}: write method.parameter=value, such as {option} anchor-attention.theta=4")
    return method, parameter, value_of(value.strip())


def value_of(text: str) -> Any:
    """JSON where it is JSON, True and False, numbers such as inf, else the text itself."""
    for read in (structure.loads, {"True": True, "False": False, "None": None}.__getitem__, float):
        try:
            return read(text)
        except ParameterError as error:
            raise CommandError(f"{text}: it {error}") from error
        except (ValueError, KeyError):
            continue
    return text
