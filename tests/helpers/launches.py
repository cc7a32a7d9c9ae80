"""A spy on the attention kernel: how many requests each of its launches has."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest

from sparseprefill.kernels.attention import launch as launcher


def noted_launches(patch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of requests of each launch from now on."""
    found: list[int] = []
    launch = launcher._launch

    def counted(*given: Any, **more: Any) -> Any:
        requests = signature(launch).bind(*given, **more).arguments.get("requests")
        found.append(1 if requests is None else len(requests.masks))
        return launch(*given, **more)

    patch.setattr(launcher, "_launch", counted)
    return found
