"""A pretrained model in SGLang's engine, ours beside its own attention: ``python -m lab.sglang.engine --model MODEL``
(from tests/).

First tokens of whole texts in an empty cache, 16 tokens behind them, and what the rows inside say of restated passages
and facts. One engine after the other, each in a process of its own, which SGLang ends where it fails. Needs SGLang and
the extra ``cli``.
"""

# SGLang is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from statistics import median
from typing import Annotated, Any

import typer
from attrs import frozen
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.demo.model import load_tokenizer
from sparseprefill.adapters.evaluation.prompts import Prompt
from sparseprefill.adapters.evaluation.texts import built_in

from lab.files import Files, JsonFile, command
from lab.inside import inside
from lab.vllm.answering import folder_of

VARIABLE = "SPARSEPREFILL_SGLANG"
GREEDY = {"temperature": 0, "ignore_eos": True}
app = command("Measure a pretrained model in SGLang's engine, its own attention beside ours.")


@frozen(kw_only=True)
class Asked:
    """The work of one engine. arguments: of SGLang's `Engine`. table: options of our backend; None for SGLang's own.

    prompts: texts that are timed, `rounds` times after one to warm up. looked_at: how many of them are looked into.
    """

    arguments: Mapping[str, Any]
    table: Mapping[str, Any] | None
    prompts: Sequence[Prompt]
    rounds: int
    looked_at: int


@app.callback(invoke_without_command=True)
def main(
    model: Annotated[str, typer.Option(help="embedded, or the folder of a trained model.")],
    method: Annotated[list[str] | None, typer.Option(help="Serve with this method; repeat. By default rowmax.")] = None,
    own: Annotated[str, typer.Option(help="SGLang's attention, which also decodes.")] = "fa3",
    tokens: Annotated[int, typer.Option(min=3072, help="Tokens of a text.")] = 30720,
    texts: Annotated[int, typer.Option(min=1, help="Texts that are timed, of all kinds in turn.")] = 3,
    looked_at: Annotated[int, typer.Option("--inside", min=0, help="So many of them are looked into.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each text; the median of all counts.")] = 2,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a step.")] = 8192,
    gate: Annotated[bool, typer.Option("--gate", help="Let the gate keep small prompts dense.")] = False,
    device: str = "cuda",
    dtype: str = "bfloat16",
    seed: int = 0,
    engine: Annotated[str, typer.Option(metavar="JSON", help="More arguments of the engine.")] = "{}",
    out: JsonFile = None,
) -> None:
    """The command."""
    files = Files(json=out)
    try:
        more = dict(json.loads(engine))
    except (TypeError, ValueError) as error:
        raise CommandError(f'--engine {engine}: {error}; pass an object such as {{"page_size": 64}}') from error
    folder = folder_of(model).absolute()
    prompts = built_in(load_tokenizer(folder), tokens, texts, seed)
    steps = {"chunked_prefill_size": chunk, "skip_tokenizer_init": True, "random_seed": seed}
    usual = {"model_path": str(folder), "device": device, "dtype": dtype, **steps}
    found: list[dict[str, Any]] = []
    theirs: list[list[int] | None] = []
    if not files.alone:
        typer.echo(f"| attention | first token | over {own} | pairs | copies | facts | same tokens | dense calls |")
        typer.echo("|" + " --- |" * 8)
    for name in (None, *(method or ["rowmax"])):
        mine = {"prefill_attention_backend": "sparseprefill", "decode_attention_backend": own}
        arguments = {**usual, **({"attention_backend": own} if name is None else mine), **more}
        table = None if name is None else {"method": name, **({} if gate else {"gate": False})}
        asked = Asked(arguments=arguments, table=table, prompts=prompts, rounds=rounds, looked_at=looked_at)
        row = apart(asked)
        said = row.pop("said", ())
        if name is None:
            theirs = [chosen for chosen, _ in said] or [None] * looked_at
        looked = zip(prompts, said, theirs, strict=False)
        row["inside"] = [
            {"name": one.name, **inside(one, chosen, lost, stock)} for one, (chosen, lost), stock in looked
        ]
        found.append({"attention": name or own, **row})
        if not files.alone:
            typer.echo(line(found[-1], found[0]))
    text = json.dumps({"model": folder.name, "tokens": tokens, "chunk": chunk, "rows": found}, indent=1)
    if files.alone:
        typer.echo(text)
    elif files.json is not None:
        files.json.write_text(text)
    if any("error" in row for row in found):
        raise typer.Exit(1)


def line(row: Mapping[str, Any], stock: Mapping[str, Any]) -> str:
    """A row of the table."""
    if "error" in row:
        return f"| {row['attention']} | {row['error']} |" + " |" * 6
    looked = row["inside"]
    right, asked = ([sum(one[name] for one in looked) for name in names] for names in _COUNTS)
    same = [a == b for a, b in zip(row["answers"], stock.get("answers", ()), strict=False)]
    times = (f"{row['seconds']:.3f} s", f"{stock['seconds'] / row['seconds']:.2f}" if "seconds" in stock else "")
    pairs = "" if row["density"] is None else f"{row['density']:.1%}"
    counts = [f"{a:,} of {b:,}" for a, b in zip(right, asked, strict=True)]
    cells = [row["attention"], *times, pairs, *counts, f"{sum(same)} of {len(same)}", str(row["dense"])]
    return f"| {' | '.join(cells)} |"


_COUNTS = (("copies", "facts"), ("of_copies", "of_facts"))


def apart(asked: Asked) -> dict[str, Any]:
    """Figures of one engine, or its ``error``: SGLang kills its process where it fails."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=work, args=(asked, there))
    process.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        found = {"error": "the engine ended; its log stands above"}
    process.join(60)
    process.kill()
    return found


def work(asked: Asked, told: Connection) -> None:
    """Tell the figures of one engine."""
    os.environ.pop(VARIABLE, None)
    if asked.table is not None:
        os.environ[VARIABLE] = json.dumps(asked.table)
    made = import_module("sglang").Engine(**asked.arguments)
    try:
        told.send(figures(made, asked))
    finally:
        made.shutdown()


def figures(engine: Any, asked: Asked) -> dict[str, Any]:
    """First tokens, answers and what stands inside. Each run has another first token, of which no cache knows."""
    fresh = iter(range(3, 1 << 16))

    def ask(prompt: Prompt, new: int, first: bool = True, **more: Any) -> tuple[float, dict[str, Any]]:
        ids = [*([next(fresh)] if first else []), *prompt.ids]
        began = time.perf_counter()
        answer = engine.generate(input_ids=[ids], sampling_params={**GREEDY, "max_new_tokens": new}, **more)
        return time.perf_counter() - began, answer[0]

    for _ in range(2):
        ask(asked.prompts[-1], 16)
    times = [ask(prompt, 1)[0] for _ in range(asked.rounds) for prompt in asked.prompts]
    answers = [ask(prompt, 16)[1]["output_ids"] for prompt in asked.prompts]
    said = []
    for prompt in asked.prompts[: asked.looked_at]:
        meta = ask(prompt, 1, False, return_logprob=True, logprob_start_len=0, top_logprobs_num=1)[1]["meta_info"]
        chosen = [max(one)[1] for one in meta["input_top_logprobs"][1:]]
        said.append((chosen, [-float(one[0]) for one in meta["input_token_logprobs"][1:]]))
    report = engine.get_server_info()["internal_states"][0].get("sparseprefill") or [{"layers": []}]
    layers = report[0]["layers"]
    density = [one["density"] for one in layers if one["density"] is not None]
    return {
        "seconds": median(times),
        "times": times,
        "answers": answers,
        "said": said,
        "density": sum(density) / len(density) if density else None,
        "dense": sum(one["dense_calls"] for one in layers),
        "kernels": report[0].get("kernels", {}),
    }


if __name__ == "__main__":
    app()
