"""With a mask of every key, does the engine say what it says with vLLM's own attention?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import asdict, frozen
from sparseprefill.adapters.cli.group import CommandError

from sparseprefill.profiles.table import Progress

from .compare import Answer, Compared, differ
from .engine import Engine, Setup, described, prompt
from .sheet import Form

LENGTHS = (3000, 1700, 517, 40, 9001)
CANDIDATES = 5
"""Likeliest tokens whose log probabilities are compared."""
TURNS = ("first", "cached")


@frozen(kw_only=True)
class Equality:
    """Prompts of several lengths at once, in chunks, in both engines; then others that begin as they do.

    lengths: of the prompts. sparse: our engine's table of options. budget: tokens of a step. answer: tokens to decode.
    """

    setup: Setup
    sparse: Mapping[str, Any]
    lengths: Sequence[int] = LENGTHS
    budget: int = 2048
    answer: int = 16

    def run(
        self, cache: str, block: int | None, progress: Progress = lambda what, done, of: None
    ) -> Iterator[Compared]:
        """A row a prompt; one row with the error where an engine fails, or runs nothing sparse."""
        options: dict[str, Any] = {"kv_cache_dtype": cache, **({} if block is None else {"block_size": block})}
        try:
            progress(self.setup.stock, 0, 2)
            stock, _ = self._answers(None, options)
            progress("ours", 1, 2)
            ours, report = self._answers(self.sparse, options)
        except CommandError:
            raise
        except Exception as error:  # whatever vLLM raises: other rows may do
            yield Compared(cache=cache, block=block, error=described(error))
            return
        calls, fallbacks = sum(layer["sparse_calls"] for layer in report.get("layers", ())), report.get("fallbacks", {})
        if not calls:
            yield Compared(cache=cache, block=block, fallbacks=fallbacks, error="no call ran sparse")
            return
        facts = {"cache": cache, "block": block, "sparse_calls": calls, "fallbacks": fallbacks}
        for turn, theirs, mine in zip(TURNS, stock, ours, strict=True):
            for length, a, b in zip(self.lengths, theirs, mine, strict=True):
                yield Compared(**facts, turn=turn, tokens=length, cached=b.cached, **differ(a, b))

    def prompts(self, turn: str) -> list[list[int]]:
        """Those of the second turn begin with half of those of the first."""
        words = self.setup.shape.vocabulary
        made = [prompt(length, words, self.setup.seed + i) for i, length in enumerate(self.lengths)]
        if turn == TURNS[0]:
            return made
        return [ids[: len(ids) // 2] + prompt(len(ids) - len(ids) // 2, words, -1 - i) for i, ids in enumerate(made)]

    def _answers(
        self, sparse: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> tuple[list[list[Answer]], dict[str, Any]]:
        sizes = {"longest": max(self.lengths) + self.answer, "kept": 2 * (sum(self.lengths) + 16 * self.answer)}
        steps = {"max_num_batched_tokens": self.budget, "max_num_seqs": max(8, len(self.lengths))}
        switches = {"enable_prefix_caching": True, "enable_chunked_prefill": True}
        with self.setup.engine(sparse, **sizes, **steps, **switches, **options) as engine:
            engine.apply(_whole_queries)
            return [self._turn(engine, turn) for turn in TURNS], engine.report()

    def _turn(self, engine: Engine, turn: str) -> list[Answer]:
        return [Answer.of(one) for one in engine.ask(self.prompts(turn), self.answer, CANDIDATES)]


def _whole_queries(model: torch.nn.Module) -> None:
    """Over an fp8 cache vLLM's own attention rounds queries to fp8, too, and the adapter does not: so neither shall."""
    layers: list[Any] = list(model.modules())
    for module in layers:
        if getattr(module, "query_quant", None) is not None:
            module.query_quant = None


def form(check: Equality, tie: float) -> Form:
    """How the rows are shown. tie: see `Compared.tied`."""
    shape = check.setup.shape
    return Form(
        title=f"tokens against {check.setup.stock}: {shape.layers} layers of width {shape.hidden}, {shape.dtype}",
        heads=("cache", "block", "turn", "tokens", "cached", "equal", "first", "gap", "logprobs"),
        cells=lambda row: _cells(row, tie),
        fact=_fact,
        remarks=_remarks,
        notes=lambda rows: (
            f"{check.answer} tokens each, decoded greedily; all prompts in one batch, in steps of {check.budget} "
            "tokens. cached: tokens of the prompt found in the prefix cache. first: index of the first token that "
            "differs. gap: by how much vLLM's own log probability of its token there exceeds that of ours. logprobs: "
            f"largest difference of log probabilities of the {CANDIDATES} likeliest tokens up to there. Queries are "
            "not rounded to fp8, whatever the cache."
        ),
    )


def _cells(row: Compared, tie: float) -> tuple[str, ...]:
    where = (row.cache, "" if row.block is None else str(row.block))
    if row.error:
        return (*where, "", "", "", "failed", "", "", "")
    equal = "yes" if row.equal else "tie" if row.tied(tie) else "no"
    first, gap = "" if row.first is None else str(row.first), "" if row.gap is None else f"{row.gap:.4f}"
    return (*where, row.turn, str(row.tokens), str(row.cached), equal, first, gap, f"{row.logprobs:.2g}")


def _fact(row: Compared) -> dict[str, Any]:
    return {**asdict(row), "equal": row.equal, "error": row.error or None}


def _remarks(row: Compared) -> list[str]:
    where = f"cache {row.cache}, block {row.block or 'as it is'}"
    said = [f"{where}: {row.error}"] if row.error else []
    return said + [f"{where}: {count} calls ran dense: {reason}" for reason, count in row.fallbacks.items()]
