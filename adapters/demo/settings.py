"""Parameters of each method that suit the embedded model. A method without an entry runs at its defaults.

The papers' defaults are made for large models at 128K tokens. This model's prompts are shorter, so that a window of
8192 keys, or groups of 16 blocks, would keep much of a prompt whatever the method finds. The values are the sparsest
ones, of those tried, at which the method still answers nearly every question at 16K tokens; `streaming` is set to the
density of the others and cannot answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PARAMETERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "anchor-attention": {"theta": 11.0, "step": 2},
        "sample-attention": {"alpha_c": 0.9, "alpha_s": 0.9},
        "star-attention": {"block_size": 1024, "context_length": -128},
        "streaming": {"sink": 128, "window": 512},
        "vertical-slash": {"gamma": 0.9},
    }
)
