"""Loading what commands run on: the model, its text and questions, the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen

from .group import CommandError

if TYPE_CHECKING:
    from sparseprefill.profiles.identity import ModelIdentity

    from ..calibration.fit import ModelReadings
    from ..evaluation.comparison import Ask
    from ..evaluation.prompts import Prompt
    from ..evaluation.reading import Sizes

EMBEDDED = "embedded"
GREEDY = 16
"""Tokens of dense's own continuation that the demo looks at."""


@frozen
class Place:
    """Where the model computes, in which type, and with how many threads of PyTorch."""

    device: torch.device
    dtype: torch.dtype
    threads: int

    def __str__(self) -> str:
        threads = "thread" if self.threads == 1 else "threads"
        where = f"{self.device} ({self.threads} {threads})" if self.device.type == "cpu" else str(self.device)
        return f"{where}, {self.dtype_name}"

    @property
    def dtype_name(self) -> str:
        """Without PyTorch's name."""
        return str(self.dtype).removeprefix("torch.")

    @contextmanager
    def threaded(self) -> Iterator[None]:
        """Runs the block with this many threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @classmethod
    def of(cls, device: str, dtype: str, threads: int) -> Place:
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
        return cls(found, chosen, threads)


@frozen
class Exam:
    """The embedded model and the questions about one text."""

    model: Any
    prompt: Prompt
    sizes: Sizes
    ask: Ask
    questions: int


def exam_of(tokens: int, questions: int, seed: int, pictured: tuple[int, int], place: Place) -> Exam:
    """The embedded model and the questions about one text; CommandError for what the model cannot do."""
    model, tokenizer = _load(place)
    from ..demo.exam import asker, make_exam, prompt_of
    from ..evaluation.reading import Sizes

    _check(model.config, tokens, *pictured)
    try:
        exam = make_exam(tokenizer, tokens, seed, questions)
    except ValueError as error:
        raise CommandError(f"--tokens {tokens} --questions {questions}: {error}") from error
    prompt, behind = prompt_of(exam, tokenizer)
    return Exam(model, prompt, Sizes(tail=behind, greedy=GREEDY), asker(model, tokenizer, exam), exam.questions)


def language_model(path: str | None, place: Place, device_map: str | None = None) -> tuple[Any, Any]:
    """A causal language model of transformers, ready to read, and its tokenizer. path: None for the embedded one."""
    return _load(place) if path is None else _load_other(place, path, device_map)


def check_layers(config: Any, layer: int, head: int) -> None:
    """CommandError where the model has no such layer or query head."""
    text = config.get_text_config()
    for option, value, count in (("layer", layer, text.num_hidden_layers), ("head", head, text.num_attention_heads)):
        if value >= count:
            raise CommandError(f"--{option} {value}: the model has {count}; pass 0 to {count - 1}")


def positions(config: Any) -> int | None:
    """Tokens that a model reads at most, None where its configuration does not say."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(found) if isinstance(found, int) and found > 0 else None


def exams_of(
    found: Any,
    tokenizer: Any,
    known: ModelIdentity,
    lengths: Sequence[int],
    texts: int,
    questions: int,
    seed: int,
    tail: int,
    sizes: Sizes | None = None,
) -> dict[int, ModelReadings]:
    """A model of `model_of` that reads the tasks of every length.

    tail: as of `attach`. sizes: what else is looked at of each text. CommandError where the questions do not fit.
    """
    from ..demo.measure import LITTLE, exam_readings

    made = {}
    for tokens in lengths:
        try:
            made[tokens] = exam_readings(found, tokenizer, known, tokens, texts, questions, seed, tail, sizes or LITTLE)
        except ValueError as error:
            raise CommandError(f"--tokens {tokens} --questions {questions}: {error}") from error
    return made


def model_of(model: str | None, tokens: int, place: Place) -> tuple[Any, Any, ModelIdentity]:
    """A model that reads so many tokens, its tokenizer and its identity.

    model: folder or name of a transformers model, None for the embedded one. Raises CommandError for what the model
    cannot do, AttachError for a model that no method can be attached to.
    """
    found, tokenizer = _load(place) if model is None else _load_other(place, model)
    _check(found.config, tokens)
    return found, tokenizer, identity_of(found, model)


def identity_of(model: Any, path: str | None) -> ModelIdentity:
    """What a profile knows the model by. path: where it is from, None for the embedded one."""
    from ..huggingface.identity import identity
    from ..huggingface.inspection import find_decoder

    known = identity(find_decoder(model))
    return evolve(known, name=EMBEDDED) if path is None else known


def _load(place: Place) -> tuple[Any, Any]:
    from ..demo.model import load_model, load_tokenizer

    try:
        from transformers.utils import logging

        logging.disable_progress_bar()
        return load_model(place.dtype, place.device), load_tokenizer()
    except ImportError as error:
        raise CommandError('the embedded model needs transformers: pip install "sparseprefill[hf]"') from error
    except FileNotFoundError as error:
        raise CommandError(f"{error}: install the package with its checkpoint, or train one") from error


def _load_other(place: Place, path: str, device_map: str | None = None) -> tuple[Any, Any]:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise CommandError('--model needs transformers: pip install "sparseprefill[hf]"') from error
    logging.disable_progress_bar()
    try:
        spread = {} if device_map is None else {"device_map": device_map}
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=place.dtype, **spread)
        model = model.to(place.device) if device_map is None else model
        return model.eval(), AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError) as error:
        raise CommandError(f"--model {path}: {str(error).splitlines()[0]}") from error


def _check(config: Any, tokens: int, layer: int = 0, head: int = 0) -> None:
    most = positions(config)
    if most is not None and tokens > most:
        raise CommandError(f"--tokens {tokens}: the model reads at most {most}; pass that or less")
    check_layers(config, layer, head)
