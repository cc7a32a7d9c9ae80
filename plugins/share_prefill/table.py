"""ClusterTable: which attention heads of a model look alike; as a checked JSON file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar

from attrs import field, frozen

from sparseprefill import structure
from sparseprefill.errors import ParameterError, printed
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.table import ModelTable
from sparseprefill.validate import number, whole

NOISE = -1
Spot = tuple[Annotated[int, whole(0)], Annotated[int, whole(0)]]
"""(layer, query head)."""


@frozen(kw_only=True)
class ClusterTable(ModelTable):
    """Clusters of (layer, head), and the noise: heads that are like no other.

    clusters: tuples of heads, each head in one of them or in `noise`. model: whose heads they are; None for a table
    written by hand, where a head without an entry is noise. made: how the table was made, for people.
    """

    SCHEMA: ClassVar[structure.Schema] = structure.Schema(
        "sparseprefill.clusters", 1, "make one with sparseprefill cluster", short=True
    )

    clusters: tuple[tuple[Spot, ...], ...]
    noise: tuple[Spot, ...] = ()
    model: ModelIdentity | None = None
    made: Mapping[str, Any] = field(factory=dict, hash=False)

    def __attrs_post_init__(self) -> None:
        seen: dict[Spot, str] = {}
        groups = {**{f"clusters[{i}]": heads for i, heads in enumerate(self.clusters)}, "noise": self.noise}
        for name, heads in groups.items():
            if not heads and name != "noise":
                raise ParameterError(f"{name} is empty: leave it out")
            for head in heads:
                if head in seen:
                    raise ParameterError(f"{name}: {_words(head)} is in {seen[head]} already: leave it out of one")
                seen[head] = name
        if self.model is None:
            return
        layers, count = self.model.layers, self.model.heads
        unknown = [head for head in seen if not (0 <= head[0] < layers and 0 <= head[1] < count)]
        if unknown:
            head = min(unknown)
            raise ParameterError(
                f"{seen[head]}: {_words(head)} does not exist in a model of {layers} layers with {count} heads: "
                "remove it"
            )
        if len(seen) < layers * count:  # the first that lacks is among the first so many and one
            lacking = next(head for i in range(len(seen) + 1) if (head := divmod(i, count)) not in seen)
            raise ParameterError(f"clusters: {_words(lacking)} is neither in a cluster nor in noise: add it to one")

    @cached_property
    def labels(self) -> Mapping[Spot, int]:
        """Index of the cluster by (layer, head); heads of the noise are left out."""
        return {head: label for label, heads in enumerate(self.clusters) for head in heads}

    def label(self, layer: int, head: int) -> int:
        """Index of the head's cluster, or NOISE."""
        return self.labels.get((layer, head), NOISE)

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First and last layer of each cluster."""
        layers = [[layer for layer, _ in heads] for heads in self.clusters]
        return tuple((min(one), max(one)) for one in layers)


def parse(facts: object) -> object:
    """A mapping ``{(layer, head): cluster}``, in which None is noise, as a table; other data as it is."""
    if not isinstance(facts, Mapping):
        raise ParameterError(f"clusters is {type(facts).__name__}: pass a path, or a mapping")
    if not facts:
        raise ParameterError("clusters is an empty table: pass {(layer, head): cluster}, or what a cluster file holds")
    return _by_hand(facts) if all(isinstance(key, tuple) for key in facts) else facts


def _by_hand(facts: Mapping[Any, Any]) -> ClusterTable:
    named: dict[int, list[Spot]] = {}
    noise = []
    for key, label in facts.items():
        at = f"clusters[{printed(key)}]"
        head = structure.structure(Spot, key, at)
        if label is None or label == NOISE:
            noise.append(head)
        elif isinstance(label, int) and not isinstance(label, bool) and label >= 0:
            named.setdefault(label, []).append(head)
        else:
            raise ParameterError(f"{at} is {printed(label)}: pass the number of a cluster, or None for noise")
    return ClusterTable(clusters=tuple(tuple(named[label]) for label in sorted(named)), noise=tuple(noise))


def _words(head: Iterable[int]) -> str:
    return "layer {}, head {}".format(*map(printed, head))


@frozen(kw_only=True)
class Settings:
    """Clustering of heads.

    block: tokens of a block of the maps. threshold: largest distance of heads in one cluster. min_size: minimum heads
    in a cluster; smaller ones are noise. latent: numbers that a map is compressed to. epochs: maximum epochs of
    training for the autoencoder. seed: chooses the samples, and how the training begins.
    """

    block: int = field(default=128, validator=whole(16))
    threshold: float = field(default=10.0, validator=number(0.0))
    min_size: int = field(default=5, validator=whole())
    latent: int = field(default=64, validator=whole())
    epochs: int = field(default=1000, validator=whole())
    seed: int = field(default=0, validator=whole(0))
