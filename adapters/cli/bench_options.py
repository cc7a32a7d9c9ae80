"""What the options of `bench` mean: the cases to measure, the files to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from sparseprefill.config import from_config
from sparseprefill.errors import ParameterError, nearest
from sparseprefill.pipeline import Pipeline
from sparseprefill.registry import Registry
from sparseprefill.route import Route

from ..bench import tables
from ..bench.case import Case, Shape, of_mask
from .files import check_writable
from .group import CommandError
from .options import changes

if TYPE_CHECKING:
    from .setup import Place

ALL = "all"
LENGTHS = {"cuda": (32768, 131072), "cpu": (512, 1024)}
"""Lengths unless a table or an option says otherwise."""


@frozen(kw_only=True)
class Wanted:
    """The options that choose what is measured, as they were given. layers: of a prefill that a figure is the mean of,
    None for what a method needs. news, page: see `Shape`; several of the first. place: whose memory the calls have to
    fit into. sizes: of a call, all but these and its length."""

    tables: Sequence[str] = ()
    methods: Sequence[str] = ()
    settings: Sequence[str] = ()
    configs: Sequence[Path] = ()
    masks: Sequence[str] = ()
    lengths: Sequence[int] = ()
    news: Sequence[int] = ()
    page: int = 0
    input: str | None = None
    gate: bool = False
    layers: int | None = None
    place: Place
    sizes: Mapping[str, Any]

    def cases(self, registry: Registry, device: str) -> list[Case]:
        """Every case, in order. Raises CommandError, or the library's own errors, for what does not fit."""
        try:
            return self._of_tables(registry, device) if self.tables else self._chosen(registry, device)
        except ParameterError as error:
            raise CommandError(str(error)) from error

    def pipelines(self, registry: Registry) -> list[tuple[str, Pipeline | Route]]:
        """The methods and configurations for a whole model, by label; errors as those of `cases`."""
        given = {"--table": self.tables, "--executor": self.masks, "--input": self.input, **self._chunked}
        for option, value in given.items():
            if value:
                raise CommandError(f"{option} cannot be combined with --ttft; leave one of them out")
        if self.sizes["batch"] != 1:
            raise CommandError(f"--batch {self.sizes['batch']}: --ttft times one prompt; pass 1")
        cases = self._methods(registry, [self.shape(16)])
        return [(case.label, case.pipeline) for case in cases if case.pipeline is not None]

    def _of_tables(self, registry: Registry, device: str) -> list[Case]:
        given = {"--set": self.settings, "--config": self.configs, "--executor": self.masks, "--input": self.input}
        names = list(tables.TABLES) if ALL in self.tables else list(dict.fromkeys(self.tables))
        own = {} if names == [tables.BEHIND] else self._chunked
        for option, value in {**given, "--gate": self.gate, "--layers": self.layers, **own}.items():
            if value:
                raise CommandError(f"{option} cannot be combined with --table, which has its own cases; leave one out")
        for name in names:
            if name not in tables.TABLES:
                raise CommandError(f"--table {name}: there is no such table{nearest(name, [*tables.TABLES, ALL])}")
        made = []
        for name in names:
            sizes = product(self.lengths or tables.lengths(name, device), dict.fromkeys(self.news) or [None])
            made += tables.cases(name, registry, [self.shape(*one) for one in sizes])
        wanted = [registry.get(name).name for name in self.methods]
        kept = [case for case in made if not wanted or case.name in wanted]
        if not kept:
            raise CommandError(
                f"--method {', '.join(wanted)}: --table {', '.join(names)} has no case of it; leave one of them out"
            )
        return kept

    def _chosen(self, registry: Registry, device: str) -> list[Case]:
        lengths = self.lengths or LENGTHS.get(device, LENGTHS["cpu"])
        shapes = [self.shape(*sizes) for sizes in product(lengths, dict.fromkeys(self.news) or [None])]
        masks = [of_mask(mask, shape) for shape in shapes for mask in self.masks]
        if self.masks and not (self.methods or self.configs or self.settings):
            return masks
        return [*masks, *self._methods(registry, shapes)]

    def _methods(self, registry: Registry, shapes: Sequence[Shape]) -> list[Case]:
        names = list(dict.fromkeys(self.methods)) or ([] if self.configs else tables.names(registry))
        changed = changes([registry.get(name).name for name in names], self.settings)
        more: dict[str, Any] = {"input": self.input or "heads", "gate": self.gate, "layers": self.layers}
        configured = [from_config(path) for path in self.configs]
        made = []
        for shape in shapes:
            made += [
                tables.method_case(registry, name, shape, "", parameters=given, **more)
                for name, given in changed.items()
            ]
            made += [
                Case(
                    table="",
                    name=pipeline.name,
                    shape=shape,
                    pipeline=pipeline,
                    input=self.input or "heads",
                    parameters={"config": path},
                    gate=self.gate,
                    layers=self.layers or _layers(pipeline),
                )
                for path, pipeline in zip(map(str, self.configs), configured, strict=True)
            ]
        return made

    @property
    def _chunked(self) -> dict[str, Any]:
        """Options of calls behind cached tokens."""
        return {"--new": self.news, "--page": self.page}

    def shape(self, length: int, new: int | None = None) -> Shape:
        """The shape of a call of so many tokens; CommandError for one that cannot be or does not fit."""
        try:
            shape = Shape(length=length, new=new, page=self.page, **self.sizes)
        except ParameterError as error:
            raise CommandError(str(error)) from error
        what = "a call of so many"
        self.place.check_room("--tokens", length, shape.bytes_per_token, what, least=16)
        self.place.check_room("--page", self.page, shape.bytes_per_token, what)
        return shape


def _layers(pipeline: Pipeline | Route) -> int:
    """Those that its method needs, where its pipeline goes by the method's name."""
    return max(tables.LAYERS.get(one.name, 1) for one in Route.of(pipeline).known)


@frozen(kw_only=True)
class Files:
    """Where results go besides the terminal. Raises CommandError, before any work is done, for what cannot be written.

    json: "-" for standard output, and nothing else there.
    """

    plot: Path | None = None
    markdown: Path | None = None
    json: Path | None = None

    def __attrs_post_init__(self) -> None:
        if self.plot is not None:
            check_writable("--plot", self.plot, ".png", ".svg", ".pdf")
        if self.markdown is not None:
            check_writable("--markdown", self.markdown)
        if self.json is not None and not self.alone:
            check_writable("--json", self.json)

    @property
    def alone(self) -> bool:
        """Whether JSON is all that is printed."""
        return self.json is not None and str(self.json) == "-"
