"""Long answers behind a sparse prefill: ``python -m lab.long --model MODEL`` (from tests/).

A dense decoder reads a sparse cache for hundreds of tokens. Prompts are files of a package of the standard library, the
last of them cut in its middle; the answer goes on from there. Of each way to prefill this shows how likely the file's
own next tokens are, how much of them the greedy answer has, how likely that answer is to the dense model, whether it
loops, and whether its names stand in the prompt. Further turns bring more of the file, behind the cache of the turn
before.
"""

from __future__ import annotations

import keyword
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import SequenceMatcher
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
import typer
from attrs import asdict, frozen
from sparseprefill.adapters.cli import options
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.cli.options import Configs, Device, Dtype, Methods, Model, Seed, Settings, Threads, Type
from sparseprefill.adapters.cli.setup import Place, Source
from sparseprefill.adapters.evaluation.outcome import Contender, surprises
from sparseprefill.adapters.evaluation.reading import Reader
from sparseprefill.adapters.huggingface import attach
from sparseprefill.adapters.session.defaults import TAIL
from torch import Tensor

from lab.bench import facts
from lab.bench.report import write_figures
from lab.files import JsonFile, command
from sparseprefill.registry import default_registry

GRAM = 16
"""Tokens in a row that count as a loop where the answer has had them before."""
NAME = re.compile(r"[A-Za-z_]\w{5,}")
COLUMNS = ("truth", "alike", "own", "loops", "names")
app = command("Show what answers of hundreds of tokens become behind a sparse prefill.")


@frozen
class Task:
    """A file that goes on. name: of the package. ids: the prompt. behind: what the file has there."""

    name: str
    ids: tuple[int, ...]
    behind: tuple[int, ...]


@frozen
class Row:
    """One answer. truth: mean negative log-likelihood of the file's own next tokens, in nats; alike: how much of them
    the answer has, 0 to 1 (difflib's ratio, in tokens). own: mean negative log-likelihood of the answer's tokens behind
    a dense prefill. loops: share of its runs of `GRAM` tokens that it has had before. names: share of its names of six
    letters and more that stand in the prompt. density: of the prefill."""

    task: str
    turn: int
    method: str
    truth: float
    alike: float
    own: float
    loops: float
    names: float
    density: float


def tasks(tokenizer: Any, tokens: int, behind: int, count: int, seed: int) -> Iterator[Task]:
    """So many prompts of `tokens` tokens, each with at least `behind` tokens of its last file to go."""
    root = Path(sysconfig.get_path("stdlib"))
    packages = sorted({one.parent for one in root.glob("*/__init__.py") if "-packages" not in one.parent.name})
    random.Random(seed).shuffle(packages)
    for package in packages:
        rng, each = random.Random(f"{seed}/{package.name}"), dict[str, list[int]]()
        paths = [one for one in sorted(package.rglob("*.py")) if "test" not in one.parts[-2]]
        if sum(one.stat().st_size for one in paths) < tokens:  # a token has a byte at least
            continue
        rng.shuffle(paths)
        last = ""
        for path in paths:
            name, text = str(path.relative_to(root)), path.read_text(encoding="utf-8", errors="replace")
            each[name] = tokenizer(f"# {name}\n{text}\n", add_special_tokens=False, verbose=False)["input_ids"]
            last = last or (name if len(each[name]) >= 4 * behind else "")
            if last and sum(map(len, each.values())) >= tokens + len(each[last]):
                break
        else:
            continue
        ids = each.pop(last)
        cut = rng.randrange(len(ids) // 2, len(ids) - behind)
        before = [*(i for one in each.values() for i in one), *ids[:cut]]
        yield Task(package.name, tuple(before[-tokens:]), tuple(ids[cut:]))
        count -= 1
        if not count:
            return
    raise CommandError(f"--tokens {tokens}: {count} more of Python's packages would have to be that long; pass less")


def read(
    reader: Reader, contender: Contender | None, task: Task, turns: int, each: int, greedy: int, tokenizer: Any
) -> Iterator[Row]:
    """The answers behind a prefill by a contender, or by the stock model; further turns bring `each` tokens more."""
    ids, cache, label = (
        torch.tensor([task.ids], device=reader.device),
        None,
        "stock" if contender is None else contender.label,
    )
    known = 0  # tokens in the cache
    for turn in range(turns):
        with _attached(reader.model, contender) as handle:
            rows, cache = reader.prefill(ids[:, known:], cache)
        last = rows[len(rows) - 1 : len(rows)][0]
        known, start = ids.shape[1], turn * each
        truth = torch.tensor(task.behind[start : start + each], device=reader.device)
        answer, _ = _decoded(reader, cache, last, greedy)
        _, logits = _decoded(reader, cache, last, len(truth), truth)
        density = 1.0 if handle is None else float(handle.report().density or 1.0)
        found = answer.tolist()
        alike = SequenceMatcher(None, found[: len(truth)], truth.tolist(), autojunk=False).ratio()
        own = _by_dense(reader, ids, answer)
        names = _names(tokenizer, found, ids[0].tolist())
        yield Row(
            task.name, turn, label, float(surprises(logits, truth).mean()), alike, own, _loops(found), names, density
        )
        ids = torch.cat([ids, truth[None]], 1)


def _decoded(
    reader: Reader, cache: Any, first: Tensor, count: int, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `Reader.decode`, of whose tokens the cache keeps none."""
    found = reader.decode(cache, first, count, given)
    if count > 1:
        cache.crop(1 - count)
    return found


def _attached(model: Any, contender: Contender | None) -> AbstractContextManager[Any]:
    if contender is None:
        return nullcontext()
    return attach(model, contender.pipeline, gate=None, tail=contender.dense_tail, verify=False, recall_every=0)


def _by_dense(reader: Reader, ids: Tensor, answer: Tensor) -> float:
    """Mean negative log-likelihood of an answer behind a dense prefill."""
    rows, _ = reader.prefill(torch.cat([ids, answer[None].to(ids.device)], 1))
    count = len(answer)
    return float(surprises(rows[len(rows) - count - 1 : len(rows) - 1], answer).mean())


def _loops(answer: Sequence[int]) -> float:
    runs = [tuple(answer[i : i + GRAM]) for i in range(len(answer) - GRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _names(tokenizer: Any, answer: Sequence[int], prompt: Sequence[int]) -> float:
    mine = {one for one in NAME.findall(tokenizer.decode(answer)) if not keyword.iskeyword(one)}
    theirs = set(NAME.findall(tokenizer.decode(prompt)))
    return len(mine & theirs) / len(mine) if mine else 1.0


@app.callback(invoke_without_command=True)
def long(
    model: Model = None,
    method: Methods = None,
    settings: Settings = None,
    config: Configs = None,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of a prompt.")] = 8192,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, each of another package.")] = 4,
    greedy: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 512,
    behind: Annotated[
        int, typer.Option(min=1, help="Tokens of the file that an answer is held to; of a turn, too.")
    ] = 256,
    turns: Annotated[int, typer.Option(min=1, help="Turns; each brings that much more of the file.")] = 1,
    seed: Seed = 100,
    device: Device = "auto",
    dtype: Type = Dtype.AUTO,
    threads: Threads = 2,
    json: JsonFile = None,
) -> None:
    """Show what answers of hundreds of tokens become behind a sparse prefill; rowmax by default."""
    names = method or (() if config else ["rowmax"])
    contenders = options.contenders(default_registry(), names, settings or (), model, TAIL, configs=config or ())
    place = Place.of(device, dtype.value, threads)
    found: list[Row] = []
    with place.threaded(), torch.inference_mode():
        source = Source.of(model, place)
        given = list(tasks(source.tokenizer, tokens, behind * turns, prompts, seed))
        reader = Reader(source.load())
        about = {"model": model or "embedded", "tokens": tokens, "greedy": greedy, "behind": behind, "seed": seed}
        for task in given:
            for one in (None, *contenders):
                found += read(reader, one, task, turns, behind, greedy, source.tokenizer)
            if str(json) != "-":  # after each prompt: a run of hours may end before the last
                write_figures(json, facts.about(place.device, **about, rows=[*map(asdict, found)]))
    typer.echo(f"| prefill | turn | pairs | {' | '.join(COLUMNS)} |\n|---|---:|---:|{'---:|' * len(COLUMNS)}")
    for label in dict.fromkeys(one.method for one in found):
        for turn in range(turns):
            mine = [one for one in found if (one.method, one.turn) == (label, turn)]
            cells = " | ".join(_mean([getattr(one, name) for one in mine]) for name in COLUMNS)
            typer.echo(f"| {label} | {turn} | {fmean(one.density for one in mine):.1%} | {cells} |")
    if str(json) == "-":
        write_figures(json, facts.about(place.device, **about, rows=[*map(asdict, found)]))


def _mean(numbers: Sequence[float]) -> str:
    error = f" ± {stdev(numbers) / len(numbers) ** 0.5:.3f}" if len(numbers) > 1 else ""
    return f"{fmean(numbers):.3f}{error}"


if __name__ == "__main__":
    app()
