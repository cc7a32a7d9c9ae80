"""The embedded model's tokenizer, loaded once a session: with each new one the filler text would be measured anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def embedded_tokenizer() -> Any:
    """As a command loads it."""
    from sparseprefill.adapters.demo.model import load_tokenizer

    return load_tokenizer()


@pytest.fixture(scope="module")
def _one_tokenizer(embedded_tokenizer: Any) -> Iterator[None]:
    """Commands and captures of this module take that one; measuring its text is most of a short run."""
    from sparseprefill.adapters.demo import model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "load_tokenizer", lambda: embedded_tokenizer)
        yield
