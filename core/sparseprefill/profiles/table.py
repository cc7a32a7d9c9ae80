"""Tables that a method needs of each model, measured once: how they are read, and how they are made."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import attrs
from attrs import frozen

from sparseprefill import structure
from sparseprefill.errors import ParameterError, printed
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.validate import FILE, anything

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sparseprefill.call import AttentionCall
    from sparseprefill.plan import Result

Progress = Callable[[str, int, int], None]
"""Hears of progress: what is being done, how much of it is done, of how much."""
Steps = Callable[[int, int], None]
"""Hears of the progress of one piece of work: how much of it is done, of how much."""


@frozen(kw_only=True)
class ModelTable:
    """Base of the attrs classes that hold a table; they say as `SCHEMA` what their files are.

    model: whose table it is; None for one written by hand.
    """

    SCHEMA: ClassVar[structure.Schema]

    model: ModelIdentity | None = None

    def to_json(self) -> str:
        """The text of a file that `NeededTable.read` reads."""
        return structure.by_lines(self)

    def objection(self, call: AttentionCall) -> str | None:
        """Reason for which the table does not fit a call, or None."""
        return None if self.model is None else self.model.objection(call)

    def check_model(self, model: ModelIdentity) -> None:
        """ParameterError, naming the field, where the table was made for another model."""
        if self.model is not None:
            what = self.SCHEMA.name.rpartition(".")[2]
            self.model.check_same(model, f"the table of {what}", self.SCHEMA.remedy)


Runs = TypeVar("Runs", contravariant=True)


class ModelReader(Protocol[Runs]):
    """A model that reads samples for whoever makes a table of it. Runs: what it reads them through, a Pipeline."""

    @property
    @abstractmethod
    def identity(self) -> ModelIdentity:
        """The model that the table is of."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device on which the model computes."""

    @abstractmethod
    def read(
        self,
        samples: Sequence[Sequence[int]],
        pipeline: Runs,
        observe: Callable[[AttentionCall, Result], None],
        added: Callable[[int, Tensor, Tensor], None] | None = None,
        *,
        verify: bool = False,
    ) -> Iterator[tuple[int, ...]]:
        """Let it read one sample of token ids after the other through a pipeline, whose results it goes on with.

        After each sample: the indices of its attention layers. observe(call, result): after each layer that the
        pipeline serves. added(layer, x, y): of each attention module the hidden states ``[1, N, width]`` before it,
        and what it adds to them. verify: compare the model with itself under a full mask first. Raises AttachError
        where the model is none whose attention can be replaced.
        """


@frozen(kw_only=True, eq=False)
class MadeTable:
    """A table that was just made, and what is to be said of it.

    measured: of what it was made, in words, such as "32 layers". heads, rows, words, drop: a table for people; `words`
    are the columns of text, `drop` those that may leave. remarks: lines below it. facts: what a program is told.
    useless: why the method can do nothing with it; empty where it can.
    """

    table: ModelTable
    measured: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ()
    drop: Sequence[str] = ()
    remarks: Sequence[str] = ()
    facts: Mapping[str, Any]
    useless: str = ""


Make = Callable[[ModelReader[Any], Sequence[Sequence[int]], Any, Progress], MadeTable]
"""Makes a table of samples of token ids, all of one length, and of the maker's settings."""


TAKEN = frozenset(("model", "tokens", "samples", "output", "device", "dtype", "threads", "json"))
"""Options of every command that makes a table."""


@frozen(kw_only=True)
class NeededTable:
    """A table that a method needs of each model, as `Method.table` declares it.

    parameter: of the method, that takes the table; its config has it by `field`. kind: class of the table.
    parse: makes one of other plain data than a file holds; what it leaves alone is read as a file's content. words:
    values of the parameter that stand for themselves. forms: what the parameter takes, for people. stand_in:
    parameters at which the method runs where there is no model, such as on made-up tensors.

    command: its name on the command line. summary: what it does, in the command's help. of: what of the model it
    measures, such as "layers". make: does so; it is called for a command alone, so that it may import anything.
    settings: attrs class of the maker's own options, whose docstring says ``name: help.`` of each; `seed` is the
    command's, and names of `TAKEN` are refused (ParameterError). With a method `check(tokens)` it raises ParameterError
    for samples of so many tokens. tokens, samples: what the command measures by default. needs: modules that the maker
    imports and that may be missing, with what to install.
    """

    parameter: str
    kind: type[ModelTable]
    command: str
    summary: str
    of: str
    make: Make
    settings: type
    parse: Callable[[object], object] = lambda facts: facts
    words: tuple[str, ...] = ()
    forms: str = "path, table, or none"
    stand_in: Mapping[str, Any] = attrs.field(factory=dict, hash=False)
    tokens: int = 4096
    samples: int = 4
    needs: Mapping[str, str] = attrs.field(factory=dict, hash=False)

    def __attrs_post_init__(self) -> None:
        taken = sorted(TAKEN.intersection(one.name for one in attrs.fields(self.settings)))
        if taken:
            raise ParameterError(f"settings has the field {taken[0]!r}, an option of every such command: rename it")

    @property
    def field(self) -> Mapping[str, Any]:
        """Arguments of attrs' `field` for the parameter: ``anchors: Any = field(default=None, **TABLE.field)``."""
        return {"converter": self.read, "validator": anything(self.forms), "metadata": {FILE: self.words}}

    def read(self, value: Any) -> Any:
        """The table of a path, or of plain data; None and `words` stay. ParameterError names file, field and remedy."""
        if value is None or (isinstance(value, str) and value in self.words):
            return value
        if isinstance(value, str | Path):
            return structure.load(value, self.parameter, "pass the JSON file of a table", self._parsed)
        return self._parsed(value)

    def _parsed(self, facts: object) -> ModelTable:
        found = facts if isinstance(facts, self.kind) else self.parse(facts)
        if isinstance(found, self.kind):
            return found
        if not isinstance(found, Mapping):
            raise ParameterError(f"{self.parameter} is {printed(found)}: pass a path, or a table")
        made: ModelTable = structure.structure(self.kind, found)
        return made

    @property
    def lacking(self) -> str:
        """The first module that the maker needs and that is missing, with the remedy; empty where none is."""
        found = ((name, extra) for name, extra in self.needs.items() if find_spec(name) is None)
        return next((f'{name}: pip install "{extra}"' for name, extra in found), "")
