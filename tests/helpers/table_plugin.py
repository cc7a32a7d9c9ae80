"""A plugin whose one method needs a table of each model: how many near keys each layer keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from attrs import field, frozen

from sparseprefill.method import Method, hookimpl
from sparseprefill.profiles.identity import ModelIdentity
from sparseprefill.profiles.table import MadeTable, ModelReader, ModelTable, NeededTable, Progress
from sparseprefill.structure import Schema
from sparseprefill.validate import number, whole

if TYPE_CHECKING:
    from sparseprefill.call import AttentionCall
    from sparseprefill.memory import Memory
    from sparseprefill.pipeline import Pipeline
    from sparseprefill.plan import Plan, Result


@frozen(kw_only=True)
class BandTable(ModelTable):
    """bands: tokens by layer."""

    SCHEMA: ClassVar[Schema] = Schema("test.bands", 1, "make one with sparseprefill bands", short=True)
    bands: tuple[Annotated[int, whole()], ...]


@frozen(kw_only=True)
class Settings:
    """share: of the attention that a band has. shortest: tokens of the shortest band."""

    share: float = field(default=0.5, validator=number(0.0))
    shortest: int = field(default=16, validator=whole(16, 99))


def make(
    reader: ModelReader[Pipeline], samples: Sequence[Sequence[int]], settings: Settings, progress: Progress
) -> MadeTable:
    """A table of the last row's attention."""
    from sparseprefill.registry import default_registry
    from sparseprefill.statistics.sampled import last_rows, sampled_mass

    bands = [settings.shortest] * reader.identity.layers

    def observe(call: AttentionCall, result: Result) -> None:
        mass = sampled_mass(call, *last_rows(call, 1), 16).columns.mean(1)[0].flip(0).cumsum(0)
        bands[call.layer] = max(bands[call.layer], int((mass < settings.share * mass[-1]).sum()) + 1)
        progress("layers", call.layer + 1, len(bands))

    seen = {layer for layers in reader.read(samples, default_registry().build("dense"), observe) for layer in layers}
    rows = [(str(layer), str(bands[layer])) for layer in sorted(seen)]
    table = BandTable(bands=tuple(bands), model=reader.identity)
    return MadeTable(
        table=table, measured=f"{len(bands)} layers", heads=("layer", "band"), rows=rows, facts={"bands": bands}
    )


TABLE = NeededTable(
    parameter="bands",
    kind=BandTable,
    stand_in={"bands": {**BandTable.SCHEMA.facts, "bands": [64]}},
    command="bands",
    summary="Measure how far back each layer of a model looks.",
    of="layers",
    make=make,
    settings=Settings,
    tokens=512,
    samples=1,
)


@frozen(kw_only=True)
class Config:
    """bands: the table, as a path or its content."""

    bands: Any = field(default=None, **TABLE.field)


@frozen
class Bands:
    """The nearest keys, as many as the table says."""

    table: BandTable

    def unsupported(self, call: AttentionCall) -> str | None:
        return self.table.objection(call)

    def check_model(self, model: ModelIdentity) -> None:
        self.table.check_model(model)

    def estimate(self, call: AttentionCall, memory: Memory) -> Plan:
        import sparseprefill as sp

        width = self.table.bands[call.layer % len(self.table.bands)] // 16 + 1
        place = call.geometry.tiles(16)
        first = (place + 1 - width).clamp(min=0)
        return sp.Plan(sp.SparseMask.from_ranges(call, first[..., None], (place + 1)[..., None], width, 16))


def build(config: Config) -> Pipeline:
    from sparseprefill.pipeline import Pipeline

    return Pipeline(Bands(config.bands), name="banded")


@hookimpl
def sparseprefill_methods() -> list[Method]:
    return [Method(name="banded", summary="as far back as a layer looks", config=Config, build=build, table=TABLE)]
