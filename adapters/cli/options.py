"""Options that several commands have, each declared once, and what they mean: contenders and their parameters."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from attrs import fields_dict

from sparseprefill import structure
from sparseprefill.errors import ParameterError, nearest
from sparseprefill.validate import MOST_ROWS

from ..demo.model import PARAMETERS
from ..session.defaults import TAIL
from .group import CommandError

if TYPE_CHECKING:
    from sparseprefill.method import Method
    from sparseprefill.pipeline import Pipeline
    from sparseprefill.registry import Registry
    from sparseprefill.route import Route

    from ..evaluation.outcome import Contender

AROUND = ("refiners", "corrector", "executor")
"""Keys that a configuration puts around a method; ``--set`` takes them like parameters."""
DENSE = "dense"
"""The registry's method that computes the same, through the sparse executor; left out unless it is named."""
MODELS = "pass the folder of a transformers model, or a name such as Qwen/Qwen3-0.6B"
"""Values that --model takes, for errors."""
SEEDS = (1 << 32) - 1
"""The largest seed: what every generator takes."""


class Dtype(StrEnum):
    """Types to compute in; AUTO depends on the device."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Cost(StrEnum):
    """Cost of a setting; AUTO is seconds on a GPU, density on a CPU."""

    AUTO = "auto"
    DENSITY = "density"
    SECONDS = "seconds"

    def of(self, device: str) -> Literal["density", "seconds"]:
        """The cost that counts on a type of device."""
        if self == Cost.AUTO:
            return "density" if device == "cpu" else "seconds"
        return "density" if self == Cost.DENSITY else "seconds"


def check_model(context: typer.Context, parameter: typer.CallbackParam, path: str | None) -> str | None:
    """CommandError, before anything is imported, where it is no folder with a model and cannot be a name."""
    if path is None or context.resilient_parsing:  # as completion parses
        return path
    folder, named = Path(path), _named(parameter)
    if path and os.path.isdir(path):  # False, and no error, for a name that is too long
        if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise CommandError(f"{named} {path}: the folder holds no config.json; pass one that save_pretrained wrote")
    elif path and os.path.exists(path):
        raise CommandError(f"{named} {path}: that is a file; {MODELS}")
    elif not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path):
        raise CommandError(f"{named} {path or repr(path)}: there is no such folder; {MODELS}")
    return path


def _named(parameter: typer.CallbackParam) -> str:
    """A user's name of an option or an argument."""
    name = max(parameter.opts, key=len)
    return name if name.startswith("-") else name.upper()


def finite(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """CommandError for infinity, which no time and no bound is."""
    if value is not None and math.isinf(value):
        raise CommandError(f"{_named(parameter)} {value}: pass a finite number")
    return value


def _floor(text: str) -> Any:
    """A number, or a table of a floor's options as JSON."""
    from sparseprefill.refiners.recall import floor_of

    value = value_of(text)
    try:
        floor_of(value)
    except ParameterError as error:
        raise typer.BadParameter(str(error)) from error
    return value


Model = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        callback=check_model,
        help="Folder or name of a transformers model; by default the embedded one.",
    ),
]
OneModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", callback=check_model, help="Folder or name of a transformers model, such as Qwen/Qwen3-0.6B."
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(help="A text file, JSONL with `prompt` or `messages`, or a folder; by default built-in texts."),
]
AsIs = Annotated[
    bool, typer.Option("--as-is", help="Leave the prompts of --prompts as they are: restate no passages in them.")
]
Methods = Annotated[list[str] | None, typer.Option(help="Only this method; repeat for several.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="[METHOD.]PARAMETER=VALUE",
        help="Change a parameter; with one method you can leave out its name.",
    ),
]
Tried = Annotated[
    list[str] | None,
    typer.Option("--try", metavar="[METHOD.]PARAMETER=V1,V2", help="Values to search instead of the method's own."),
]
Configs = Annotated[list[Path] | None, typer.Option(help="Also run the pipeline of this TOML or JSON file.")]
Profiles = Annotated[list[Path] | None, typer.Option(help="Also run the profile in this file of `sparseprefill fit`.")]
Tail = Annotated[
    int, typer.Option(min=0, max=MOST_ROWS, help="Last rows of a prompt that get every key with every method.")
]
Floor = Annotated[
    Any,
    typer.Option(
        "--recall-floor",
        parser=_floor,
        metavar="X|TABLE",
        help="Recall that every method has to reach on sampled rows, such as 0.95, or a floor's options as JSON.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=SEEDS, help="Chooses the text, the needles and their places.")]
Layer = Annotated[int, typer.Option(min=0, help="Layer in the picture.")]
Head = Annotated[int, typer.Option(min=0, help="Query head in the picture.")]
Device = Annotated[str, typer.Option(help="Device, such as cpu or cuda:0; by default a GPU if there is one.")]
DeviceMap = Annotated[
    str | None, typer.Option(help="How to spread the model over devices, such as auto (needs accelerate).")
]
Type = Annotated[Dtype, typer.Option(help="By default float32 on a CPU, bfloat16 on a GPU.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads on a CPU.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


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


def contenders(
    registry: Registry,
    names: Sequence[str] | None,
    settings: Sequence[str],
    model: str | None = None,
    tail: int = TAIL,
    floor: Any = None,
    configs: Sequence[Path] = (),
    profiles: Sequence[Path] = (),
) -> list[Contender]:
    """Everything to compare, built: methods, configuration files and profiles.

    names: of methods; None for every one that is registered but dense. settings: texts ``name.parameter=value``, where
    refiners, a corrector and an executor may be set like parameters, as in a configuration. model: its path, None for
    the embedded one, whose methods get what suits it where no setting says otherwise. tail: last rows that get every
    key, as `attach` takes it. floor: of the recall of every method but dense, unless it has a setting of its own.
    Raises CommandError or the library's own errors for what does not fit.
    """
    from sparseprefill.config import from_config

    from ..evaluation.outcome import Contender

    made = []
    for name, changed in changes([one.name for one in chosen(registry, names)], settings).items():
        parameters = {**suited(model).get(name, {}), **floored(name, floor), **changed}
        made.append(Contender(name, _built(registry, name, parameters), parameters, tail))
    for path in configs:
        pipeline = from_config(path)
        made.append(Contender(pipeline.name, pipeline, {"config": str(path)}, tail))
    for path in profiles:
        made.append(Contender(path.name, registry.build(profile=path), {"profile": str(path)}, tail))
    return made


def chosen(registry: Registry, names: Sequence[str] | None) -> list[Method]:
    """The methods of these names, each once; None for every one that is registered but dense."""
    return [registry.get(name) for name in dict.fromkeys(every(registry) if names is None else names)]


def every(registry: Registry) -> list[str]:
    """The names of all methods but dense, which computes what the model itself does."""
    return [name for name in registry.methods() if name != DENSE]


def _built(registry: Registry, name: str, given: Mapping[str, Any]) -> Pipeline | Route:
    """A method with its parameters, and with the refiners, corrector and executor among them."""
    own = fields_dict(registry.get(name).config)
    if not any(key in given and key not in own for key in AROUND):
        made: Pipeline | Route = registry.build(name, **given)
        return made
    from sparseprefill.config import from_config
    from sparseprefill.method import FLOOR

    around = {key: given[key] for key in (*AROUND, FLOOR) if key in given and key not in own}
    parameters = {key: value for key, value in given.items() if key not in around}
    return from_config({"method": name, "parameters": parameters, **around}, registry=registry, at=name)


def changes(
    names: Sequence[str], settings: Sequence[str], option: str = "--set", read: Callable[[str], Any] = value_of
) -> dict[str, dict[str, Any]]:
    """Changes that texts ``name.parameter=value`` make, by method and parameter; one method's name may be left out.

    read: gives what a value says. CommandError where a text is of none of the methods.
    """
    made: dict[str, dict[str, Any]] = {name: {} for name in names}
    for text in settings:
        method, parameter, value = setting(text, option, names)
        if method not in made:
            raise CommandError(
                f"{option} {text}: {method!r} is not among the methods of this run{nearest(method, made)}"
            )
        made[method][parameter] = read(value)
    return made


def tried(names: Sequence[str], settings: Sequence[str], texts: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """The values of --try by method and parameter; CommandError where --set names one of them too."""
    values = changes(names, texts, "--try", lambda text: [value_of(part) for part in text.split(",")])
    for text in settings:
        method, parameter, _ = setting(text, "--set", names)
        if parameter in values.get(method, ()):
            raise CommandError(f"--set {text}: --try names it too; leave one of them out")
    return values


def suited(model: str | None) -> Mapping[str, Mapping[str, Any]]:
    """Parameters that suit the embedded model, by method; none for another. model: its path, None for the embedded."""
    return PARAMETERS if model is None else {}


def floored(name: str, floor: Any) -> dict[str, Any]:
    """The parameter that puts a floor under a method's recall; dense needs none."""
    from sparseprefill.method import FLOOR

    return {} if floor is None or name == DENSE else {FLOOR: floor}


def setting(text: str, option: str = "--set", names: Sequence[str] = ()) -> tuple[str, str, str]:
    """Method, parameter and value, as texts, of a text ``method.parameter=value``; CommandError for another.

    names: of the methods of a run; where there is one, the text may leave it out.
    """
    target, equals, value = text.partition("=")
    method, _, parameter = target.strip().rpartition(".")
    method = method or (names[0] if len(names) == 1 else "")
    if not (equals and method and parameter and value.strip()):
        raise CommandError(f"{option} {text}: write method.parameter=value, such as {option} anchor-attention.theta=4")
    return method, parameter, value.strip()
