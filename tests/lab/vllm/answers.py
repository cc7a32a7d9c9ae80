"""The command `answers`."""

from __future__ import annotations

from typing import Annotated

import typer
from attrs import asdict
from sparseprefill.adapters.cli.group import Stop
from sparseprefill.adapters.cli.progress import bars
from sparseprefill.adapters.demo.model import PARAMETERS

from lab.files import Files

from . import options
from .answering import EMBEDDED, Answering, families, folder_of, questions, shape_of
from .answering_form import form
from .engine import Setup, check
from .first_token import Contender
from .sheet import Sheet


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(answers)


def answers(
    length: Annotated[list[int] | None, typer.Option(min=16, help="Tokens of a prompt; repeat to mix.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Also ask with this method; repeat for several.")] = None,
    settings: options.Set = None,
    model: Annotated[str, typer.Option(help="embedded, or the folder of a trained model.")] = EMBEDDED,
    rate: options.Rate = 0.0,
    requests: options.Requests = 16,
    budget: options.Budget = 8192,
    gate: Annotated[bool, typer.Option("--gate", help="Let the break-even gate keep small calls dense.")] = False,
    stock: options.Stock = "FLASH_ATTN",
    dtype: options.Dtype = "bfloat16",
    seed: options.Seed = 0,
    engine: options.More = "{}",
    markdown: options.Markdown = None,
    json: options.Json = None,
) -> None:
    """Ask a trained model needle questions that come over time: how many are right, beside vLLM's own attention."""
    folder = folder_of(model)
    check()
    files = Files(markdown=markdown, json=json)
    usual = PARAMETERS if model == EMBEDDED else {}
    wanted = [Contender(stock), *options.contenders(["dense", *(method or ())], settings or (), gate, usual)]
    setup = Setup(
        shape=shape_of(folder, dtype), stock=stock, seed=seed, more=options.more(engine), folder=folder.absolute()
    )
    tokenizer, tasks = questions(folder, length or [4096], requests, seed)
    work = Answering(setup=setup, tokenizer=tokenizer, tasks=tasks, rate=rate, budget=budget)
    asked = {"command": "answers", "name": model, "stock": stock, "seed": seed, "rate": rate, "budget": budget}
    asked |= {"gate": gate, "questions": families(tasks), "model": asdict(setup.shape), "engine": dict(setup.more)}
    device = options.device()
    sheet = Sheet(form(work, model, device), files, asked, device)
    with bars(len(wanted)) as shown, Stop() as stop:
        for one in wanted:
            with shown.contender(one.name) as progress:
                for row in work.run(one, progress):
                    sheet.add(row)
    sheet.end(stop, len(wanted))
