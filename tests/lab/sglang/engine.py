"""A pretrained model in SGLang's engine, ours beside its own attention: ``python -m lab.sglang.engine --model MODEL``
(from tests/).

First tokens of whole texts in an empty cache, and of turns behind what the radix cache holds, 16 tokens behind texts,
and what the rows inside say of restated passages and facts. One engine after the other, each in a process of its own,
which SGLang ends where it fails. Needs SGLang and the extra ``cli``.
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

    prompts: of each length texts that are timed, `rounds` times after one to warm up. turn: their last tokens, timed
    behind the rest, too; 0 for none. looked_at: how many of them are looked into.
    """

    arguments: Mapping[str, Any]
    table: Mapping[str, Any] | None
    prompts: Sequence[Sequence[Prompt]]
    turn: int
    rounds: int
    looked_at: int


@app.callback(invoke_without_command=True)
def main(
    model: Annotated[str, typer.Option(help="embedded, or the folder of a trained model.")],
    method: Annotated[list[str] | None, typer.Option(help="Serve with this method; repeat. By default rowmax.")] = None,
    own: Annotated[str, typer.Option(help="SGLang's attention, which also decodes.")] = "fa3",
    tokens: Annotated[
        list[int] | None, typer.Option(min=3072, help="Tokens of a text; repeat for several. By default 30,720.")
    ] = None,
    turn: Annotated[int, typer.Option(min=0, help="Also time so many last tokens of a text behind the rest.")] = 0,
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
    lengths, tokenizer = tokens or [30720], load_tokenizer(folder)
    if turn >= min(lengths):
        raise CommandError(f"--turn {turn}: pass fewer than the texts' {min(lengths):,} tokens")
    prompts = [built_in(tokenizer, length, texts, seed) for length in lengths]
    steps = {"chunked_prefill_size": chunk, "skip_tokenizer_init": True, "random_seed": seed}
    usual = {"model_path": str(folder), "device": device, "dtype": dtype, **steps}
    found: list[dict[str, Any]] = []
    stock: dict[int, dict[str, Any]] = {}
    text = ""
    if not files.alone:
        names = ("attention", "tokens", "first token", f"over {own}", "turn", f"over {own}", "pairs", "copies", "facts")
        typer.echo(f"| {' | '.join((*names, 'same tokens', 'dense calls'))} |")
        typer.echo("|" + " --- |" * (len(names) + 2))
    for name in (None, *(method or ["rowmax"])):
        mine = {"prefill_attention_backend": "sparseprefill", "decode_attention_backend": own}
        arguments = {**usual, **({"attention_backend": own} if name is None else mine), **more}
        table = None if name is None else {"method": name, **({} if gate else {"gate": False})}
        asked = Asked(arguments=arguments, table=table, prompts=prompts, turn=turn, rounds=rounds, looked_at=looked_at)
        for length, texts_of, row in zip(lengths, prompts, apart(asked), strict=False):
            own_row = stock.setdefault(length, row)
            theirs = [chosen for chosen, _ in own_row.get("said", ())] or [None] * looked_at
            looked = zip(texts_of, row.get("said", ()), theirs, strict=False)
            row["inside"] = [
                {"name": one.name, **inside(one, chosen, lost, other)} for one, (chosen, lost), other in looked
            ]
            shown = {"attention": name or own, "tokens": length, **row}
            found.append({name: value for name, value in shown.items() if name != "said"})
            if not files.alone:
                typer.echo(line(shown, own_row))
        text = json.dumps({"model": folder.name, "chunk": chunk, "turn": turn, "rows": found}, indent=1)
        if files.json is not None and not files.alone:  # after each engine: the next may never end
            files.json.write_text(text)
    if files.alone:
        typer.echo(text)
    if any("error" in row for row in found):
        raise typer.Exit(1)


def line(row: Mapping[str, Any], stock: Mapping[str, Any]) -> str:
    """A row of the table."""
    if "error" in row:
        return f"| {row['attention']} | {row['tokens']:,} | {row['error']} |" + " |" * 8
    looked = row["inside"]
    right, asked = ([sum(one[name] for one in looked) for name in names] for names in _COUNTS)
    same = [a == b for a, b in zip(row["answers"], stock.get("answers", ()), strict=False)]
    pairs = "" if row["density"] is None else f"{row['density']:.1%}"
    counts = [f"{a:,} of {b:,}" for a, b in zip(right, asked, strict=True)]
    times = [*_times(row["seconds"], stock.get("seconds")), *_times(row["turn"], stock.get("turn"))]
    cells = [row["attention"], f"{row['tokens']:,}", *times, pairs, *counts, f"{sum(same)} of {len(same)}"]
    return f"| {' | '.join((*cells, str(row['dense'])))} |"


def _times(seconds: float | None, stock: float | None) -> tuple[str, str]:
    if seconds is None:
        return "", ""
    return f"{seconds:.3f} s", f"{stock / seconds:.2f}" if stock else ""


_COUNTS = (("copies", "facts"), ("of_copies", "of_facts"))


def apart(asked: Asked) -> list[dict[str, Any]]:
    """Figures of one engine by length, or its ``error``: SGLang kills its process where it fails."""
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=work, args=(asked, there))
    process.start()
    there.close()
    try:
        found: list[dict[str, Any]] = here.recv()
    except EOFError:
        found = [{"error": "the engine ended; its log stands above"}]
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


def figures(engine: Any, asked: Asked) -> list[dict[str, Any]]:
    """First tokens, answers and what stands inside, by length. Each run has another first token, of which no cache
    knows; a turn has that of the rest of its text, which is asked before."""
    fresh = iter(range(3, 1 << 16))

    def ask(ids: Sequence[int], new: int, **more: Any) -> tuple[float, dict[str, Any]]:
        began = time.perf_counter()
        answer = engine.generate(input_ids=[list(ids)], sampling_params={**GREEDY, "max_new_tokens": new}, **more)
        return time.perf_counter() - began, answer[0]

    def whole(prompt: Prompt) -> list[int]:
        return [next(fresh), *prompt.ids]

    def behind(prompt: Prompt) -> tuple[float, int]:
        ids = whole(prompt)
        ask(ids[: -asked.turn], 1)
        seconds, answer = ask(ids, 1)
        return seconds, answer["meta_info"]["cached_tokens"]

    def pairs() -> tuple[list[dict[str, Any]], dict[str, str]]:
        reports = engine.get_server_info()["internal_states"][0].get("sparseprefill")
        report: dict[str, Any] = reports[0] if reports else {}
        return report.get("layers", []), report.get("kernels", {})

    found = []
    for prompts in asked.prompts:
        for _ in range(2):
            ask(whole(prompts[-1]), 16)
        times = [ask(whole(one), 1)[0] for _ in range(asked.rounds) for one in prompts]
        layers, kernels = pairs()  # of the last prompt
        if asked.turn:
            behind(prompts[-1])
        turns = [behind(one) for _ in range(asked.rounds) for one in prompts] if asked.turn else []
        answers = [ask(whole(one), 16)[1]["output_ids"] for one in prompts]
        said = []
        for prompt in prompts[: asked.looked_at]:
            meta = ask(prompt.ids, 1, return_logprob=True, logprob_start_len=0, top_logprobs_num=1)[1]["meta_info"]
            chosen = [max(one)[1] for one in meta["input_top_logprobs"][1:]]
            said.append((chosen, [-float(one[0]) for one in meta["input_token_logprobs"][1:]]))
        density = [one["density"] for one in layers if one["density"] is not None]
        found.append({
            "seconds": median(times),
            "times": times,
            "turn": median(seconds for seconds, _ in turns) if turns else None,
            "turns": turns,  # seconds, and tokens that the cache had
            "answers": answers,
            "said": said,
            "density": sum(density) / len(density) if density else None,
            "dense": sum(one["dense_calls"] for one in layers),
            "kernels": kernels,
        })  # fmt: skip
    return found


if __name__ == "__main__":
    app()
