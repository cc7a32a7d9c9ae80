"""Attention kernels that are held to one claim, each by the calls that it is for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from helpers.families import chosen, only
from kernels.device import BOUNDS, DEVICE
from sparseprefill import AttentionCall, Plan, output_error
from sparseprefill.executors.triton import TritonExecutor
from sparseprefill.kernels.attention.record import PORTABLE
from sparseprefill.kernels.family.chips import capability
from sparseprefill.kernels.family.record import Family
from sparseprefill.kernels.hopper.record import HOPPER
from sparseprefill.testing import attention

KERNELS = (PORTABLE, HOPPER)
HALVES = (torch.float16, torch.bfloat16)
TRITON = TritonExecutor()


def marks(kernel: Family) -> tuple[pytest.MarkDecorator, ...]:
    """Of a kernel that some chips alone run."""
    if isinstance(kernel.rank, int):
        return ()
    here = kernel.place(capability(torch.device(DEVICE))) is not None
    return pytest.mark.gpu, pytest.mark.skipif(not here, reason=f"needs a GPU that runs {kernel.name}")


def each(*kernels: Family, **values: Mapping[str, Sequence[Any]] | Sequence[Any]) -> pytest.MarkDecorator:
    """Parameters `kernel` and these, in every combination: values by the kernel's name, or the same for all."""
    made = []
    for kernel in kernels or KERNELS:
        own = [of[kernel.name] if isinstance(of, Mapping) else of for of in values.values()]
        for some in product(*own):
            name = "-".join([kernel.name, *map(str, some)])
            made.append(pytest.param(kernel, *some, id=name, marks=marks(kernel)))
    return pytest.mark.parametrize(("kernel", *values), made)


@pytest.fixture(autouse=True)
def portable_unless_named(request: pytest.FixtureRequest) -> Iterator[None]:
    """Import this where tests without a kernel's name are of the portable one."""
    callspec = getattr(request.node, "callspec", None)
    with pytest.MonkeyPatch.context() as patch:
        if callspec is None or callspec.params.get("kernel", PORTABLE) is PORTABLE:
            only(patch)
        yield


def far(out: torch.Tensor, truth: torch.Tensor) -> float:
    """`output_error`; 0 where no row has a key, so that both are zeros."""
    return 0.0 if bool((out == 0).all()) and bool((truth == 0).all()) else output_error(out, truth)


def check(
    kernel: Family, call: AttentionCall, plan: Plan, keep: torch.Tensor, truth: AttentionCall | None = None
) -> None:
    """The kernel serves, with float64 attention's output and LSE. truth: the call of tensors, of one of pages."""
    served = chosen(call, plan.mask, carry=plan.carry is not None).family
    assert served.name == kernel.name
    result = TRITON.execute(call, plan)
    out, lse = attention(call if truth is None else truth, keep)
    assert not bool(result.out.isnan().any())
    assert far(result.out, out) <= BOUNDS[call.q.dtype]
    assert torch.equal(lse == -torch.inf, result.lse == -torch.inf)
    real = lse != -torch.inf
    assert bool(((result.lse - lse)[real].abs() <= 1e-3).all())
    assert result.out[~real].abs().sum() == 0
