"""Offline tuning: the cheapest setting of a method whose answers stay within a stated loss of dense, by length.

SampleAttention tunes (alpha_c, alpha_s, chunk_n) so (sections 4.4 and 5.3). Nothing here knows a method, a model or a
task: a method brings its search space (`Method.search`), the caller a function that measures one pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Literal

from attrs import field, frozen

from sparseprefill.errors import ParameterError
from sparseprefill.method import Method
from sparseprefill.pipeline import Pipeline
from sparseprefill.profiles.profile import LengthRange

from ..progress import Steps

By = Literal["density", "seconds"]


@frozen
class Measured:
    """What one setting did on the tasks of one length.

    right, asked: answers. density: pairs computed / causal pairs. seconds: of the prefills. error: what stopped it.
    """

    right: int
    asked: int
    density: float
    seconds: float
    error: str = ""

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return self.right / self.asked if self.asked else 0.0


Measure = Callable[[Pipeline | None, int], Measured]
"""Runs a pipeline, or the model's own attention for None, on the tasks of a length in tokens."""


@frozen
class Trial:
    """A setting and what it did."""

    parameters: Mapping[str, Any] = field(hash=False)
    measured: Measured


@frozen
class Search:
    """All trials at one length. chosen: the one to keep, None where no setting was accurate enough."""

    tokens: int
    dense: Measured
    trials: tuple[Trial, ...]
    chosen: Trial | None


def settings(
    method: Method, values: Mapping[str, Sequence[Any]] | None = None, fixed: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Every combination of the method's search space, each checked against the method's own bounds.

    values: in place of, or besides, the parameters of `Method.search`. fixed: parameters that every setting has.
    ParameterError where the method declares nothing to search, or a value does not fit.
    """
    fixed = fixed or {}
    space = {name: tried for name, tried in {**method.search, **(values or {})}.items() if name not in fixed}
    if not space:
        raise ParameterError(f"{method.name} declares no search space: name the values to try of a parameter")
    for name, tried in space.items():
        if isinstance(tried, str) or not tried:
            raise ParameterError(f"{method.name}: the values to try of {name} are {tried!r}: pass one or more")
    made = [{**fixed, **dict(zip(space, chosen, strict=True))} for chosen in product(*space.values())]
    for one in made:
        method.configure(one)
    return made


def search(
    method: Method,
    tokens: int,
    measure: Measure,
    tried: Sequence[Mapping[str, Any]],
    *,
    by: By = "density",
    loss: float = 0.01,
    progress: Steps = lambda done, of: None,
) -> Search:
    """Measure dense and every setting at one length, and choose.

    Kept is the setting of least density, or fewest seconds, among those with at least ``1 - loss`` of dense's accuracy;
    of equals the more accurate one, then the earlier one. A setting that fails with an error is out.
    """
    if not 0.0 <= loss < 1.0:
        raise ParameterError(f"loss is {loss}: pass a share of dense's accuracy, from 0 to less than 1")
    dense = measure(None, tokens)
    if dense.error or not dense.right:
        reason = dense.error or f"0 of {dense.asked} answers are right"
        raise ParameterError(f"at {tokens} tokens the model's own attention fails the tasks ({reason}): tune on others")
    trials = []
    for done, parameters in enumerate(tried):
        progress(done, len(tried))
        trials.append(Trial(parameters, measure(method.pipeline(**parameters), tokens)))
    progress(len(tried), len(tried))
    # The difference of two quotients is rounded: a setting as accurate as allowed must not fail by that.
    least = (1.0 - loss) * dense.accuracy - 1e-9
    good = [one for one in trials if not one.measured.error and one.measured.accuracy >= least]
    chosen = min(good, key=lambda one: (getattr(one.measured, by), -one.measured.accuracy), default=None)
    return Search(tokens, dense, tuple(trials), chosen)


def ranges(found: Iterable[Search]) -> tuple[LengthRange, ...]:
    """Ranges of a profile: the setting of each tuned length serves up to half the way to the next."""
    ordered = sorted(found, key=lambda one: one.tokens)
    made = []
    for i, one in enumerate(ordered):
        facts: dict[str, Any] = {"dense_right": one.dense.right, "dense_seconds": one.dense.seconds}
        if one.chosen is not None:
            did = one.chosen.measured
            facts |= {"right": did.right, "asked": did.asked, "density": did.density, "seconds": did.seconds}
        made.append(
            LengthRange(
                least=0 if i == 0 else (ordered[i - 1].tokens + one.tokens) // 2,
                tokens=one.tokens,
                parameters=None if one.chosen is None else dict(one.chosen.parameters),
                measured=facts,
            )
        )
    return tuple(made)
