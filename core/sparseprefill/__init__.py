"""sparseprefill: training-free sparse prefill attention as one framework of estimators, refiners and executors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from pathlib import Path

    from sparseprefill.breakeven.gate import Gate, GateChoice
    from sparseprefill.breakeven.table import BreakEven, Verdict
    from sparseprefill.call import AttentionCall
    from sparseprefill.config import from_config
    from sparseprefill.errors import (
        AttachError,
        InvalidCallError,
        MaskError,
        MethodCollisionError,
        ParameterError,
        PluginLoadError,
        SparsePrefillError,
        StageError,
        UnknownMethodError,
        UnsupportedCallError,
    )
    from sparseprefill.executors.auto import AutoExecutor
    from sparseprefill.executors.cpu import CpuExecutor
    from sparseprefill.executors.reference import ReferenceExecutor
    from sparseprefill.mask.geometry import Geometry
    from sparseprefill.mask.lists import IndexLists
    from sparseprefill.mask.mask import SparseMask
    from sparseprefill.mask.priority import Priority, PriorityScores
    from sparseprefill.memory import Memory
    from sparseprefill.method import Method, hookimpl
    from sparseprefill.metrics import output_error, recall
    from sparseprefill.pages import Pages
    from sparseprefill.pipeline import Pipeline
    from sparseprefill.plan import Carry, Plan, Remark, Result, Skipped, SoftmaxState
    from sparseprefill.plugins.delta.corrector import Delta
    from sparseprefill.plugins.flashprefill.threshold import RelativeThreshold
    from sparseprefill.plugins.proxy.corrector import Proxy
    from sparseprefill.plugins.stem.decay import PositionDecay
    from sparseprefill.plugins.stem.values import ValueWeights
    from sparseprefill.profiles.profile import Profile
    from sparseprefill.refiners.budget import BudgetCeiling, BudgetFloor
    from sparseprefill.refiners.recall import Recall, RecallFloor
    from sparseprefill.refiners.rescue import DenseRows, GqaUnion, LocalBand, RandomRescue, Sink, StrideRescue
    from sparseprefill.refiners.skip import SkipSoftmax
    from sparseprefill.registry import PluginRecord, Registry, default_registry
    from sparseprefill.route import Route, gated
    from sparseprefill.stages import Corrector, HeadScope, MaskRefiner, Observer, PatternEstimator, SparseExecutor
    from sparseprefill.union import UnionEstimator

__version__ = "0.2.0"
__all__ = [
    "AttachError",
    "AttentionCall",
    "AutoExecutor",
    "BreakEven",
    "BudgetCeiling",
    "BudgetFloor",
    "Carry",
    "Corrector",
    "CpuExecutor",
    "Delta",
    "DenseRows",
    "Gate",
    "Geometry",
    "GqaUnion",
    "HeadScope",
    "IndexLists",
    "InvalidCallError",
    "LocalBand",
    "MaskError",
    "MaskRefiner",
    "Memory",
    "Method",
    "MethodCollisionError",
    "Observer",
    "Pages",
    "ParameterError",
    "PatternEstimator",
    "Pipeline",
    "Plan",
    "PluginLoadError",
    "PluginRecord",
    "PositionDecay",
    "Priority",
    "PriorityScores",
    "Profile",
    "Proxy",
    "RandomRescue",
    "RecallFloor",
    "ReferenceExecutor",
    "Registry",
    "RelativeThreshold",
    "Remark",
    "Result",
    "Route",
    "Sink",
    "SkipSoftmax",
    "Skipped",
    "SoftmaxState",
    "SparseExecutor",
    "SparseMask",
    "SparsePrefillError",
    "StageError",
    "StrideRescue",
    "UnionEstimator",
    "UnknownMethodError",
    "UnsupportedCallError",
    "ValueWeights",
    "Verdict",
    "build",
    "default_registry",
    "from_config",
    "gated",
    "hookimpl",
    "methods",
    "output_error",
    "recall",
]

# Names are fetched from their files when they are first asked for (PEP 562), so that what needs none of them, such as
# the help of the command line, does not import torch. A test holds this table to the imports above.
_FILES: Mapping[str, tuple[str, ...]] = {
    "breakeven.gate": ("Gate",),
    "breakeven.table": ("BreakEven", "Verdict"),
    "call": ("AttentionCall",),
    "config": ("from_config",),
    "errors": (
        "AttachError",
        "InvalidCallError",
        "MaskError",
        "MethodCollisionError",
        "ParameterError",
        "PluginLoadError",
        "SparsePrefillError",
        "StageError",
        "UnknownMethodError",
        "UnsupportedCallError",
    ),
    "executors.auto": ("AutoExecutor",),
    "executors.cpu": ("CpuExecutor",),
    "executors.reference": ("ReferenceExecutor",),
    "mask.geometry": ("Geometry",),
    "mask.lists": ("IndexLists",),
    "mask.mask": ("SparseMask",),
    "mask.priority": ("Priority", "PriorityScores"),
    "memory": ("Memory",),
    "method": ("Method", "hookimpl"),
    "metrics": ("output_error", "recall"),
    "pages": ("Pages",),
    "pipeline": ("Pipeline",),
    "plan": ("Carry", "Plan", "Remark", "Result", "Skipped", "SoftmaxState"),
    "plugins.delta.corrector": ("Delta",),
    "plugins.flashprefill.threshold": ("RelativeThreshold",),
    "plugins.proxy.corrector": ("Proxy",),
    "plugins.stem.decay": ("PositionDecay",),
    "plugins.stem.values": ("ValueWeights",),
    "profiles.profile": ("Profile",),
    "refiners.budget": ("BudgetCeiling", "BudgetFloor"),
    "refiners.recall": ("RecallFloor",),
    "refiners.rescue": ("DenseRows", "GqaUnion", "LocalBand", "RandomRescue", "Sink", "StrideRescue"),
    "refiners.skip": ("SkipSoftmax",),
    "registry": ("PluginRecord", "Registry", "default_registry"),
    "route": ("Route", "gated"),
    "stages": ("Corrector", "HeadScope", "MaskRefiner", "Observer", "PatternEstimator", "SparseExecutor"),
    "union": ("UnionEstimator",),
}
_HOMES = {name: file for file, names in _FILES.items() for name in names}

# Without numpy, which nothing here needs, torch warns when it is imported.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)

if not TYPE_CHECKING:  # or checkers would take every misspelt name for one of ours

    def __getattr__(name: str) -> Any:
        """A public name, or a module of the package that has not been imported yet."""
        if name in _HOMES:
            found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        elif name.isidentifier() and not name.startswith("_"):
            found = _module(f"{__name__}.{name}")
        else:
            found = None
        if found is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


def _module(name: str) -> Any:
    """The module of this name; None where there is none."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def methods() -> Mapping[str, str]:
    """Name and one-line summary of every installed method."""
    from sparseprefill.registry import default_registry

    return {name: method.summary for name, method in default_registry().methods().items()}


@overload
def build(
    name: str, *, profile: None = None, gate: Literal[False] | None = None, recall: Recall = None, **parameters: Any
) -> Pipeline: ...


@overload
def build(
    name: str | None = None,
    *,
    profile: str | Path | Profile,
    gate: GateChoice = None,
    recall: Recall = None,
    **parameters: Any,
) -> Route: ...


@overload
def build(
    name: str, *, profile: None = None, gate: BreakEven | Gate | str | Path, recall: Recall = None, **parameters: Any
) -> Route: ...


def build(
    name: str | None = None,
    *,
    profile: str | Path | Profile | None = None,
    gate: GateChoice = None,
    recall: Recall = None,
    **parameters: Any,
) -> Pipeline | Route:
    """A pipeline by method name, such as ``build("anchor-attention", theta=12.0, step=16)``.

    profile: a file that ``sparseprefill fit`` or ``tune`` wrote; the number of keys of a call then chooses method and
    parameters, and `parameters` go over them. The name may be left out, as the profile holds it.
    gate: judges each call by its sizes, so that one too small for the method runs dense attention, and says so in
    `Result.dense`: "auto", the path of a break-even table, a BreakEven or Gate. None: every call runs the method.
    recall: how much of the attention mass of sampled query rows is kept in any case, such as 0.95, or a `RecallFloor`
    with options of its own; what the method leaves out of that is added before execution. None: whatever it chooses.
    With a profile or a gate the answer is a `Route`, which runs like a Pipeline.

    Raises UnknownMethodError, ParameterError, or PluginLoadError, each with what would do.
    """
    from sparseprefill.registry import default_registry
    from sparseprefill.route import gated

    made = default_registry().build(name, profile=profile, **parameters).with_recall(recall)
    return gated(made, gate)
