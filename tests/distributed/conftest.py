"""Processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed import world


@pytest.fixture(scope="session", autouse=True)
def _worlds() -> Iterator[None]:
    """The shared worlds end with the session."""
    yield
    world.close()


@pytest.fixture
def group() -> Iterator[None]:
    """A group of one rank, in the test's own process."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
