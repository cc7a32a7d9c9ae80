"""Loading what `demo` compares on: the embedded model, its text and questions, the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from .group import CommandError

if TYPE_CHECKING:
    from ..demo.compare import Comparison


@frozen
class Place:
    """Where the model computes, and in which type."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, device: str, dtype: str) -> Place:
        """From the options; CommandError where there is no such device."""
        try:
            found = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
            torch.empty(1, device=found)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).split("\n")[0]
            raise CommandError(f"--device {device}: {reason}; pass cpu, or cuda where PyTorch sees a GPU") from error
        if dtype == "auto":
            dtype = "float32" if found.type == "cpu" else "bfloat16"
        chosen: torch.dtype = getattr(torch, dtype)
        return cls(found, chosen)


def comparison(tokens: int, questions: int, seed: int, pictured: tuple[int, int], place: Place) -> Comparison:
    """The embedded model and the questions about one text, ready to run contenders.

    pictured: layer and head whose masks are kept. Raises CommandError for what the model cannot do.
    """
    model, tokenizer = _load(place)
    from ..demo.compare import Comparison
    from ..demo.exam import make_exam

    _check(model.config, tokens, *pictured)
    try:
        exam = make_exam(tokenizer, tokens, seed, questions)
    except ValueError as error:
        raise CommandError(f"--tokens {tokens} --questions {questions}: {error}") from error
    return Comparison(model, tokenizer, exam, *pictured)


def _load(place: Place) -> tuple[Any, Any]:
    from ..demo.model import load_model, load_tokenizer

    try:
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        return load_model(place.dtype, place.device), load_tokenizer()
    except ImportError as error:
        raise CommandError('the demo needs transformers: pip install "sparseprefill[hf]"') from error
    except FileNotFoundError as error:
        raise CommandError(f"{error}: install the package with its checkpoint, or train one") from error


def _check(config: Any, tokens: int, layer: int, head: int) -> None:
    if tokens > config.max_position_embeddings:
        raise CommandError(f"--tokens {tokens}: the embedded model reads at most {config.max_position_embeddings}")
    for option, value, count in (
        ("layer", layer, config.num_hidden_layers),
        ("head", head, config.num_attention_heads),
    ):
        if value >= count:
            raise CommandError(f"--{option} {value}: the embedded model has {count}; pass 0 to {count - 1}")
