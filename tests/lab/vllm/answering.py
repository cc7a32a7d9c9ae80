"""Needle questions that come over time at a trained model: how many are answered right, and how soon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen
from sparseprefill.adapters.cli.group import CommandError
from sparseprefill.adapters.demo.model import CHECKPOINT, load_tokenizer
from sparseprefill.adapters.demo.tasks import FAMILIES, Task, make_task, score

from lab.bench.shape import ModelShape
from sparseprefill.profiles.table import Progress

from .counters import tokens
from .engine import Engine, Setup, described
from .first_token import Contender
from .traffic import Desk, Life, arrivals
from .under_load import SEQUENCES, WASTE, Times, sparse_share

EMBEDDED = "embedded"


@frozen(kw_only=True)
class Answered:
    """All questions at one engine. right, asked: values of their answers; stock: `right` of vLLM's own attention.
    same: questions with the very tokens of vLLM's own attention. sparse, fallbacks, slower: see `Loaded`."""

    backend: str
    parameters: Mapping[str, Any] = field(factory=dict)
    requests: int = 0
    prompts: int = 0
    right: int = 0
    asked: int = 0
    stock: int | None = None
    same: int | None = None
    times: Times | None = None
    sparse: float | None = None
    fallbacks: Mapping[str, int] = field(factory=dict)
    slower: Mapping[str, int] = field(factory=dict)
    error: str = ""


@define(kw_only=True)
class Answering:
    """Asks every contender the same questions. tasks: one question each. rate, budget: see `UnderLoad`."""

    setup: Setup
    tokenizer: Any
    tasks: Sequence[Task]
    rate: float = 0.0
    budget: int = 8192
    _stock: tuple[int, list[list[int]]] | None = field(default=None, init=False)

    def run(self, contender: Contender, progress: Progress = lambda what, done, of: None) -> Iterator[Answered]:
        """The row of a contender. The first one without a method is what the others are compared with."""
        progress("asking", 0, 1)
        try:
            with self.setup.engine(contender.sparse, **self._sizes()) as engine:
                if contender.sparse is not None:
                    engine.check_backend()
                yield self._row(engine, contender)
        except CommandError:
            raise
        except Exception as error:  # whatever vLLM raises: other engines may do
            yield Answered(backend=contender.name, parameters=contender.parameters, error=described(error))

    @property
    def answer(self) -> int:
        """Tokens of the longest answer."""
        return max(len(self._ids(task.questions[0].answer, add_special_tokens=False)) for task in self.tasks)

    def _sizes(self) -> dict[str, Any]:
        lengths = [task.length + self.answer + WASTE for task in self.tasks]
        switches = {"enable_prefix_caching": False, "enable_chunked_prefill": True}
        steps = {"max_num_seqs": min(SEQUENCES, len(lengths)), "max_num_batched_tokens": self.budget}
        return {"longest": max(lengths), "kept": sum(lengths), **steps, **switches}

    def _ids(self, text: str, **options: Any) -> list[int]:
        found: list[int] = self.tokenizer(text, **options)["input_ids"]
        return found

    def _row(self, engine: Engine, contender: Contender) -> Answered:
        desk = Desk(engine, self.answer)
        desk.serve([Life(self._ids(self.tasks[0].prompt()))])  # warms up
        times = islice(arrivals(self.rate, self.setup.seed), len(self.tasks))
        lives = [Life(self._ids(task.prompt()), at) for task, at in zip(self.tasks, times, strict=True)]
        before, calls = tokens() if contender.sparse else (0.0, 0.0), engine.fallbacks()
        slower = engine.slower()
        seconds = desk.serve(lives)
        said = [life.tokens for life in lives]
        scores = [score(task, [self.tokenizer.decode(ids)]) for task, ids in zip(self.tasks, said, strict=True)]
        row = Answered(
            backend=contender.name,
            parameters=contender.parameters,
            requests=len(lives),
            prompts=sum(len(life.prompt) for life in lives),
            right=sum(right for right, _ in scores),
            asked=sum(asked for _, asked in scores),
            times=Times.of(lives, seconds),
            sparse=sparse_share(engine, before),
            fallbacks=dict(engine.fallbacks() - calls),
            slower=dict(engine.slower() - slower),
        )
        if contender.sparse is None:
            self._stock = row.right, said
            return row
        if self._stock is None:
            return row
        right, theirs = self._stock
        return evolve(row, stock=right, same=sum(a == b for a, b in zip(said, theirs, strict=True)))


def folder_of(model: str) -> Path:
    """``embedded`` or a folder; CommandError where no model is."""
    folder = CHECKPOINT if model == EMBEDDED else Path(model)
    if not (folder / "config.json").is_file():
        raise CommandError(f"--model {model}: no config.json in this folder; write {EMBEDDED} or a model's folder")
    return folder


def shape_of(folder: Path, dtype: str) -> ModelShape:
    """The sizes of a Llama on disk, from its configuration. Needs transformers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    heads = int(config.num_attention_heads)
    return ModelShape(
        layers=int(config.num_hidden_layers),
        hidden=int(config.hidden_size),
        inner=int(config.intermediate_size),
        heads=heads,
        kv_heads=int(config.num_key_value_heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocabulary=int(config.vocab_size),
        dtype=dtype,
    )


def questions(folder: Path, lengths: Sequence[int], requests: int, seed: int) -> tuple[Any, list[Task]]:
    """The model's tokenizer and one task a request, families and lengths in turns; CommandError where a length is too
    small for its needles."""
    tokenizer = load_tokenizer(folder)
    try:
        tasks = [
            make_task(tokenizer, FAMILIES[i % len(FAMILIES)], lengths[i // len(FAMILIES) % len(lengths)], seed + i)
            for i in range(requests)
        ]
    except ValueError as error:
        raise CommandError(f"--length {min(lengths)}: {error}; raise it") from error
    return tokenizer, tasks


def families(tasks: Sequence[Task]) -> dict[str, int]:
    """How many questions of each family."""
    return dict(Counter(task.family for task in tasks))
