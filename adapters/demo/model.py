"""The shipped checkpoint: where it lies, and how to load it."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The folder of the shipped checkpoint, in Hugging Face's Llama format."""


def load_model(
    dtype: "torch.dtype | None" = None, device: "torch.device | str" = "cpu", folder: Path | None = None
) -> Any:
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
        raise ImportError("the embedded model needs transformers: pip install sparseprefill[hf]") from error
