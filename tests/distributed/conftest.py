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
