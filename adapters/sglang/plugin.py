"""register(): what SGLang calls in each of its processes."""

# SGLang is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
import re
from functools import cache
from importlib import import_module
from typing import Any

from sparseprefill.errors import AttachError

from ..serving.plugins import left_out
from ..serving.wishes import SWITCH

VARIABLE = "SGLANG_PLUGINS"
"""Names the plugins that SGLang loads, separated by commas; all, where it is not set or empty."""
TRIED = (0, 5, 23)
"""The version of SGLang that the adapter ran in, for which tox.ini has an environment."""
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
log = logging.getLogger(__name__)


def excluded() -> str | None:
    """Reason for which an SGLang in this environment does not load the adapter, with the remedy, or None."""
    names = [one.strip() for one in os.environ.get(VARIABLE, "").split(",") if one.strip()]
    return left_out(VARIABLE, names or None)


def register() -> None:
    """Offer the attention backend ``sparseprefill`` to SGLang. AttachError where that cannot be, which SGLang logs
    with its traceback; it then refuses to start with ``--prefill-attention-backend sparseprefill``."""
    version, tried = str(import_module("sglang").__version__), ".".join(map(str, TRIED))
    found = VERSION.match(version)
    parts = () if found is None else tuple(map(int, found.groups()))
    if not parts:
        why: str | None = "this version says nothing about its interfaces"
    elif parts < TRIED:
        why = f"it is too old, {tried} or later is needed"
    else:
        try:
            why = _register()
        except Exception as error:
            why = f"its interfaces are different: {type(error).__name__}: {error}"
    if why is not None:
        raise AttachError(f"sparseprefill is not registered with SGLang {version}: {why}")
    if parts != TRIED:
        _warn(f"SGLang {version} is not the version that ran ({tried}); see docs/sglang.md")


def _register() -> str | None:
    """Reason for which SGLang does not have the backend after all, or None."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from .hooks import HOOKS

    if SWITCH not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([SWITCH])
    register_attention_backend(SWITCH)(_make)
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.call, HookType[hook.kind])
    if ATTENTION_BACKENDS.get(SWITCH) is not _make or SWITCH not in ATTENTION_BACKEND_CHOICES:
        return "it does not keep the backend under its name"
    return None


def _make(runner: Any) -> Any:
    from .backend import make

    return make(runner)


@cache
def _warn(text: str) -> None:
    log.warning("sparseprefill: %s", text)
