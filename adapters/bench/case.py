"""What is measured: sizes of a call, inputs, and a mask or a method."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attrs import evolve, field, frozen

from sparseprefill.errors import ParameterError
from sparseprefill.pipeline import Pipeline
from sparseprefill.route import Route
from sparseprefill.validate import maybe, number, one_of, whole

from .shape import DTYPES, HeadSizes

INPUTS = ("heads", "random", "stripes", "sink", "local", "captured")
"""Kinds of inputs: those of `sparseprefill.testing.tensors`, and q, k, v of the embedded model."""
SHARE = number(0.0, 1.0)
WHOLE = ("full", "diagonal")
"""Parts of a mask that have no share."""


@frozen(kw_only=True)
class Shape(HeadSizes):
    """Sizes of a causal prefill call. A batch has rows of unequal lengths, the first of `length` tokens.

    new: how many of the tokens, the last, are queries, behind cached ones; None for all of them. page: tokens of a page
    of keys and values, which then lie in a cache out of order; 0 for tensors. Both are for one prompt, not for a batch.
    """

    length: int = field(validator=whole(2))
    head_dim: int = field(default=128, validator=whole(32))
    dtype: str = field(default="bfloat16", validator=one_of(*DTYPES))
    batch: int = field(default=1, validator=whole(1, 64))
    new: int | None = field(default=None, validator=maybe(whole()))
    page: int = field(default=0, validator=whole(0))

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.new is not None and self.new > self.length:
            raise ParameterError(f"new is {self.new}: pass at most the {self.length} tokens of the prompt")
        if self.batch > 1 and (self.new is not None or self.page):
            raise ParameterError(f"batch is {self.batch}: new tokens and pages are measured for one prompt; pass 1")

    @property
    def bytes_per_token(self) -> int:
        """Of q, k, v and the output, in every batch row; of a cache in pages too."""
        pages = 2 * self.kv_heads * self.head_dim * self.torch_dtype.itemsize if self.page else 0
        return self.batch * super().bytes_per_token + pages

    @property
    def queries(self) -> int:
        """Tokens that are queries."""
        return self.length if self.new is None else self.new

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each batch row: n, n (b - 1) / b, ..., n / b."""
        return tuple(max(1, self.length * (self.batch - row) // self.batch) for row in range(self.batch))

    def __str__(self) -> str:
        rows = f"batch {self.batch}, " if self.batch > 1 else ""
        new = "" if self.new is None else f"{self.new:,} of them new, "
        pages = f"pages of {self.page}, " if self.page else ""
        return f"{rows}{new}{pages}{super().__str__()}"


@frozen
class Part:
    """Tiles of 128 x 128, or columns before each group of 2,048 rows, at random; the diagonal tiles; or everything."""

    kind: str = field(validator=one_of("full", "diagonal", "tiles", "stripes"))
    share: float = field(default=1.0, validator=SHARE)

    def __str__(self) -> str:
        return self.kind if self.kind in WHOLE else f"{self.kind} {self.share:.3g}"


def parse_mask(text: str) -> tuple[Part, ...]:
    """Parts of a mask such as ``full``, ``tiles:0.1``, or ``diagonal+stripes:0.05``; ParameterError else."""
    parts = []
    for one in text.split("+"):
        found = re.fullmatch(r"\s*(?:(full|diagonal)|(tiles|stripes):([0-9.eE-]+))\s*", one)
        try:
            if found is None:
                raise ValueError
            parts.append(Part(found[1]) if found[1] else Part(found[2], float(found[3])))
        except ValueError:
            what = "full, diagonal, tiles:SHARE or stripes:SHARE with a share from 0 to 1, joined by +"
            raise ParameterError(f"mask is {text!r}: pass {what}, such as tiles:0.05+stripes:0.05") from None
    return tuple(parts)


@frozen(kw_only=True)
class Case:
    """One row of a table: a random mask through the executor alone, or a method's whole call.

    table: that it belongs to. name: of the method, or the mask as text. pipeline: of a method, None for a mask.
    parameters: those that differ from the method's defaults. gate: whether the break-even gate may choose dense.
    layers: of a prefill that stand behind the figures, all on the same inputs, which are their mean: for methods whose
    layers do different things.
    """

    table: str
    name: str
    shape: Shape
    input: str = field(default="heads", validator=one_of(*INPUTS))
    mask: tuple[Part, ...] = ()
    pipeline: Pipeline | Route | None = field(default=None, eq=False)
    parameters: Mapping[str, Any] = field(factory=dict, eq=False)
    gate: bool = False
    layers: int = field(default=1, validator=whole())

    @property
    def label(self) -> str:
        """The name, with what differs from the defaults."""
        said = [f"{name}={value}" for name, value in self.parameters.items()]
        said += ["gated"] if self.gate else []
        said += [f"mean of {self.layers} layers"] if self.layers > 1 else []
        return f"{self.name} ({', '.join(said)})" if said else self.name

    def __str__(self) -> str:
        sizes = "" if self.shape == evolve(Shape(length=2), length=self.shape.length) else f" {self.shape}"
        return re.sub(r"[^\w.=()%+/, -]", "", f"{self.label} {self.shape.length}{sizes}")


def of_mask(text: str, shape: Shape, table: str = "") -> Case:
    """A random mask through the executor, on Gaussian inputs; ParameterError for a text that is none."""
    mask = parse_mask(text)
    return Case(table=table, name=" + ".join(map(str, mask)), shape=shape, input="random", mask=mask)
