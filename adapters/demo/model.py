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
    """Load the embedded model, ready for inference.

    Args:
        dtype: The type to compute in; by default that of the checkpoint, bfloat16.
        device: Where the model goes.
        folder: A checkpoint of your own training instead of the shipped one.

    Raises:
        ImportError: ``transformers`` is not installed.
        FileNotFoundError: The checkpoint is not there.
    """
    found = _transformers().AutoModelForCausalLM.from_pretrained(
        folder or _checkpoint(), dtype="auto" if dtype is None else dtype
    )
    return found.to(device).eval()


def load_config() -> Any:
    """Load the configuration of the embedded model alone; raises as `load_model` does."""
    return _transformers().AutoConfig.from_pretrained(_checkpoint())


def load_tokenizer(folder: Path | None = None) -> Any:
    """Load the tokenizer of the embedded model, or of a checkpoint of your own training.

    Raises:
        ImportError: ``transformers`` is not installed.
        FileNotFoundError: The checkpoint is not there.
    """
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
