"""Who is compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from sparseprefill.pipeline import Pipeline
from sparseprefill.route import Route

from ..session.defaults import TAIL


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
