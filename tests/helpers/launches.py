"""A spy on the attention kernel: how many requests each of its launches has."""

from __future__ import annotations

from typing import Any

import pytest

from sparseprefill.kernels.attention import launch as launcher


def noted_launches(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of requests of each launch from now on."""
    found: list[int] = []
    launch = launcher._launch

    def counted(*given: Any, **more: Any) -> Any:
        requests = given[7] if len(given) > 7 else None
        found.append(1 if requests is None else len(requests.masks))
        return launch(*given, **more)

    patch.setattr(launcher, "_launch", counted)
    return found
