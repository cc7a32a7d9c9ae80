"""Parameters of each method that suit the embedded model. A method without an entry runs at its defaults.

The papers' defaults are made for large models at 128K tokens and more. This model's logits are smaller, so a distance
between logits means another share of the attention, and its prompts are shorter, so a window of 8192 keys would keep
almost everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PARAMETERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "anchor-attention": {"theta": 5.0},
        "streaming": {"sink": 128, "window": 1024},
        "vertical-slash": {"gamma": 0.9},
    }
)
