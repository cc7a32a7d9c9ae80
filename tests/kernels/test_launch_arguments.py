"""The attention kernels' flat signatures, against the tuples that their launchers fill: names, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

from sparseprefill.kernels.attention import arguments as portable
from sparseprefill.kernels.attention.kernel import RUNTIME, sparse_attention_fwd_kernel


def ways(of: Any, before: str = "") -> Iterator[str]:
    """The way to each field of tuples of tuples, joined by underscores."""
    for name, kind in get_type_hints(of).items():
        if isinstance(kind, type) and issubclass(kind, tuple):
            yield from ways(kind, f"{before}{name}_")
        else:
            yield before + name


def flat_names(kernel: Any) -> list[str]:
    """Parameters that are no constants."""
    return [name for name in kernel.arg_names if name != name.upper()]


def test_the_portable_kernel_takes_what_its_launcher_fills() -> None:
    names = flat_names(sparse_attention_fwd_kernel)
    assert list(ways(portable.Arguments)) == names
    assert set(RUNTIME) <= set(names)


def test_the_hopper_kernel_takes_what_its_launcher_fills() -> None:
    pytest.importorskip("triton.experimental.gluon")
    from sparseprefill.kernels.hopper import kernel
    from sparseprefill.kernels.roles import arguments

    names = flat_names(kernel.hopper_attention_fwd_kernel)
    assert list(ways(arguments.Arguments)) == names
    assert set(kernel.RUNTIME) <= set(names)


def test_flat_takes_tuples_apart_in_order() -> None:
    given = portable.Cache(portable.Matrix(*range(6)), portable.Matrix(*range(6, 12)), None)
    assert (*range(12), None) == portable.flat(given)
    state = portable.State((1, 2), [3], None)  # what fields hold is left alone
    assert (0, 1, (1, 2), [3], None, *range(2, 10)) == portable.flat(portable.Outputs(0, 1, state, *range(2, 10)))
