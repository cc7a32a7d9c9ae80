"""Distances of next-token distributions; contenders, and what one did to one prompt, and to several."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Protocol

import torch
from attrs import field, fields, frozen
from torch import Tensor

from sparseprefill.mask.mask import SparseMask
from sparseprefill.metrics import lowest_rows
from sparseprefill.pipeline import Pipeline
from sparseprefill.route import Route

from ..session.defaults import TAIL

AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Logits that are widened to float32 at once: as many as a CPU's cache holds, or a small part of a GPU's memory."""
LEAST_ROWS = 64
"""Rows whose logits are made at once, at least: a large vocabulary's head is read from memory once for all of them."""
CELLS = 128
"""Cells of a mask's sketch, along either side, at most."""
STEADY = 1.5
"""The stock model's longest time over its shortest, up to which times mean something."""
GOT = 0.8
"""Share of one processor that a process that computes all the time has at least, where nothing else wants it."""


class Logits(Protocol):
    """Logits of some rows: a tensor ``[n, vocabulary]``, or what makes a part of it when asked."""

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def __getitem__(self, rows: slice, /) -> Tensor:
        """Logits ``[n, vocabulary]`` of a part."""
        ...


@frozen(eq=False)
class Divergence:
    """Distributions of a sparse prefill beside dense's, over some rows.

    each: KL(dense || sparse) of every row, in nats, float64 ``[n]`` on the CPU. agreement: share of the rows in which
    both choose the same token. surprise, dense_surprise: mean negative log-likelihood, in nats, of the text's own
    tokens, NaN where none are known.
    """

    each: Tensor = field(repr=False)
    agreement: float
    surprise: float = math.nan
    dense_surprise: float = math.nan

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.each.numel()

    @property
    def kl(self) -> float:
        """Mean KL(dense || sparse) over the rows, in nats."""
        return float(self.each.mean())

    @property
    def high(self) -> float:
        """The 99th percentile of the rows' KL, in nats."""
        return float(self.each.quantile(0.99))

    @property
    def worst(self) -> float:
        """The largest KL of a row, in nats."""
        return float(self.each.max())

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the text after the sparse prefill over that after the dense one; infinity beyond all floats."""
        try:
            return math.exp(self.surprise - self.dense_surprise)
        except OverflowError:
            return math.inf

    @property
    def nll_ratio(self) -> float:
        """Mean negative log-likelihood of the text after the sparse prefill over that after the dense one."""
        return self.surprise / self.dense_surprise if self.dense_surprise else math.nan

    @property
    def figures(self) -> dict[str, float | int | None]:
        """Everything but the rows one by one, by name; None for what is not known."""
        names = ("rows", "kl", "high", "worst", "agreement", "surprise", "dense_surprise", "nll_ratio")
        known = {name: getattr(self, name) for name in names}
        return {name: None if value != value else value for name, value in known.items()}


def compare(dense: Logits, sparse: Logits, text: Tensor | None = None) -> Divergence:
    """Logits of dense beside those of sparse, row by row; dense's may be log-probabilities, on any device.

    text: the tokens ``[n]`` that follow in the text, where they are known. One wait for the device.
    """
    kl, same, own, dense_own = [], [], [], []
    first, step = 0, 1  # one row shows how wide they are
    while first < len(dense):
        rows = slice(first, first + step)
        given = sparse[rows]
        p, q = log_probabilities(dense[rows].to(given.device)), log_probabilities(given)
        most = AT_ONCE.get(given.device.type, AT_ONCE["cpu"])
        first, step = first + step, max(LEAST_ROWS, most // given.shape[-1])
        # 0 log 0 = 0: a token that dense excludes (-inf) adds nothing, whatever sparse makes of it.
        terms = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q))
        kl.append(terms.sum(-1).clamp(min=0.0))
        same.append(p.argmax(-1) == q.argmax(-1))
        if text is not None:
            token = text[rows].to(given.device)[:, None]
            own.append(-q.gather(1, token)[:, 0])
            dense_own.append(-p.gather(1, token)[:, 0])
    columns = [torch.cat(kl).double(), torch.cat(same).double()]
    columns += [torch.cat(part).double() for part in (own, dense_own) if part]
    each, *means = torch.stack(columns).cpu()
    return Divergence(each, *(float(one.mean()) for one in means))


def surprises(logits: Tensor, tokens: Tensor) -> Tensor:
    """Negative log-likelihood of tokens ``[n]`` by logits ``[n, vocabulary]``, in nats, float32 ``[n]``."""
    return -log_probabilities(logits).gather(1, tokens.to(logits.device)[:, None])[:, 0]


def log_probabilities(logits: Tensor) -> Tensor:
    """float32 ``[n, vocabulary]``: logarithms of the distributions, in nats."""
    return torch.log_softmax(logits.float(), -1)


def pooled(parts: Sequence[Divergence]) -> Divergence:
    """One divergence over the rows of several, such as those of several prompts."""
    each = torch.cat([part.each for part in parts])

    def mean(name: str) -> float:
        return float(sum(getattr(part, name) * part.rows for part in parts)) / each.numel()

    return Divergence(each, mean("agreement"), mean("surprise"), mean("dense_surprise"))


@frozen
class Copies:
    """Tokens of passages of a text that stand far above it, too, read where they are restated.

    right: tokens that are the likeliest. asked: all. surprise: their negative log-likelihood, summed, in nats. dense:
    those that the model's own attention gets right.
    """

    right: int = 0
    asked: int = 0
    surprise: float = 0.0
    dense: int = 0

    def __add__(self, other: Copies) -> Copies:
        """Both together."""
        sums = (getattr(self, one.name) + getattr(other, one.name) for one in fields(Copies))
        return Copies(*sums)

    @property
    def telling(self) -> bool:
        """True if the model itself copies half of them, so that what a method loses of them says something."""
        return 0 < self.asked <= 2 * self.dense

    @property
    def figures(self) -> dict[str, float | int]:
        """All of it, as plain data."""
        return {"right": self.right, "asked": self.asked, "dense_right": self.dense, "nll": self.nll}

    @property
    def kept(self) -> float:
        """Right ones over dense's; NaN where dense has none."""
        return self.right / self.dense if self.dense else math.nan

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood of a token, in nats; NaN where there is none."""
        return self.surprise / self.asked if self.asked else math.nan


@frozen
class Contender:
    """A pipeline under a name, with the parameters that made it; pipeline None is the stock model.

    dense_tail: last rows of a prompt that get every key, as `attach` does it (`tail`); 0 for the bare pipeline.
    """

    name: str
    pipeline: Pipeline | Route | None = None
    parameters: Mapping[str, Any] = field(factory=dict)
    dense_tail: int = TAIL

    @property
    def label(self) -> str:
        """The name to show."""
        return self.name if self.pipeline is not None else f"dense ({self.name})"


@frozen
class Fidelity:
    """Next-token distributions of a sparse prefill and after it, against those of the model's own.

    inside: of all rows of the prefill but its last `APART`. last: of the last rows of
    the prefill itself. tail: of the text that follows, read with dense attention behind the sparse prefill's cache.
    greedy: of dense's own greedy continuation, decoded so. parted: tokens of the greedy continuation until sparse would
    have chosen another, None where it never did.
    """

    inside: Divergence
    last: Divergence
    tail: Divergence
    greedy: Divergence
    parted: int | None

    @property
    def end(self) -> Divergence:
        """Over the rows at the end of the prompt and behind it: of `last`, `tail` and `greedy`."""
        return pooled([self.last, self.tail, self.greedy])

    @property
    def broken(self) -> bool:
        """True if a row's distribution is NaN."""
        return any(bool(part.each.isnan().any()) for part in (self.inside, self.last, self.tail, self.greedy))


@frozen(eq=False)
class Sketch:
    """One head's mask as pictures show it, on the host: a mask holds the lists of all heads on its device.

    density: selected / allowed pairs. shares: float32 ``[cells, cells]`` on the CPU, `SparseMask.shade` of the head.
    """

    density: float
    shares: Tensor = field(repr=False)

    @classmethod
    def of(cls, mask: SparseMask) -> Sketch:
        """Of a mask of one head (host sync)."""
        return cls(mask.density, mask.shade(min(CELLS, mask.geometry.kv_len))[0, 0].cpu())


@frozen
class Layer:
    """One layer: pairs computed over causal pairs, and the attention mass that each head kept.

    recalls: of each head, averaged over rows of the whole prompt. last: the same over the prompt's last rows alone.
    rows: of each head and row of the whole prompt, float64 ``[H, n]``; None where the layer ran dense. reason: why the
    layer ran dense, empty where it ran sparse. lowest: the head that keeps least, by either, and its mask, in a few
    layers where masks are pictured.
    """

    index: int
    density: float
    recalls: tuple[float, ...]
    last: tuple[float, ...] = ()
    reason: str = ""
    rows: torch.Tensor | None = field(default=None, repr=False, eq=False)
    lowest: tuple[int, Sketch] | None = field(default=None, repr=False, eq=False)

    @property
    def row_lowest(self) -> tuple[float, ...]:
        """Recall of the lowest of `rows`, of each head, 1 where it has none; empty where the layer ran dense."""
        return () if self.rows is None else tuple(self.rows.nan_to_num(nan=1.0).amin(-1).tolist())


@frozen
class Outcome:
    """The outcome of one contender on one prompt.

    tokens: that were prefilled. fidelity: None for the stock model, which all is held against. seconds: of the
    prefill, median. extra_bytes: device memory at the prefill's peak beyond the stock model's; None on a CPU. inside:
    answers right and asked inside the prompt, by family, where it has any. copies: what became of passages that are
    restated in it, None where there are none. answers: values right and asked behind the
    prompt, by family of task, where tasks were asked. mask: of the one head that was asked for, None
    where its layer ran dense. error: what stopped the contender; the other figures are then empty. beside: seconds of a
    prefill of the stock model right before or behind this one's; None where none was timed there.
    """

    contender: Contender
    prompt: str = ""
    tokens: int = 0
    fidelity: Fidelity | None = None
    seconds: float = 0.0
    extra_bytes: int | None = None
    layers: tuple[Layer, ...] = ()
    inside: Mapping[str, tuple[int, int]] = field(factory=dict)
    copies: Copies | None = None
    answers: Mapping[str, tuple[int, int]] = field(factory=dict)
    mask: Sketch | None = field(default=None, repr=False, eq=False)
    notes: Mapping[str, int] = field(factory=dict)
    error: str = ""
    beside: float | None = None

    @property
    def score(self) -> tuple[int, int]:
        """Values right and asked behind the prompt."""
        return _total(self.answers.values())

    @property
    def inside_score(self) -> tuple[int, int]:
        """Answers right and asked inside the prompt."""
        return _total(self.inside.values())

    @property
    def density(self) -> float:
        """Pairs computed over causal pairs, averaged over the layers; a layer that ran dense counts as 1."""
        return fmean(layer.density for layer in self.layers) if self.layers else 1.0


@frozen
class Summary:
    """The outcome of one contender on several prompts: means, but for what says otherwise.

    prompts: that came through, of `lengths` tokens. failed: the first error of the others, by prompt. inside, end:
    next-token distributions over rows of the whole prompts, and at their ends and behind them; see `Fidelity`.
    perplexity_ratio: of the text that follows the prompts. answers_inside, answers: right and asked inside the
    prompts, and behind them. parted: median over the prompts, where one that never parted counts as all its tokens.
    recall, p5, lowest: over layers, heads and prompts, of the heads' means over sampled rows; the last_ ones, of
    the prompts' last rows. row_p1, row_lowest: the 1st percentile and the lowest of the sampled rows themselves, of
    every head; a layer that ran dense has none. seconds: summed over the prompts. copies: restated tokens, of all
    prompts. each: the outcomes, of the prompts that came through.
    """

    contender: Contender
    prompts: int
    failed: Mapping[str, str] = field(factory=dict)
    inside: Divergence | None = None
    end: Divergence | None = None
    perplexity_ratio: float | None = None
    parted: float | None = None
    recall: float = 1.0
    p5: float = 1.0
    lowest: float = 1.0
    last_recall: float = 1.0
    last_p5: float = 1.0
    last_lowest: float = 1.0
    row_p1: float = 1.0
    row_lowest: float = 1.0
    density: float = 1.0
    seconds: float = 0.0
    extra_bytes: int | None = None
    answers_inside: tuple[int, int] = (0, 0)
    answers: tuple[int, int] = (0, 0)
    copies: Copies = Copies()
    each: tuple[Outcome, ...] = field(default=(), repr=False)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt that came through."""
        return tuple(one.tokens for one in self.each)

    @property
    def places(self) -> dict[str, dict[str, Any]]:
        """Copies, and distributions and answers inside the prompts and at their ends, as plain data, if any."""
        made: dict[str, dict[str, Any]] = {} if not self.copies.asked else {"copies": self.copies.figures}
        for name, found, (right, asked) in (
            ("inside", self.inside, self.answers_inside),
            ("end", self.end, self.answers),
        ):
            answers = {"right": right, "asked": asked} if asked else {}
            made[name] = {**answers, **({} if found is None else found.figures)}
        return made

    def speed_up(self, stock: Summary) -> float | None:
        """Stock's prefill time, right beside this one's where it was timed there, over this one's; None where this one
        read fewer prompts."""
        beside = [one.beside for one in self.each if one.beside is not None]
        dense = sum(beside) if self.each and len(beside) == len(self.each) else stock.seconds
        return dense / self.seconds if self.seconds and self.prompts == stock.prompts else None

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], greedy: int) -> Summary:
        """Sum up one contender's outcomes. greedy: tokens of the greedy continuation."""
        done = [one for one in outcomes if not one.error]
        failed = {one.prompt: one.error for one in outcomes if one.error}
        contender = outcomes[0].contender
        if not done:
            return cls(contender, 0, failed)
        facts = [one.fidelity for one in done if one.fidelity is not None]
        recalls = [each for one in done for layer in one.layers for each in layer.recalls]
        last = [each for one in done for layer in one.layers for each in layer.last]
        extra = [one.extra_bytes for one in done if one.extra_bytes is not None]
        return cls(
            contender,
            len(done),
            failed,
            inside=pooled([fact.inside for fact in facts]) if facts else None,
            end=pooled([fact.end for fact in facts]) if facts else None,
            perplexity_ratio=pooled([fact.tail for fact in facts]).perplexity_ratio if facts else None,
            parted=median(greedy if fact.parted is None else fact.parted for fact in facts) if facts else None,
            **_spread("", recalls),
            **_spread("last_", last),
            **_rows([layer.rows for one in done for layer in one.layers if layer.rows is not None]),
            density=fmean(one.density for one in done),
            seconds=sum(one.seconds for one in done),
            extra_bytes=max(extra) if extra else None,
            answers_inside=_total([one.inside_score for one in done]),
            answers=_total([one.score for one in done]),
            copies=sum((one.copies for one in done if one.copies is not None), Copies()),
            each=tuple(done),
        )


def summaries(found: Iterable[Outcome], greedy: int) -> list[Summary]:
    """One summary for each contender, in the order in which they came. greedy: tokens of the continuation."""
    by_contender: dict[str, list[Outcome]] = {}
    for outcome in found:
        by_contender.setdefault(outcome.contender.label, []).append(outcome)
    return [Summary.of(group, greedy) for group in by_contender.values()]


def unsteady(seconds: Sequence[float]) -> str:
    """Doubt about the stock model's times, of prefills that are alike, where they lie too far apart; empty
    elsewhere."""
    if len(seconds) < 2 or max(seconds) <= STEADY * min(seconds):
        return ""
    return (
        f"times mean little here: the stock model alone took {min(seconds):.2f} to {max(seconds):.2f} s for the same "
        "prefill, so other work ran beside it; run this again when the machine is quiet"
    )


def starved(own: float, passed: float) -> str:
    """Doubt about times on a CPU, by the seconds of processors that this process had and those that passed; empty where
    it had at least most of one processor all the time."""
    if own >= GOT * passed:
        return ""
    return (
        f"times mean little here: this process had {own / passed:.0%} of one processor, so other work ran beside it; "
        "run this again when the machine is quiet"
    )


def _total(scores: Collection[tuple[int, int]]) -> tuple[int, int]:
    return sum(right for right, _ in scores), sum(asked for _, asked in scores)


def _spread(prefix: str, recalls: Sequence[float]) -> dict[str, float]:
    if not recalls:
        return {}
    found = torch.tensor(recalls, dtype=torch.float64, device="cpu")
    fifth = float(found.nanquantile(0.05))
    return {f"{prefix}recall": fmean(recalls), f"{prefix}p5": fifth, f"{prefix}lowest": min(recalls)}


def _rows(kept: Sequence[torch.Tensor]) -> dict[str, float]:
    if not kept:
        return {}
    first, lowest = (float(one) for one in lowest_rows(torch.cat([one.flatten() for one in kept])))
    return {} if math.isnan(lowest) else {"row_p1": first, "row_lowest": lowest}
