"""Core's own refiners, offered through the hook that every plugin uses. Those of a paper are plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparseprefill.hookspecs import hookimpl
from sparseprefill.refiners.budget import BudgetCeiling, BudgetFloor
from sparseprefill.refiners.heads import GqaUnion
from sparseprefill.refiners.recall import RecallFloor
from sparseprefill.refiners.rescue import DenseRows, LocalBand, RandomRescue, Sink, StrideRescue
from sparseprefill.refiners.skip import SkipSoftmax

if TYPE_CHECKING:
    from sparseprefill.stages import MaskRefiner


@hookimpl
def sparseprefill_refiners() -> Mapping[str, type[MaskRefiner]]:
    """The refiners that belong to no single paper."""
    return {
        "budget-ceiling": BudgetCeiling,
        "budget-floor": BudgetFloor,
        "dense-rows": DenseRows,
        "gqa-union": GqaUnion,
        "local-band": LocalBand,
        "random-rescue": RandomRescue,
        "recall-floor": RecallFloor,
        "sink": Sink,
        "skip-softmax": SkipSoftmax,
        "stride-rescue": StrideRescue,
    }
