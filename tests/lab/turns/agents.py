"""The shape of agents: a long prefix, then turns of several thousand tokens, each read behind the cache of all before.

Every chunk is prefilled sparsely behind what sparse prefills left in the cache, so that errors could add up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen
from sparseprefill.adapters.evaluation.outcome import Contender, Divergence, compare
from sparseprefill.adapters.evaluation.prompts import Prompt, Span
from sparseprefill.adapters.evaluation.reading import Reader, Rows, hits_of
from sparseprefill.adapters.evaluation.texts import COPIES, FACTS, built_in

from .talk import Densities, Scores, attached, layers_of, told

EACH = 1024
"""Tokens of a text for each passage and each fact, where it is so long that this makes more than usual."""


@frozen
class Shape:
    """How many tokens: of the prefix, and of each of several turns."""

    prefix: int
    turn: int
    turns: int

    @property
    def tokens(self) -> int:
        """Of all together."""
        return self.prefix + self.turn * self.turns

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """First token and one behind the last, of the prefix and of every turn."""
        edges = [self.prefix + self.turn * index for index in range(self.turns + 1)]
        return list(zip([0, *edges[:-1]], edges, strict=True))


@frozen
class Chunk:
    """What one contender made of one chunk of one text. scores: which restated tokens are right, and which facts.
    divergence: from the run in which all was dense, None for that run itself. density: over all layers; one that ran
    dense counts as 1. seconds: of the chunk's prefill."""

    scores: Scores
    divergence: Divergence | None
    density: float
    seconds: float


@frozen
class Run:
    """What one contender made of one text. chunks: the prefix and every turn. reasons: why layers ran dense, with
    counts. error: what stopped it; the other figures are then empty."""

    text: str
    contender: Contender
    chunks: tuple[Chunk, ...] = ()
    reasons: Mapping[str, int] = field(factory=dict)
    error: str = ""


def texts_of(tokenizer: Any, shape: Shape, count: int, seed: int, kinds: Sequence[str]) -> list[Prompt]:
    """Texts in which passages and facts of all places are restated further down, the longer the more."""
    each = shape.tokens // EACH
    return built_in(tokenizer, shape.tokens, count, seed, kinds, copies=max(COPIES, each), facts=max(FACTS, each))


def part(prompt: Prompt, first: int, last: int) -> Prompt:
    """A chunk of a text with the token behind it, where there is one.

    Of what is restated in it, what stands in front of it, too; in the first chunk, everything.
    """

    def own(spans: Sequence[Span]) -> tuple[Span, ...]:
        # The row before a span's first token must be of this chunk, too.
        inside = [one for one in spans if first < one.first and one.last <= last]
        return tuple(
            Span(one.family, one.first - first, one.last - first)
            for one in inside
            if not first or _stands(prompt.ids, one, first)
        )

    return Prompt(prompt.name, prompt.ids[first : last + 1], own(prompt.inside), own(prompt.copies))


def _stands(ids: Sequence[int], span: Span, before: int) -> bool:
    """Whether the tokens of a span stand in front of a place, too."""
    wanted, at = tuple(ids[span.first : span.last]), -1
    while True:
        try:
            at = ids.index(wanted[0], at + 1, before)
        except ValueError:
            return False
        if tuple(ids[at : at + len(wanted)]) == wanted:
            return at + len(wanted) <= before


@frozen(eq=False)
class Dense:
    """A text, read by the model itself. rows: of every chunk."""

    reader: Reader
    prompt: Prompt
    shape: Shape
    parts: tuple[Prompt, ...]
    rows: tuple[Rows, ...]
    stock: Run

    @classmethod
    def of(cls, model: Any, prompt: Prompt, shape: Shape) -> Dense:
        """Read a text with the model's own attention."""
        reader = Reader(model)
        parts = tuple(part(prompt, first, last) for first, last in shape.chunks)
        contender = Contender("stock")
        rows, chunks, _ = _read(reader, prompt, shape, parts, contender, None)
        return cls(reader, prompt, shape, parts, rows, Run(prompt.name, contender, chunks))

    def run(self, contender: Contender) -> Run:
        """Let a contender read it. An error ends the contender alone."""
        if contender.pipeline is None:
            return self.stock
        try:
            _, chunks, reasons = _read(self.reader, self.prompt, self.shape, self.parts, contender, self.rows)
        except Exception as error:  # whatever a kernel or a compiler raises: the others are worth having
            return Run(self.prompt.name, contender, error=told(error))
        return Run(self.prompt.name, contender, chunks, reasons)


@torch.inference_mode()
def _read(
    reader: Reader,
    prompt: Prompt,
    shape: Shape,
    parts: Sequence[Prompt],
    contender: Contender,
    dense: Sequence[Rows] | None,
) -> tuple[tuple[Rows, ...], tuple[Chunk, ...], dict[str, int]]:
    """The rows of every chunk for the stock model, what is made of them, and why layers ran dense.

    On a GPU the clock runs in a second pass, in which nothing is looked at and everything is warm.
    """
    ids = torch.tensor([prompt.ids], device=reader.device)
    watch = Densities(layers_of(reader.model))
    kept, chunks, cache = [], [], None
    with attached(reader.model, contender, watch) as handle:
        for index, (first, last) in enumerate(shape.chunks):
            began = time.perf_counter()
            rows, cache = reader.prefill(ids[:, first:last], cache)
            seconds = time.perf_counter() - began
            density = 1.0 if handle is None else watch.take()
            apart = None if dense is None else _apart(parts[index], dense[index], rows)
            chunks.append(Chunk(_scores(parts[index], rows), apart, density, seconds))
            kept += [rows] if dense is None else []
        cache = None
        reasons = {} if handle is None else dict(handle.report().fallbacks)
    if not reader.on_cpu:
        with attached(reader.model, contender):
            times = _timed(reader, ids, shape)
        chunks = [evolve(one, seconds=seconds) for one, seconds in zip(chunks, times, strict=True)]
    return tuple(kept), tuple(chunks), reasons


def _scores(chunk: Prompt, rows: Rows) -> Scores:
    """Tokens of passages one by one; facts that are right to the last token."""
    copies = hits_of(chunk, [one for one in chunk.copies if one.last <= len(rows)], rows)
    facts = hits_of(chunk, [one for one in chunk.inside if one.last <= len(rows) and one.family == "facts"], rows)
    return {"copies": tuple(hit for span in copies for hit in span), "facts": tuple(map(all, facts))}


def _apart(chunk: Prompt, dense: Rows, rows: Rows) -> Divergence:
    """Over all rows of a chunk whose next token is known: all, but for the last one of the text."""
    known = slice(len(chunk.ids) - 1)
    return compare(dense.part(known), rows.part(known), torch.tensor(chunk.ids[1:]))


def _timed(reader: Reader, ids: torch.Tensor, shape: Shape) -> list[float]:
    found, cache = [], None
    for first, last in shape.chunks:
        torch.cuda.synchronize()
        began = time.perf_counter()
        _, cache = reader.prefill(ids[:, first:last], cache)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found
