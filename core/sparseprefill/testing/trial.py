"""A trial: one pipeline on one call, run once, with the words in which a law reports a breach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from sparseprefill.call import AttentionCall
from sparseprefill.memory import Memory
from sparseprefill.method import Method
from sparseprefill.pipeline import Pipeline
from sparseprefill.plan import Result
from sparseprefill.registry import default_registry
from sparseprefill.testing.truth import allowed_pairs, difference
from sparseprefill.testing.votes import computed

Candidate = Method | Pipeline | str | Callable[..., Pipeline]


class BreachError(Exception):
    """A law does not hold; the message says what was seen."""


class NotApplicableError(Exception):
    """A law says nothing about this trial; the message says why."""


@frozen
class Subject:
    """The subject of the laws: a sparse pipeline, and the same where it keeps everything, if that is known."""

    name: str
    sparse: Pipeline
    full: tuple[Pipeline, ...]

    @classmethod
    def of(cls, candidate: Candidate, parameters: Mapping[str, Any] | None, full: Mapping[str, Any] | None) -> Subject:
        """The subject for a Method, its registered name, a Pipeline, or a function of keywords that makes one.

        What is full has the `parameters` too, but for those that `full` names.
        """
        if isinstance(candidate, str):
            candidate = default_registry().get(candidate)
        build: Callable[..., Pipeline]
        base = small = {} if parameters is None else parameters
        if isinstance(candidate, Method):
            if parameters is None:
                base, small = candidate.stand_in, {**candidate.stand_in, **candidate.small}
            full = candidate.full if full is None else full
            build = candidate.pipeline
        else:
            build = partial(evolve, candidate) if isinstance(candidate, Pipeline) else candidate
        sparse = build(**small)
        name = candidate.name if isinstance(candidate, Method) else sparse.name
        everywhere = [] if full is None else [base] if base is small else [base, small]
        return cls(name, sparse, tuple(build(**{**given, **(full or {})}) for given in everywhere))


@frozen(eq=False)
class Trial:
    """One pipeline on one call. `full` is the same method with the parameters that keep every causal key."""

    pipeline: Pipeline
    call: AttentionCall
    full: tuple[Pipeline, ...] = ()

    @cached_property
    def uncorrected(self) -> Trial:
        """The trial without a corrector; itself where there is none."""
        return self if self.pipeline.corrector is None else evolve(self, pipeline=self.pipeline.with_corrector(None))

    @cached_property
    def result(self) -> Result:
        """The result of the call as it is."""
        return self.run(self.call)

    @cached_property
    def keep(self) -> Tensor:
        """bool ``[B, Hq, Nq, Nkv]``: what that result says it computed."""
        return computed(self.call, self.result)

    @cached_property
    def allowed(self) -> Tensor:
        """bool ``[B, Nq, Nkv]``: what it may compute."""
        return allowed_pairs(self.call)

    @cached_property
    def real(self) -> Tensor:
        """bool ``[B, Hq, Nq]``: rows that are tokens, not padding."""
        return self.allowed.any(-1)[:, None].expand(self.call.q.shape[:3])

    @cached_property
    def offset(self) -> int:
        """Index among the keys of query row 0."""
        return self.call.kv_len - self.call.q.shape[2] if self.call.q_offset is None else self.call.q_offset

    def run(self, call: AttentionCall) -> Result:
        """The pipeline on a variant of the call, with a Memory of its own."""
        return self.pipeline.run(call, Memory())

    def same(self, what: str, expected: Tensor, actual: Tensor) -> None:
        """BreachError unless the two agree within the tolerance of the call's dtype."""
        found = difference(expected, actual, self.call.q.dtype)
        if found is not None:
            raise BreachError(f"{what}: {found}")

    def agree(self, what: str, expected: tuple[Tensor, Tensor], actual: tuple[Tensor, Tensor]) -> None:
        """BreachError unless output and LSE both are the `same`."""
        for name, wanted, found in zip(("output", "LSE"), expected, actual, strict=True):
            self.same(f"{name} {what}", wanted, found)


def require(holds: bool | Tensor, detail: str) -> None:
    """BreachError with `detail` unless `holds`."""
    if not bool(holds if isinstance(holds, bool) else torch.all(holds)):
        raise BreachError(detail)
