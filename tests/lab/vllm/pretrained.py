"""The command `pretrained`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from attrs import asdict
from sparseprefill.adapters.cli.group import CommandError, Stop
from sparseprefill.adapters.cli.progress import bars
from sparseprefill.adapters.demo.model import load_tokenizer

from lab.files import Files

from . import options
from .answering import folder_of, shape_of
from .engine import Setup, check
from .measuring import MEASURES, Measuring
from .measuring_form import form
from .sheet import Sheet


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(pretrained)


def pretrained(
    model: Annotated[str, typer.Option(help="embedded, or the folder of a trained model.")],
    method: Annotated[list[str] | None, typer.Option(help="Serve with this method; repeat for several.")] = None,
    config: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="Serve with this configuration; repeat.")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(min=64, help="Tokens of a prompt; repeat for several.")] = None,
    behind: Annotated[
        list[str] | None, typer.Option(metavar="CACHED+NEW", help="Tokens that are cached and new ones; repeat.")
    ] = None,
    mix: Annotated[str, typer.Option(metavar="N,N", help="Prompts of the load; empty for none.")] = "2048,8192,32768",
    measure: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MEASURES)}; all by default.")] = None,
    yarn: Annotated[float, typer.Option(min=1.0, help="Stretch the model's positions so many times by YaRN.")] = 1.0,
    rate: options.Rate = 2.0,
    requests: options.Requests = 24,
    tokens: options.Answer = 16,
    texts: Annotated[int, typer.Option(min=1, help="Texts of each length for answers.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each, after one to warm up; the median counts.")] = 3,
    budget: options.Budget = 8192,
    gate: Annotated[bool, typer.Option("--gate", help="Let the gate keep small calls of each --method dense.")] = False,
    beside: Annotated[
        bool, typer.Option("--beside-stock/--without-stock", help="Start vLLM's own attention in an engine, too.")
    ] = True,
    stock: options.Stock = "FLASH_ATTN",
    dtype: options.Dtype = "bfloat16",
    seed: options.Seed = 0,
    engine: options.More = "{}",
    markdown: options.Markdown = None,
    json: options.Json = None,
) -> None:
    """Measure a trained model as vLLM serves it: first tokens, a load, memory and answers, beside its own attention.

    Compilation and CUDA graphs are those of vLLM's defaults; "off" is vLLM's own attention in the adapter's engine.
    """
    folder = folder_of(model).absolute()
    measures = list(measure or MEASURES)
    if unknown := [one for one in measures if one not in MEASURES]:
        raise CommandError(f"--measure {unknown[0]}: write some of {', '.join(MEASURES)}")
    tables = contenders(method or (), config or (), gate)
    pairs = [_pair(text) for text in behind or ()]
    mixed = [_whole("--mix", one) for one in mix.split(",") if one]
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "0")
    check()
    files = Files(markdown=markdown, json=json)
    setup = Setup(shape=shape_of(folder, dtype), stock=stock, seed=seed, more=options.more(engine), folder=folder)
    device = options.device()
    work = Measuring(
        setup=setup,
        device=device,
        tokenizer=load_tokenizer(folder),
        tables=tables,
        lengths=sorted(set(length or [8192, 32768])),
        behind=pairs,
        mixed=mixed,
        rate=rate,
        requests=requests,
        answer=tokens,
        budget=budget,
        texts=texts,
        rounds=rounds,
        measures=measures,
        options=stretched(folder, yarn),
    )
    asked = {"command": "pretrained", "name": folder.name, "stock": stock, "seed": seed, "tables": tables, "yarn": yarn}
    asked |= {"rate": rate, "requests": requests, "budget": budget, "rounds": rounds, "mix": mixed, "answer": tokens}
    sheet = Sheet(form(work, folder.name), files, {**asked, "model": asdict(setup.shape), "engine": setup.more}, device)
    engines = [*([False] if beside else []), *([True] if tables else [])]
    with bars(len(engines)) as shown, Stop() as stop:
        for ours in engines:
            with shown.contender("sparseprefill" if ours else stock) as progress:
                for row in work.run(ours, progress):
                    sheet.add(row)
    sheet.end(stop, len(sheet.rows))


def contenders(methods: Sequence[str], configs: Sequence[Path], gate: bool) -> dict[str, dict[str, Any]]:
    """Tables of ``additional_config`` by name; CommandError for two of one name."""
    found: dict[str, dict[str, Any]] = {}
    made: list[tuple[str, dict[str, Any]]]
    made = [(name, {"method": name, **({} if gate else {"gate": False})}) for name in methods]
    made += [(path.stem, {"config": str(path.absolute())}) for path in configs]
    for name, table in made:
        if name in found or name == "off":
            raise CommandError(f"--method, --config: {name!r} stands for two contenders: give a file another name")
        found[name] = table
    return found


def stretched(folder: Path, factor: float) -> dict[str, Any]:
    """Options for ``LLM`` that let a model read `factor` times its context; CommandError for one stretched already."""
    if factor == 1:
        return {}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    own = dict(getattr(config, "rope_parameters", None) or {})
    if own.get("rope_type", "default") != "default":
        raise CommandError(f"--yarn {factor:g}: {folder} has rope_type {own['rope_type']!r} already; leave --yarn out")
    rope = {**own, "rope_type": "yarn", "factor": factor}
    rope["original_max_position_embeddings"] = config.max_position_embeddings
    longest = int(config.max_position_embeddings * factor)  # of rope alone, vLLM 0.32 takes the length for unstretched
    return {"hf_overrides": {"rope_parameters": rope, "max_position_embeddings": longest}}


def _pair(text: str) -> tuple[int, int]:
    cached, plus, new = text.partition("+")
    if not plus:
        raise CommandError(f"--behind {text}: write tokens as CACHED+NEW, such as 24576+8192")
    return _whole("--behind", cached), _whole("--behind", new)


def _whole(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 16):
        raise CommandError(f"{option}: {text!r} is no number of tokens; write 16 or more")
    return int(text)
