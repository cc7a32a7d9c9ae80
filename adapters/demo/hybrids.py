"""Hybrids that no paper has, as configurations for the embedded model; `sparseprefill demo --hybrids` runs them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .settings import PARAMETERS


def _method(name: str, **changed: Any) -> dict[str, Any]:
    return {"method": name, "parameters": {**PARAMETERS[name], **changed}}


HYBRIDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "shared + rescued": {
            **_method("share-prefill"),
            "refiners": [{"name": "stride-rescue", "every": 16}, {"name": "local-band", "tiles": 4}],
        },
        "stripes + slashes": {
            "union": [_method("anchor-attention", theta=10.0), _method("sample-attention")],
        },
        "star, sparse inside": _method("star-attention", inner=_method("anchor-attention")),
        "streaming + last rows": {**_method("streaming"), "refiners": [{"name": "dense-rows", "last": 64}]},
        "bfla, 8 to 64 tiles": {
            **_method("bfla"),
            "refiners": [{"name": "budget-floor", "tiles": 8}, {"name": "budget-ceiling", "tiles": 64}],
        },
    }
)
"""By name: SharePrefill's sharing with BFLA's rescue, AnchorAttention's stripes with SampleAttention's slashes, Star
Attention with AnchorAttention inside its blocks, a method whose last rows are dense, and one with a floor and a
ceiling."""
