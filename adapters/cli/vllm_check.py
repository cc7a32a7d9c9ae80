"""The command `vllm-check`: whether a vLLM server would take a configuration, before it is started."""

from __future__ import annotations

import json as reading
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from attrs import asdict

from . import render
from .group import CommandError
from .shared_options import Json

TABLE = "sparseprefill"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("vllm-check")(vllm_check)


def vllm_check(
    config: Annotated[
        str, typer.Argument(help="What vLLM gets as --additional-config: JSON, or a .json or .toml file of it.")
    ],
    model: Annotated[str, typer.Option(help="Folder of the model; its weights are not loaded.")],
    json: Json = False,
) -> None:
    """Check a configuration for vLLM against a model without starting a server: what it would refuse, and run dense."""
    additional, folder = _read(config), Path(model)
    if not (folder / "config.json").is_file():
        raise CommandError(f"--model {model}: there is no {folder / 'config.json'}; pass a folder of a model")
    try:
        from transformers import AutoConfig

        from ..vllm.check import check
    except ImportError as error:
        raise CommandError(
            f"the model cannot be read ({error}): install vLLM, or transformers with pip install 'sparseprefill[hf]'"
        ) from error
    try:
        whole = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise CommandError(f"--model {model}: transformers cannot read its config.json: {first}") from error
    found = check(additional, whole, model)
    if json:
        render.write_json(asdict(found))
    else:
        render.line(found.model, "bold")
        for one in found.expected:
            whose = f"profile {one.profile}: " if one.profile else ""
            keyed = one.sparse + sum(one.dense.values())
            typer.echo(f"{whose}{one.method} in {one.sparse} of {keyed} layers")
            for why, count in one.dense.items():
                typer.echo(f"  {count} dense: {why}")
        for flag in found.flags:
            typer.echo(f"the server needs {flag}")
    if not any(one.sparse for one in found.expected):
        raise CommandError("nothing would run sparse: choose a method that serves this model, or leave the backend out")


def _read(config: str) -> Mapping[str, Any]:
    """The additional configuration; the table under ``sparseprefill`` may stand alone."""
    try:
        if config.lstrip().startswith("{"):
            found = reading.loads(config)
        else:
            text = Path(config).read_text(encoding="utf-8")
            found = tomllib.loads(text) if config.endswith(".toml") else reading.loads(text)
    except OSError as error:
        raise CommandError(f"{config}: {error.strerror}; pass JSON, or a .json or .toml file") from error
    except ValueError as error:
        raise CommandError(f"{config} is no JSON or TOML: {error}") from error
    if not isinstance(found, Mapping):
        raise CommandError(f"{config} is {found!r}: give a table with the key {TABLE}")
    return found if TABLE in found else {TABLE: found}
