"""The shipped checkpoint: where it lies, how to load it, and the parameters of each method that suit it.

A method without an entry in `PARAMETERS` runs at its defaults. The papers' defaults are made for large models at 128K
tokens. This model's prompts are shorter, so that a window of 8192 keys, or groups of 16 blocks, would keep much of a
prompt whatever the method finds: sizes of blocks and windows were set by hand. Thresholds come from ``python -m
lab.frontier --seed 1000 --tokens 8192 --most 8``, on texts that no table is made of: of the settings that
answer every question behind the text with a KL of at most 0.0005 there, the one of lowest density; answers inside the
text had no part in it. None of anchor-attention's does, so it keeps its theta; share-prefill's are those with
delta=1.01, since with its default no head of this model shares. kascade sums 16 rows of a tile, since 64, its default,
take a CPU longer than dense attention does. rowmax looks at one row in four, with the larger eps of 0.005 and 0.01,
which both found every answer inside one text of 16,384 tokens, ``--seed 1000``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sparseprefill.errors import extra

if TYPE_CHECKING:
    import torch

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The folder of the shipped checkpoint, in Hugging Face's Llama format."""
ANCHORS = Path(__file__).parent / "anchors.json"
"""The embedded model's anchor layers, as `sparseprefill anchors --count 2` finds them."""
CLUSTERS = Path(__file__).parent / "clusters.json"
"""The embedded model's clusters of heads, as `sparseprefill cluster` finds them at its defaults."""

PARAMETERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "anchor-attention": {"step": 2},
        "bfla": {
            **{"block": 64, "group": 16, "tile": 64, "keep_mass": 0.95, "score_norm": "mean"},
            **{"local_tiles": 4, "stride": None},
        },
        "flexprefill": {"gamma": 0.8, "tau": 0.2, "min_budget": 256},
        "kascade": {"anchors": str(ANCHORS), "sampled": 16},
        "rowmax": {"every": 4, "eps": 0.01, "times": 12.0},
        "sample-attention": {"alpha_c": 0.8, "alpha_s": 0.8, "chunk_n": 1},
        "star-attention": {"block_size": 1024, "context_length": -128},
        "share-prefill": {"clusters": str(CLUSTERS), "gamma": 0.8, "delta": 1.01},
        "streaming": {"sink": 128, "window": 512},
        "vertical-slash": {"gamma": 0.8},
        "xattention": {"stride": 16, "threshold": 0.98, "block": 64},
    }
)


def load_model(dtype: torch.dtype | None = None, device: torch.device | str = "cpu", folder: Path | None = None) -> Any:
    """Load the embedded model, ready for inference, on a device.

    dtype: to compute in; by default that of the checkpoint, bfloat16. folder: a checkpoint of your own training instead
    of the shipped one. Raises ImportError without transformers, FileNotFoundError where the checkpoint is not there.
    """
    found = _transformers().AutoModelForCausalLM.from_pretrained(
        folder or _checkpoint(), dtype="auto" if dtype is None else dtype
    )
    return found.to(device).eval()


def load_config() -> Any:
    """Load the configuration of the embedded model alone; raises as `load_model` does."""
    return _transformers().AutoConfig.from_pretrained(_checkpoint())


def load_tokenizer(folder: Path | None = None) -> Any:
    """Load the tokenizer of the embedded model, or of your own checkpoint; raises as `load_model` does."""
    return _transformers().AutoTokenizer.from_pretrained(folder or _checkpoint())


def _checkpoint() -> Path:
    if not (CHECKPOINT / "config.json").is_file():
        raise FileNotFoundError(f"the embedded model is not at {CHECKPOINT}: install sparseprefill again")
    return CHECKPOINT


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ImportError(f"the embedded model needs transformers: {extra('hf')}") from error
