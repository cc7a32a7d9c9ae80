"""register(): what SGLang calls in each of its processes."""

# SGLang is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import re
from functools import cache
from importlib import import_module
from typing import Any

from sparseprefill.errors import AttachError

from ..serving.wishes import SWITCH

TRIED = (0, 5, 23)
"""The version of SGLang that the adapter ran in, for which tox.ini has an environment."""
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
HOOKS = {
    "sglang.srt.managers.schedule_batch.Req.__init__": ("AFTER", "known", "meet"),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request": ("BEFORE", "known", "refuse"),
    "sglang.srt.managers.scheduler.Scheduler.get_internal_state": ("AFTER", "answer", "add"),
}
log = logging.getLogger(__name__)


def register() -> None:
    """Offer the attention backend ``sparseprefill`` to SGLang. AttachError where that cannot be, which SGLang logs
    with its traceback; it then refuses to start with ``--prefill-attention-backend sparseprefill``."""
    version = str(import_module("sglang").__version__)
    why = objection(version)
    if why is None:
        try:
            why = _register()
        except Exception as error:
            why = f"its interfaces are different: {type(error).__name__}: {error}"
    if why is not None:
        raise AttachError(f"sparseprefill is not registered with SGLang {version}: {why}")
    if untested(version):
        _warn(f"SGLang {version} is not the version that ran ({_text(TRIED)}); see docs/sglang.md")


def _register() -> str | None:
    """Why SGLang does not have the backend after all, or None."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import answer, known

    if SWITCH not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([SWITCH])
    register_attention_backend(SWITCH)(_make)
    homes: dict[str, Any] = {"known": known, "answer": answer}
    for target, (kind, home, name) in HOOKS.items():
        HookRegistry.register(target, getattr(homes[home], name), HookType[kind])
    if ATTENTION_BACKENDS.get(SWITCH) is not _make or SWITCH not in ATTENTION_BACKEND_CHOICES:
        return "it does not keep the backend under its name"
    return None


def _make(runner: Any) -> Any:
    from .backend import make

    return make(runner)


def objection(version: str) -> str | None:
    """Why this version of SGLang is not supported, or None."""
    found = VERSION.match(version)
    if found is None:
        return "this version says nothing about its interfaces"
    return f"it is too old, {_text(TRIED)} or later is needed" if _parts(found) < TRIED else None


def untested(version: str) -> bool:
    """Whether nobody ran the adapter in this version."""
    found = VERSION.match(version)
    return found is None or _parts(found) != TRIED


def _parts(found: re.Match[str]) -> tuple[int, ...]:
    return tuple(map(int, found.groups()))


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@cache
def _warn(text: str) -> None:
    log.warning("sparseprefill: %s", text)
