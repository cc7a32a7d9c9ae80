"""Conditions for a model to be attached, told by looking at it; and whose functions it runs.

A user's own attention may differ from plain attention anywhere, such as behind the longest text that a dry run could
try, so nothing but transformers' own is replaced. It is told by where a function's code and its names come from, not by
its name: `functools.wraps` copies that, and `AttentionInterface.register` takes any.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch.nn import functional
from transformers import EncoderDecoderCache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from sparseprefill.errors import AttachError

# Such code treats every implementation that it does not know by name in another way, masks included.
BY_NAME = re.compile(r"_attn_implementation\s*(?:(?:not\s+)?in\s*[(\[{]|[=!]=\s*[\"']sdpa)")

CACHE = ("cache", "past_key_values")
"""Names under which a forward takes its cache and gives it back, the newest of transformers first."""

HOME = "transformers"
KNOWN = frozenset({HOME, "torch", "builtins", *sys.stdlib_module_names} - {"__main__"})
PLACES = (torch, functional)
"""Modules whose functions an attention function calls as attributes, and that people patch."""
DEEPEST = 8
"""Functions within functions; transformers nests two or three."""

READING = threading.Lock()
"""Held while a class is looked up in its source: Python 3.11 parses that, and fails where two threads do so at once."""


def find_decoder(model: object) -> PreTrainedModel:
    """The text decoder whose forward is the prefill. AttachError says why a model cannot be attached."""
    if not isinstance(model, torch.nn.Module):
        raise AttachError(f"{type(model).__name__} is not a torch module: pass a transformers model")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise AttachError(f"{type(model).__name__} is an encoder-decoder: only decoders prefill causally")
    base = getattr(model, "base_model", None)
    found = [_decoder(model), _decoder(base), base, model]
    decoder = next((one for one in found if isinstance(one, PreTrainedModel)), None)
    if decoder is not None:
        return decoder
    inside = _outermost(model)
    if len(inside) > 1:
        shown = ", ".join(type(one).__name__ for one in inside)
        raise AttachError(f"{type(model).__name__} holds several transformers models ({shown}): attach one of them")
    if not inside:
        raise AttachError(f"{type(model).__name__} holds no transformers decoder (PreTrainedModel): pass a whole model")
    return find_decoder(inside[0])


def cache_of(named: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a forward, or in what it gave back, as `prefilled` has it; None without one."""
    return prefilled(next((named[name] for name in CACHE if named.get(name) is not None), None))


def prefilled(cache: Any) -> Any:
    """The cache that a prefill writes: of one beside a cache for cross attention the former, since a model may put the
    cache that it is given into such a pair, and give that back. Any other is returned as it is."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _decoder(model: object) -> Any:
    get = getattr(model, "get_decoder", None)
    if callable(get):
        with suppress(AttributeError, NotImplementedError):  # best effort in transformers, too
            return get()
    return None


def _outermost(module: torch.nn.Module) -> list[PreTrainedModel]:
    """Transformers models somewhere in a module, without those inside of others."""
    if isinstance(module, PreTrainedModel):
        return [module]
    return [one for child in module.children() for one in _outermost(child)]


def check(decoder: PreTrainedModel, prefix: str) -> None:
    """Raise AttachError where the decoder cannot run another attention function."""
    name, current = type(decoder).__name__, str(decoder.config._attn_implementation)
    if current.startswith(prefix):
        raise AttachError(
            f"{name}, or a model that shares its config object, runs Star Attention: attach it when that has ended"
        )
    if not decoder._can_set_attn_implementation():
        raise AttachError(f"{name} does not use transformers' AttentionInterface: its attention cannot be replaced")
    kinds = {type(part) for part in decoder.modules()}  # of all layers one: to read a class takes milliseconds
    branching = sorted({owner.__name__ for owner in kinds if _branches(owner)})
    if branching:
        shown = ", ".join(branching)
        raise AttachError(
            f"{name} branches on the name of its attention implementation (in {shown}): unsafe to replace"
        )
    if current not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise AttachError(f"{name} runs {current!r}, for which transformers has no mask function: use sdpa or eager")


def _branches(owner: type) -> bool:
    if "Attention" not in owner.__name__ and "Indexer" not in owner.__name__:
        return False
    try:
        with READING:
            return BY_NAME.search(inspect.getsource(owner)) is not None
    except (OSError, TypeError):
        return False  # made in a session without source: the dry run has to tell


def configurations(model: torch.nn.Module) -> tuple[PreTrainedConfig, ...]:
    """Every configuration that a part of the model has, those inside of others included."""
    found: dict[int, PreTrainedConfig] = {}
    waiting: list[Any] = [getattr(part, "config", None) for part in (model, *model.modules())]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += vars(config).values()
    return tuple(found.values())


def asks(configs: Iterable[PreTrainedConfig], *switches: str) -> bool:
    """True if one of the configurations has one of the switches on, such as ``output_hidden_states``."""
    return any(getattr(config, switch, False) for config in configs for switch in switches)


def implementations(decoder: PreTrainedModel) -> list[tuple[PreTrainedConfig, str | None]]:
    """Every config below the decoder with its implementation, to be restored exactly."""
    found: dict[int, PreTrainedConfig] = {}
    for module in decoder.modules():
        if isinstance(module, PreTrainedModel):
            configs = [module.config, *(getattr(module.config, key, None) for key in module.config.sub_configs)]
            found.update({id(config): config for config in configs if isinstance(config, PreTrainedConfig)})
    return [(config, config._attn_implementation_internal) for config in found.values()]


def trained_length(decoder: PreTrainedModel) -> int | None:
    """Tokens that the model was made for, where its configuration says so."""
    found = getattr(decoder.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None


def allowed_ids(config: PreTrainedConfig, known: int | None = None) -> tuple[int, int]:
    """Half-open range of token ids that stand for text, apart from those of images, video and sound.

    known: rows of the table of embeddings; the configuration may say more, or nothing.
    """
    said = getattr(config.get_text_config(), "vocab_size", None)
    vocabulary = min((int(one) for one in (said, known) if one), default=1)
    special = [
        value
        for key, value in vars(config).items()
        if isinstance(value, int) and re.search(r"(image|video|audio|vision).*_(token|token_id|token_index)$", key)
    ]
    first = min([value for value in special if value > 0], default=vocabulary)
    last = max(special, default=0) + 1
    return (0, min(first, vocabulary)) if first >= min(16, vocabulary) or last >= vocabulary else (last, vocabulary)


def input_device(decoder: PreTrainedModel) -> torch.device | str | int:
    """The device that token ids go to: that of the weights, or, of weights that are brought in layer by layer, the one
    on which accelerate's hooks compute."""
    weights = next((x.device for x in decoder.parameters()), torch.device("cpu"))
    if weights.type != "meta":
        return weights
    hooks = (getattr(module, "_hf_hook", None) for module in decoder.modules())
    each = (one for hook in hooks for one in getattr(hook, "hooks", (hook,)))  # several in one: SequentialHook
    devices = (getattr(one, "execution_device", None) for one in each)
    found: torch.device | str | int = next((device for device in devices if device is not None), weights)
    return found


def foreign(function: Any) -> str:
    """The name of what is not transformers' own in a function: itself, what it wraps, or what it calls by name.

    Empty where all is.
    """
    if odd := next(_odd(function, 0), ""):
        return odd
    inner = inspect.unwrap(function) if isinstance(function, FunctionType) else function
    if isinstance(inner, FunctionType) and _root(inner) == HOME:
        return next(_patched(inner), "")
    return _name(inner)


def _patched(function: FunctionType) -> Iterator[str]:
    """The functions of others that a function meets under names of its file, or under torch's."""
    for name in function.__code__.co_names:
        for value in (function.__globals__.get(name), *(vars(place).get(name) for place in PLACES)):
            yield from _odd(value, 0)


def _odd(value: Any, depth: int) -> Iterator[str]:
    """The names of functions that neither transformers, torch nor Python brings, in one and what it closes over.

    Classes, modules and whatever cannot be called are no functions.
    """
    if not callable(value) or isinstance(value, type) or depth > DEEPEST:
        return
    if isinstance(value, functools.partial):
        yield from _odd(value.func, depth + 1)
        if depth == 0:
            yield _name(value)
        return
    if isinstance(value, MethodType):
        value = value.__func__
    if _root(value) not in KNOWN:
        yield _name(value)
    elif isinstance(value, FunctionType):
        for part in _closed_over(value):
            yield from _odd(part, depth + 1)


def _closed_over(function: FunctionType) -> Iterator[Any]:
    """The values that a function closes over, those in lists one by one; and what a decorator says it wraps."""
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        yield from held if isinstance(held, tuple | list) else (held,)
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:
        yield wrapped


def _root(value: Any) -> str:
    """The package that a function comes from; empty where its code is from elsewhere than its names."""
    if not isinstance(value, FunctionType):
        said = value.__module__ if isinstance(value, BuiltinFunctionType) else type(value).__module__
        return "builtins" if said is None else str(said).partition(".")[0]
    module = str(value.__globals__.get("__name__", ""))
    root = module.partition(".")[0]
    if root != HOME:
        return root
    # A pickled or compiled file may lie elsewhere; the end of its path is that of the module.
    path, inside = value.__code__.co_filename.replace("\\", "/"), module.replace(".", "/")
    here = getattr(sys.modules.get(module), "__dict__", None) is value.__globals__
    return root if here and path.endswith((f"{inside}.py", f"{inside}/__init__.py")) else ""


def _name(value: Any) -> str:
    if isinstance(value, functools.partial):
        return f"functools.partial of {_name(value.func)}"
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{getattr(value, '__module__', None) or type(value).__module__}.{name}"
