"""Several contenders on several prompts, one outcome after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sparseprefill.profiles.progress import Progress

from .comparison import Ask, Comparison
from .outcome import Contender, Outcome, Summary
from .prompts import Prompt
from .reading import Sizes


class Listener(Protocol):
    """Hears which contender is at work."""

    def contender(self, name: str) -> AbstractContextManager[Progress]:
        """For the time of one contender on one prompt; gives what to call on each step."""
        ...


def outcomes(
    model: Any,
    prompts: Sequence[Prompt],
    contenders: Sequence[Contender],
    sizes: Sizes,
    listener: Listener,
    pictured: tuple[int, int] | None = None,
    ask: Ask | None = None,
) -> Iterator[Outcome]:
    """The stock model and every contender on each prompt, in this order; each is given as soon as it is there.

    Whoever stops listening keeps what came so far. pictured: layer and head whose masks are kept, of the first prompt.
    ask: asks about each prompt.
    """
    for index, prompt in enumerate(prompts):
        where = f", prompt {index + 1} of {len(prompts)}" if len(prompts) > 1 else ""
        with listener.contender(f"dense{where}") as progress:
            kept = None if index else pictured
            one = Comparison.of(model, prompt, sizes, pictured=kept, ask=ask, progress=progress)
        yield one.stock
        for contender in contenders:
            with listener.contender(f"{contender.label}{where}") as progress:
                outcome = one.run(contender, progress)
            yield outcome


def summaries(found: Iterable[Outcome], greedy: int) -> list[Summary]:
    """One summary for each contender, in the order in which they came. greedy: tokens of the continuation."""
    by_contender: dict[str, list[Outcome]] = {}
    for outcome in found:
        by_contender.setdefault(outcome.contender.label, []).append(outcome)
    return [Summary.of(group, greedy) for group in by_contender.values()]
