"""A process that runs the lab's commands for a whole session: to import vLLM is most of what a small one takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import engine


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[engine.Commands]:
    made = engine.Commands(tmp_path_factory.mktemp("lab"))
    yield made
    made.close()
