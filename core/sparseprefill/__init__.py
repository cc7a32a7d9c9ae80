"""sparseprefill: training-free sparse prefill attention as one framework of estimators, refiners and executors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, overload

from sparseprefill.kernels.family import known as _known

if TYPE_CHECKING:
    from pathlib import Path

    from sparseprefill.breakeven.gate import Gate as Gate
    from sparseprefill.breakeven.gate import GateChoice
    from sparseprefill.breakeven.table import BreakEven as BreakEven
    from sparseprefill.breakeven.table import Verdict as Verdict
    from sparseprefill.call import AttentionCall as AttentionCall
    from sparseprefill.config import from_config as from_config
    from sparseprefill.errors import AttachError as AttachError
    from sparseprefill.errors import InvalidCallError as InvalidCallError
    from sparseprefill.errors import MaskError as MaskError
    from sparseprefill.errors import MethodCollisionError as MethodCollisionError
    from sparseprefill.errors import ParameterError as ParameterError
    from sparseprefill.errors import PluginLoadError as PluginLoadError
    from sparseprefill.errors import SparsePrefillError as SparsePrefillError
    from sparseprefill.errors import StageError as StageError
    from sparseprefill.errors import UnknownMethodError as UnknownMethodError
    from sparseprefill.errors import UnsupportedCallError as UnsupportedCallError
    from sparseprefill.executors.auto import AutoExecutor as AutoExecutor
    from sparseprefill.executors.cpu import CpuExecutor as CpuExecutor
    from sparseprefill.executors.reference import ReferenceExecutor as ReferenceExecutor
    from sparseprefill.kernels.family.record import Family
    from sparseprefill.mask.geometry import Geometry as Geometry
    from sparseprefill.mask.lists import IndexLists as IndexLists
    from sparseprefill.mask.mask import SparseMask as SparseMask
    from sparseprefill.mask.priority import Priority as Priority
    from sparseprefill.mask.priority import PriorityScores as PriorityScores
    from sparseprefill.memory import Memory as Memory
    from sparseprefill.method import Method as Method
    from sparseprefill.method import hookimpl as hookimpl
    from sparseprefill.metrics import output_error as output_error
    from sparseprefill.metrics import recall as recall
    from sparseprefill.pages import Pages as Pages
    from sparseprefill.pipeline import Pipeline as Pipeline
    from sparseprefill.plan import Carry as Carry
    from sparseprefill.plan import Plan as Plan
    from sparseprefill.plan import Remark as Remark
    from sparseprefill.plan import Result as Result
    from sparseprefill.plan import Skipped as Skipped
    from sparseprefill.plan import SoftmaxState as SoftmaxState
    from sparseprefill.plugins.flashprefill.threshold import RelativeThreshold as RelativeThreshold
    from sparseprefill.plugins.stem.decay import PositionDecay as PositionDecay
    from sparseprefill.plugins.stem.values import ValueWeights as ValueWeights
    from sparseprefill.profiles.profile import Profile as Profile
    from sparseprefill.refiners.budget import BudgetCeiling as BudgetCeiling
    from sparseprefill.refiners.budget import BudgetFloor as BudgetFloor
    from sparseprefill.refiners.recall import Recall
    from sparseprefill.refiners.recall import RecallFloor as RecallFloor
    from sparseprefill.refiners.rescue import DenseRows as DenseRows
    from sparseprefill.refiners.rescue import GqaUnion as GqaUnion
    from sparseprefill.refiners.rescue import LocalBand as LocalBand
    from sparseprefill.refiners.rescue import RandomRescue as RandomRescue
    from sparseprefill.refiners.rescue import Sink as Sink
    from sparseprefill.refiners.rescue import StrideRescue as StrideRescue
    from sparseprefill.refiners.skip import SkipSoftmax as SkipSoftmax
    from sparseprefill.registry import PluginRecord as PluginRecord
    from sparseprefill.registry import Registry as Registry
    from sparseprefill.registry import default_registry as default_registry
    from sparseprefill.route import Route as Route
    from sparseprefill.route import gated as gated
    from sparseprefill.stages import Corrector as Corrector
    from sparseprefill.stages import HeadScope as HeadScope
    from sparseprefill.stages import MaskRefiner as MaskRefiner
    from sparseprefill.stages import Observer as Observer
    from sparseprefill.stages import PatternEstimator as PatternEstimator
    from sparseprefill.stages import SparseExecutor as SparseExecutor
    from sparseprefill.union import UnionEstimator as UnionEstimator

    __all__: list[str]

__version__ = "0.2.0"

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
    "plugins.flashprefill.threshold": ("RelativeThreshold",),
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
    __all__ = sorted(["build", "methods", *_HOMES])  # noqa: PLE0605 - a list it is

    def __getattr__(name: str) -> Any:
        """A public name, or a module of the package that has not been imported yet."""
        if name in _HOMES:
            found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        elif name.isidentifier() and not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            found = import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


def _installed() -> tuple[Family, ...]:
    from sparseprefill.registry import default_registry

    return default_registry().kernels()


_known.installed = _installed


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

    profile: a file that ``sparseprefill fit`` wrote; the number of keys of a call then chooses method and
    parameters, and `parameters` go over them. The name may be left out, as the profile holds it.
    gate: judges each call by its sizes, or with a `Memory` each prompt, once, so that what is too small for the method
    runs dense attention, and says so in `Result.dense`: "auto", the path of a break-even table, a BreakEven or Gate.
    None: every call runs the method.
    recall: how much of the attention mass of sampled query rows is kept in any case, such as 0.95, or a `RecallFloor`
    with options of its own; what the method leaves out of that is added before execution. None: whatever it chooses.
    With a profile or a gate the answer is a `Route`, which runs like a Pipeline.

    Raises UnknownMethodError, ParameterError, or PluginLoadError, each with what would do.
    """
    from sparseprefill.registry import default_registry
    from sparseprefill.route import gated

    made = default_registry().build(name, profile=profile, **parameters).with_recall(recall)
    return gated(made, gate)
