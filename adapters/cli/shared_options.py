"""Options that several commands have: each is declared here, once."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sparseprefill.validate import MOST_ROWS

from .group import CommandError

SEEDS = (1 << 32) - 1
"""The largest seed: what every generator takes."""
MODELS = "pass the folder of a transformers model, or a name such as Qwen/Qwen3-0.6B"
"""What --model takes, for errors."""


class Dtype(StrEnum):
    """Types to compute in; AUTO depends on the device."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Cost(StrEnum):
    """What a setting should have little of; AUTO is seconds on a GPU, density on a CPU."""

    AUTO = "auto"
    DENSITY = "density"
    SECONDS = "seconds"

    def of(self, device: str) -> Literal["density", "seconds"]:
        """What it is on a type of device."""
        if self == Cost.AUTO:
            return "density" if device == "cpu" else "seconds"
        return "density" if self == Cost.DENSITY else "seconds"


def check_model(context: typer.Context, path: str | None) -> str | None:
    """CommandError, before anything is imported, where --model is no folder with a model and cannot be a name."""
    if path is None or context.resilient_parsing:  # as completion parses
        return path
    folder = Path(path)
    if path and folder.is_dir():
        if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise CommandError(f"--model {path}: the folder holds no config.json; pass one that save_pretrained wrote")
    elif path and folder.exists():
        raise CommandError(f"--model {path}: that is a file; {MODELS}")
    elif not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path):
        raise CommandError(f"--model {path or repr(path)}: there is no such folder; {MODELS}")
    return path


Model = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        callback=check_model,
        help="Folder or name of a transformers model; by default the embedded one.",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(help="A text file, JSONL with `prompt` or `messages`, or a folder; by default built-in texts."),
]
Methods = Annotated[list[str] | None, typer.Option(help="Only this method; repeat for several.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="METHOD.PARAMETER=VALUE", help="Change a parameter.")
]
Configs = Annotated[list[Path] | None, typer.Option(help="Also run the pipeline of this TOML or JSON file.")]
Profiles = Annotated[
    list[Path] | None, typer.Option(help="Also run the profile in this file of `sparseprefill fit` or `tune`.")
]
Tail = Annotated[
    int, typer.Option(min=0, max=MOST_ROWS, help="Last rows of a prompt that get every key with every method.")
]


def _floor(text: str) -> Any:
    """A number, or a table of a floor's options as JSON."""
    from sparseprefill.errors import ParameterError
    from sparseprefill.refiners.recall import floor_of

    from .options import value_of

    value = value_of(text)
    try:
        floor_of(value)
    except ParameterError as error:
        raise typer.BadParameter(str(error)) from error
    return value


Floor = Annotated[
    Any,
    typer.Option(
        "--recall-floor",
        parser=_floor,
        metavar="X|TABLE",
        help="Recall that every method has to reach on sampled rows, such as 0.95, or a floor's options as JSON.",
    ),
]
Device = Annotated[str, typer.Option(help="Device, such as cpu or cuda:0; by default a GPU if there is one.")]
DeviceMap = Annotated[
    str | None, typer.Option(help="How to spread the model over devices, such as auto (needs accelerate).")
]
Type = Annotated[Dtype, typer.Option(help="By default float32 on a CPU, bfloat16 on a GPU.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads on a CPU.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Trials = Annotated[bool, typer.Option("--json", help="Print every trial as JSON and nothing else.")]
Lengths = Annotated[list[int] | None, typer.Option(min=256, help="Length of the texts in tokens; repeat for several.")]
Minutes = Annotated[
    float | None, typer.Option(min=0.01, help="Time for the search; by default until everything is tried.")
]
AtEnd = Annotated[
    bool,
    typer.Option(
        "--end-only", help="Aim at the prompt's end alone, for prompts that are asked about behind their last row."
    ),
]
Least = Annotated[Cost, typer.Option("--by", help="What to minimise; by default seconds on a GPU, density on a CPU.")]
