"""Parameters of each method that suit the embedded model. A method without an entry runs at its defaults.

The papers' defaults are made for large models at 128K tokens. This model's prompts are shorter, so that a window of
8192 keys, or groups of 16 blocks, would keep much of a prompt whatever the method finds. The values were picked by
hand from a few tries, mostly on the demo's own default text (seed 0), so that a method answers nearly every question
there at a low density; they are no optimum and no held-out result. `streaming` keeps as much of the attention as the
others and cannot answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

CLUSTERS = Path(__file__).parent / "clusters.json"
"""The embedded model's clusters of heads, as `sparseprefill cluster` finds them at its defaults."""

PARAMETERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "anchor-attention": {"theta": 11.0, "step": 2},
        "bfla": {"block": 64, "group": 8, "tile": 64, "score_norm": "mean", "local_tiles": 4, "stride": None},
        "flexprefill": {"gamma": 0.9, "min_budget": 256},
        "sample-attention": {"alpha_c": 0.9, "alpha_s": 0.8},
        "star-attention": {"block_size": 1024, "context_length": -128},
        "share-prefill": {"clusters": str(CLUSTERS), "delta": 1.01},
        "streaming": {"sink": 128, "window": 512},
        "vertical-slash": {"gamma": 0.9},
        "xattention": {"stride": 8, "threshold": 0.95, "block": 64},
    }
)
