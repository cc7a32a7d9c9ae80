"""What one contender did to one prompt, and to several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

import torch
from attrs import field, frozen

from sparseprefill.mask.mask import SparseMask

from .contender import Contender
from .divergence import Divergence, pooled


@frozen
class Fidelity:
    """Next-token distributions after a sparse prefill, against those after the model's own.

    last: of the last rows of the prefill itself. tail: of the text that follows, read with dense attention behind the
    sparse prefill's cache. greedy: of dense's own greedy continuation, decoded so. parted: tokens of the greedy
    continuation until sparse would have chosen another, None where it never did.
    """

    last: Divergence
    tail: Divergence
    greedy: Divergence
    parted: int | None

    @property
    def all(self) -> Divergence:
        """Over the rows of all three."""
        return pooled([self.last, self.tail, self.greedy])


@frozen
class Layer:
    """One layer: pairs computed over causal pairs, and the attention mass that each head kept.

    recalls: of each head, averaged over rows of the whole prompt. last: the same over the prompt's last rows alone.
    reason: why the layer ran dense, empty where it ran sparse. lowest: the mask of the head that keeps least, by
    either; None where the layer ran dense.
    """

    index: int
    density: float
    recalls: tuple[float, ...]
    last: tuple[float, ...] = ()
    reason: str = ""
    lowest: tuple[int, SparseMask] | None = field(default=None, repr=False, eq=False)


@frozen
class Outcome:
    """What one contender did to one prompt.

    tokens: that were prefilled. fidelity: None for the stock model, which all is held against. seconds: of the
    prefill, median. extra_bytes: device memory at the prefill's peak beyond the stock model's; None on a CPU. answers:
    values right and asked by family of task, where tasks were asked. mask: of the one head that was asked for, None
    where its layer ran dense. error: what stopped the contender; the other figures are then empty.
    """

    contender: Contender
    prompt: str = ""
    tokens: int = 0
    fidelity: Fidelity | None = None
    seconds: float = 0.0
    extra_bytes: int | None = None
    layers: tuple[Layer, ...] = ()
    answers: Mapping[str, tuple[int, int]] = field(factory=dict)
    mask: SparseMask | None = field(default=None, repr=False, eq=False)
    notes: Mapping[str, int] = field(factory=dict)
    error: str = ""

    @property
    def right(self) -> int:
        """Values that were right."""
        return sum(right for right, _ in self.answers.values())

    @property
    def asked(self) -> int:
        """Values that were asked."""
        return sum(asked for _, asked in self.answers.values())

    @property
    def density(self) -> float:
        """Pairs computed over causal pairs, averaged over the layers; a layer that ran dense counts as 1."""
        return fmean(layer.density for layer in self.layers) if self.layers else 1.0


@frozen
class Summary:
    """What one contender did to several prompts: means, but for what says otherwise.

    prompts: that came through. failed: the first error of the others, by prompt. parted: median over the prompts,
    where one that never parted counts as all its tokens. recall, p5, lowest: over layers, heads and prompts, of
    sampled rows; the last_ ones, of the prompts' last rows. seconds: summed over the prompts.
    """

    contender: Contender
    prompts: int
    failed: Mapping[str, str] = field(factory=dict)
    divergence: Divergence | None = None
    perplexity_ratio: float | None = None
    parted: float | None = None
    recall: float = 1.0
    p5: float = 1.0
    lowest: float = 1.0
    last_recall: float = 1.0
    last_p5: float = 1.0
    last_lowest: float = 1.0
    density: float = 1.0
    seconds: float = 0.0
    extra_bytes: int | None = None
    answers: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], greedy: int) -> Summary:
        """Of one contender's outcomes. greedy: tokens of the greedy continuation."""
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
            divergence=pooled([fact.all for fact in facts]) if facts else None,
            perplexity_ratio=pooled([fact.tail for fact in facts]).perplexity_ratio if facts else None,
            parted=median(greedy if fact.parted is None else fact.parted for fact in facts) if facts else None,
            **_spread("", recalls),
            **_spread("last_", last),
            density=fmean(one.density for one in done),
            seconds=sum(one.seconds for one in done),
            extra_bytes=max(extra) if extra else None,
            answers=(sum(one.right for one in done), sum(one.asked for one in done)),
        )


def _spread(prefix: str, recalls: Sequence[float]) -> dict[str, float]:
    if not recalls:
        return {}
    found = torch.tensor(recalls, dtype=torch.float64)
    fifth = float(found.nanquantile(0.05))
    return {f"{prefix}recall": fmean(recalls), f"{prefix}p5": fifth, f"{prefix}lowest": min(recalls)}
