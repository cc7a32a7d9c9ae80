"""Options that the commands share, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.cli.options import setting, value_of

from sparseprefill import structure
from sparseprefill.errors import nearest
from sparseprefill.registry import default_registry

from .first_token import Contender

Layers = Annotated[int, typer.Option(min=1, help="Layers of the model.")]
Stock = Annotated[str, typer.Option(help="vLLM's own backend; CPU_ATTN on a CPU.")]
Dtype = Annotated[str, typer.Option(help="Of the model: float16, bfloat16 or float32.")]
Seed = Annotated[int, typer.Option(help="Chooses weights and prompts.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "--parameters", metavar="METHOD.PARAMETER=VALUE", help="Change a parameter of a method."),
]
More = Annotated[
    str, typer.Option("--engine", metavar="JSON", help="More options of vLLM's LLM, over those that are set here.")
]
Markdown = Annotated[Path | None, typer.Option(metavar="FILE", help="Where the table goes as Markdown.")]
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Where the figures go as JSON, row by row; - prints nothing else."),
]
Vocabulary = Annotated[int, typer.Option("--vocab", min=16, help="Tokens of the vocabulary.")]
Rate = Annotated[
    float, typer.Option(min=0.0, help="Requests a second, at random times (Poisson); 0 lets all come at once.")
]
Requests = Annotated[int, typer.Option(min=1, help="How many come.")]
Answer = Annotated[int, typer.Option(min=1, help="Tokens to decode for each request.")]
Budget = Annotated[int, typer.Option(min=16, help="Tokens of a step of the engine.")]
Hidden = Annotated[int, typer.Option(min=32, help="Width of the model.", hidden=True)]
Inner = Annotated[int, typer.Option(min=1, help="Width within its MLP.", hidden=True)]
Heads = Annotated[int, typer.Option(min=1, help="Query heads.", hidden=True)]
KvHeads = Annotated[int, typer.Option(min=1, help="KV heads.", hidden=True)]
HeadDim = Annotated[int, typer.Option(min=32, help="Head dimension.", hidden=True)]


def more(text: str) -> dict[str, Any]:
    """The table in ``--engine``; CommandError for another text."""
    try:
        found = structure.parsed(text)
    except ValueError as error:
        raise CommandError(f"--engine {text}: {error}; write JSON") from error
    if not isinstance(found, dict):
        raise CommandError(f"--engine {text}: write a table of options, such as {{}}")
    return found


def contenders(
    methods: Sequence[str],
    settings: Sequence[str],
    gate: bool,
    usual: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Contender]:
    """The methods as tables of ``additional_config``, each built once to be checked.

    settings: texts ``method.parameter=value``. gate: let the adapter's default gate choose vLLM's own attention.
    usual: parameters of each method that the settings change; by default a stand-in for its table. CommandError, or the
    registry's errors, for what does not fit.
    """
    registry = default_registry()
    found = map(registry.get, methods)
    changes = {one.name: dict(one.stand_in if usual is None else usual.get(one.name, {})) for one in found}
    for text in settings:
        method, parameter, value = setting(text)
        if method not in changes:
            raise CommandError(f"--set {text}: {method!r} is not a method of this run{nearest(method, changes)}")
        changes[method][parameter] = value_of(value)
    made = []
    for name, parameters in changes.items():
        registry.build(name, **parameters)
        table = {"method": name, "parameters": parameters}
        made.append(Contender(name, table if gate else {**table, "gate": False}))
    return made


def device() -> torch.device:
    """That vLLM computes on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
