"""The requests of one step in one layer: in one launch, next to one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from sparseprefill.adapters.vllm.pages import pages_of
from torch import Tensor

from lab.bench.case import inputs, parse_mask, random_mask
from lab.bench.clock import Clock
from lab.bench.shape import Shape
from sparseprefill.call import AttentionCall
from sparseprefill.errors import SparsePrefillError
from sparseprefill.executors.auto import AutoExecutor
from sparseprefill.memory import Memory
from sparseprefill.plan import Plan, Result
from sparseprefill.registry import default_registry
from sparseprefill.validate import whole

from .engine import described
from .paging import filled


@frozen(kw_only=True)
class Case:
    """requests: of the step, each with `new` tokens behind `cached` ones, in pages of `page` tokens.

    work: a mask as text, or a method by name, of which `parameters` differ from defaults.
    """

    work: str
    method: bool = False
    parameters: Mapping[str, Any] = field(factory=dict)
    requests: int = field(validator=whole())
    new: int = field(validator=whole())
    cached: int = field(validator=whole(0))
    page: int = field(validator=whole())


@frozen(kw_only=True)
class Launched:
    """Medians in seconds of all requests: estimate (0 for masks), together and apart, which execute their plans.

    launches: of the forward kernel, together. difference: largest of the outputs. kernel: which computed them.
    """

    case: Case
    estimate: float = 0.0
    together: float = 0.0
    apart: float = 0.0
    launches: int = 0
    difference: float = 0.0
    density: float = 1.0
    kernel: str = ""
    error: str = ""

    @property
    def ratio(self) -> float | None:
        """Together over apart."""
        return self.together / self.apart if self.apart else None


@define
class Several:
    """Measures cases of one shape, whose length is that of a request. clock: of the device. seed: of all inputs."""

    shape: Shape
    clock: Clock
    seed: int = 0

    def measure(self, case: Case) -> Launched:
        """The row of a case. An error of the library, or lack of memory, is told in the row."""
        try:
            return self._row(case)
        except (SparsePrefillError, torch.OutOfMemoryError) as error:
            return Launched(case=case, error=described(error))

    def _row(self, case: Case) -> Launched:
        calls, executor = self._calls(case), AutoExecutor()
        plans, estimate = self._plans(calls, case)

        def together() -> list[Result]:
            return executor.execute_many(calls, plans)

        def apart() -> list[Result]:
            return [executor.execute(call, plan) for call, plan in zip(calls, plans, strict=True)]

        ours, theirs = together(), apart()
        difference = max(float((a.out - b.out).abs().max()) for a, b in zip(ours, theirs, strict=True))
        launches = len({one.out.untyped_storage().data_ptr() for one in ours})
        density = sum(plan.mask.density for plan in plans) / len(plans)
        kernel = " ".join(dict.fromkeys(str(kernel) for one in ours for kernel in one.kernels))
        del ours, theirs
        seconds, before = self.clock.beside(together, apart)
        return Launched(
            case=case,
            estimate=estimate,
            together=seconds,
            apart=before,
            launches=launches,
            difference=difference,
            density=density,
            kernel=kernel,
        )

    def _plans(self, calls: Sequence[AttentionCall], case: Case) -> tuple[list[Plan], float]:
        if not case.method:
            mask = parse_mask(case.work)
            return [Plan(random_mask(call, mask, self.seed + i)) for i, call in enumerate(calls)], 0.0
        pipeline = default_registry().build(case.work, **case.parameters)

        def estimate() -> list[Plan]:
            plans = [pipeline.plan(call, Memory()) for call in calls]
            for plan in plans:
                _ = plan.mask.tiles  # lists are made of maps when they are first read
            return plans

        return estimate(), self.clock.median(estimate)

    def _calls(self, case: Case) -> list[AttentionCall]:
        """Rows side by side in one tensor, keys and values in the pages of one cache, as vLLM has them."""
        shape, device, keys = self.shape, self.clock.device, case.new + case.cached
        q = torch.empty(case.requests * case.new, shape.heads, shape.head_dim, dtype=shape.torch_dtype, device=device)
        caches: list[Tensor] = []
        tables: list[Tensor] = []
        for i, rows in enumerate(q.split(case.new)):
            kind = "heads" if case.method else "random"
            mine, k, v = inputs(kind, shape, keys, self.seed + i, device)
            rows.copy_(mine[0, :, -case.new :].transpose(0, 1))
            cache, table = filled(k[0], v[0], case.page, "LBNHC", None, self.seed + i)
            tables.append(table + sum(one.shape[0] for one in caches))
            caches.append(cache.transpose(1, 2))
        cache = torch.cat(caches).transpose(1, 2)
        return [
            AttentionCall.of_pages(
                rows.transpose(0, 1)[None], pages_of(cache, shape.head_dim, table, keys, dtype=shape.torch_dtype)
            )
            for rows, table in zip(q.split(case.new), tables, strict=True)
        ]
