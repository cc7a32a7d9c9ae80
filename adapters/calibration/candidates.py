"""The choice of a search: settings of methods, and layers that stay dense."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, product, zip_longest
from operator import attrgetter
from typing import Any

from attrs import field, frozen

from sparseprefill import structure
from sparseprefill.errors import ParameterError
from sparseprefill.method import Method
from sparseprefill.pipeline import Pipeline
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.profile import LengthRange, Profile
from sparseprefill.route import Route

from ..evaluation.outcome import Contender
from ..session.defaults import TAIL

PROMISING = ("rowmax", "skip-softmax", "xattention", "vertical-slash", "flexprefill")
"""Methods that are tried first, should the time not suffice for all: those that kept most on real models."""


@frozen
class Candidate:
    """A method with parameters. dense_layers: indices of layers that run dense whatever it says, ascending."""

    method: Method = field(eq=attrgetter("name"))
    parameters: Mapping[str, Any] = field(hash=False)
    dense_layers: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The method's name."""
        return self.method.name

    def pipeline(self, model: ModelIdentity | None = None) -> Pipeline | Route:
        """The pipeline that runs it. model: the model that it is for; needed where layers stay dense."""
        if not self.dense_layers:
            return self.method.pipeline(**self.parameters)
        if model is None:
            raise ParameterError("dense_layers are layers of a model: pass its identity")
        only = LengthRange(
            least=0, tokens=1, method=self.name, parameters=self.parameters, dense_layers=self.dense_layers
        )
        profile = Profile(methods=(self.name,), model=model, ranges=(only,))
        return Route.by_length(profile, lambda _: self.method)

    def contender(self, model: ModelIdentity | None = None, tail: int = TAIL) -> Contender:
        """The contender that a comparison runs. tail: last rows of a prompt that get every key."""
        layers = {"dense_layers": list(self.dense_layers)} if self.dense_layers else {}
        return Contender(self.name, self.pipeline(model), {**self.parameters, **layers}, tail)


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
        structure.check_finite(one, method.name)  # a profile holds nothing else
        method.configure(one)
    return made


def candidates(
    methods: Iterable[Method],
    fixed: Mapping[str, Mapping[str, Any]] | None = None,
    values: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    last: Collection[str] = (),
) -> list[Candidate]:
    """The settings of several methods in the order in which to try them, should the time not suffice for all.

    The methods take turns, those of `PROMISING` first and those of `last` behind all others. Each begins with its
    defaults, and goes on through its search space in an order that is shuffled, the same every time; one without a
    search space has its defaults alone. fixed: parameters by method that each setting has. values: by method, as of
    `settings`.
    """
    rng = random.Random(0)
    columns = []
    places = {name: place for place, name in enumerate(PROMISING)}
    for method in sorted(methods, key=lambda one: (one.name in last, places.get(one.name, len(places)))):
        given, tried = dict((fixed or {}).get(method.name, {})), (values or {}).get(method.name, {})
        method.configure(given)
        searched = {*method.search, *tried} - set(given)
        own = [one for one in settings(method, tried, given) if one != given] if searched else []
        rng.shuffle(own)
        columns.append([Candidate(method, one) for one in [given, *own]])
    return [one for one in chain.from_iterable(zip_longest(*columns)) if one is not None]
