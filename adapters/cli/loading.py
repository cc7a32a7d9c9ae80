"""Refusals of a model: whatever transformers, safetensors, tokenizers or PyTorch raise is one line with a remedy."""

from __future__ import annotations

import json
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sparseprefill.errors import LONGEST, SparsePrefillError, extra, told

from .group import CommandError, lacks_memory
from .options import MODELS

Part = Literal["config.json", "tokenizer", "weights"]
REMEDIES: dict[Part, str] = {
    "config.json": "compare config.json with that of the model's card, or download it anew",
    "tokenizer": "put the tokenizer's files into the folder (its save_pretrained writes them), or download them anew",
    "weights": "check that config.json and the weights are those of one model, or download both anew",
}
"""The remedy where nothing better is known, by what was being read."""
NO_SENTENCE = (LookupError, AttributeError, TypeError, ArithmeticError)
"""Errors that say what is wrong with a line of code, and so need their class in front."""
POINTER = b"version https://git-lfs"
"""Beginning of a file that stands in a clone in place of the weights."""
NOT_WEIGHTS = ("SafetensorError", "UnpicklingError", "EOFError", "BadZipFile")
"""Classes of errors that a file of weights causes, by name: safetensors' own has no public base class."""
Again = list[Callable[[], None]]
"""Says again, one by one, what was logged and warned of meanwhile."""


@contextmanager
def reading(path: str | None, option: str, part: Part) -> Iterator[Again]:
    """Whatever goes wrong while a part of a model is read, as CommandError of an option, or of the embedded model (path
    None). Lack of memory, and errors of this library, pass.

    What others say meanwhile is held back: beside an error it is tables of tensors. The list that it gives has it
    when the block is done.
    """
    try:
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        what = "the embedded model" if path is None else option
        raise CommandError(f"{what} needs transformers: {extra('hf')}") from error
    disable_progress_bar()
    try:
        with _held_back() as said:
            yield said
    except SparsePrefillError:
        raise
    except Exception as error:  # code of others raises what it likes
        if lacks_memory(error):
            raise
        raise CommandError(_refusal(error, path, option, part)) from error


@contextmanager
def _held_back() -> Iterator[Again]:
    said: Again = []
    logger = logging.getLogger("transformers")

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(partial(logger.handle, record))

    here: list[logging.Handler] = [Keep()]
    before, logger.handlers = logger.handlers, here
    onward, logger.propagate = logger.propagate, False  # transformers lets its own pass to the root where CI is set
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")  # whoever makes errors of warnings does so afterwards
            yield said
    finally:
        logger.handlers, logger.propagate = before, onward
    shown: list[Any] = [*caught]  # typed as texts beside warnings, which no overload takes
    said += [partial(warnings.warn_explicit, one.message, one.category, one.filename, one.lineno) for one in shown]


def _refusal(error: Exception, path: str | None, option: str, part: Part) -> str:
    """The line that an error of transformers becomes."""
    if path is None:
        return f"the embedded model: {_reason(error)}; install the package with its checkpoint, or train one"
    folder = Path(path) if os.path.isdir(path) else None  # no error for a name that is too long
    if folder is None and isinstance(error, OSError):
        return f"{option} {path}: there is no such folder, and by that name: {_reason(error)}; {MODELS}"
    return f"{option} {path}: {_known(error, folder, part) or f'{_reason(error)}; {REMEDIES[part]}'}"


def _known(error: Exception, folder: Path | None, part: Part) -> str:
    """The fault and its remedy, where an error's own words say less; empty for any other."""
    text = told(error)
    if "trust_remote_code" in text:
        return "it is code of its own (auto_map), which no command runs; pass a model that transformers itself has"
    if "Unrecognized configuration class" in text:
        found = re.search(r"(\w+)Config'>", text)
        name = found[1] if found else "its kind"
        return f"transformers has no causal language model of {name}, and only such a decoder prefills; {MODELS}"
    if "Unrecognized model in" in text and folder is not None and not (folder / "config.json").exists():
        return "it holds an adapter of PEFT and no model; merge it into its model (merge_and_unload), and pass that"
    if "Unrecognized model in" in text:
        return "its config.json names no model_type; pass a folder that save_pretrained wrote"
    if found := re.search(r"has model type `(.*?)` but", text):
        return f"this transformers knows no model_type {found[1]!r}; correct it in config.json, or update transformers"
    if "backend tokenizer" in text:
        return (
            "it holds no tokenizer that transformers can read; put tokenizer.json and tokenizer_config.json into it, "
            "or, for a tokenizer.model, install sentencepiece"
        )
    if "ignore_mismatched_sizes" in text:
        return f"its weights have other sizes than its config.json says; {REMEDIES[part]}"
    if isinstance(error, ImportError):
        reason = _line(error)
        return reason if re.search(r"\binstall\b", reason) else f"{reason}; install what it needs"
    if isinstance(error, json.JSONDecodeError) and (name := _unreadable(folder)):
        return f"its {name} is not JSON ({_reason(error)}); download that file anew"
    if part == "weights" and (type(error).__name__ in NOT_WEIGHTS or "PytorchStreamReader" in text):
        return _damaged(folder, error)
    return ""


def _line(error: Exception) -> str:
    """The first line of an error, with what stands behind its colon."""
    lines = [line.strip() for line in told(error).splitlines() if line.strip()] or [""]
    last = next((at for at, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    said = " ".join(lines[: last + 1])[:LONGEST].rstrip(" .")
    return f"{type(error).__name__}: {said}".rstrip(": ") if isinstance(error, NO_SENTENCE) or not said else said


def _reason(error: Exception) -> str:
    """The first sentence of that."""
    return re.split(r"\. (?=[A-Z])", _line(error))[0]


def _files(folder: Path | None, ending: str) -> list[Path]:
    """The files of a folder with an ending; none of a model that lies elsewhere, by its name."""
    return [] if folder is None else sorted(folder.glob(f"*.{ending}"))


def _unreadable(folder: Path | None) -> str:
    """The name of a folder's first file that should be JSON, and is not; empty where all are."""
    for file in _files(folder, "json"):
        try:
            json.loads(file.read_bytes())
        except OSError:
            continue
        except ValueError:
            return file.name
    return ""


def _damaged(folder: Path | None, error: Exception) -> str:
    """The file of weights that cannot be read, and why."""
    from safetensors import safe_open

    name = ", ".join(one.name for one in _files(folder, "bin")) or "file of weights"
    for file in _files(folder, "safetensors"):
        try:
            with safe_open(file, "pt"):
                pass
        except Exception as fault:
            name, error = file.name, fault
            with file.open("rb") as stream:
                if stream.read(len(POINTER)) == POINTER:
                    return f"its {name} is a pointer of Git LFS and not the weights; run git lfs pull in the folder"
            break
    return f"its {name} is cut short or holds no weights ({_reason(error)}); download it anew"
