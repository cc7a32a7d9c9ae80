"""register(): what vLLM calls in each of its processes. It names classes by path and does nothing else."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import re
from collections.abc import Callable
from functools import cache

from ..serving.plugins import left_out

OLDEST, NEWEST, READ = (0, 29), (0, 32), (0, 33)
"""Versions of vLLM that the adapter ran in, for each of which tox.ini has an environment; the last whose source was
compared with theirs."""
VERSION = re.compile(r"(\d+)\.(\d+)")
CPU_BACKEND = "sparseprefill.adapters.vllm.cpu.SparseCPUBackend"
CUDA_BACKEND = "sparseprefill.adapters.vllm.cuda.SparseBackend"
CPU_PREFILL = "sparseprefill.adapters.vllm.latent.SparseCPUPrefill"
CUDA_PREFILL = "sparseprefill.adapters.vllm.latent.SparsePrefillBackend"
VARIABLE = "VLLM_PLUGINS"
"""Names the plugins that vLLM loads, separated by commas and nothing else; all, where it is not set."""
log = logging.getLogger(__name__)


def excluded() -> str | None:
    """Reason for which a vLLM in this environment does not load the adapter, with the remedy, or None."""
    given = os.environ.get(VARIABLE)
    return left_out(VARIABLE, None if given is None else given.split(","))


def register() -> None:
    """Offer the attention backend ``CUSTOM`` to vLLM. Never raises: a plugin's exception would stop vLLM.

    On CUDA, vLLM takes the class of a selected backend. On a CPU it takes the class of ``CPU_ATTN`` whatever is
    selected, so that one is replaced by a subclass, which is its parent in all respects until ``CUSTOM`` is selected.
    """
    try:
        _register()
    except Exception as error:
        _warn(f"not registered with vLLM: {type(error).__name__}: {error}")


def _register() -> None:
    import vllm

    reason = objection(str(vllm.__version__))
    if reason:
        _warn(f"not registered with vLLM: {reason}")
        return
    doubt = untested(str(vllm.__version__))
    if doubt:
        missing = _missing()
        if missing:
            _warn(f"not registered with vLLM: version {vllm.__version__} was not tried, and {missing}")
            return
        if multiprocessing.parent_process() is None:  # once, and not by every process of an engine
            _warn(doubt)
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)
    register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    _register_prefill()
    for why in (*watch_requests(), *watch_starts()):
        _warn(why)


def _register_prefill() -> None:
    """Offer the same for prefill of multi-head latent attention, where vLLM takes backends for that."""
    try:
        from vllm.v1.attention.backends.mla.prefill.registry import (
            MLAPrefillBackendEnum,
            register_mla_prefill_backend,
        )

        members = MLAPrefillBackendEnum.CUSTOM, MLAPrefillBackendEnum.CPU
    except (ImportError, AttributeError):
        return  # so that CUSTOM is refused there, by vLLM
    for member, path in zip(members, (CUDA_PREFILL, CPU_PREFILL), strict=True):
        register_mla_prefill_backend(member, path)


def _missing() -> str | None:
    """Part of what the backend is built on that this vLLM lacks, or None."""
    from vllm.platforms import current_platform

    module = (CPU_BACKEND if current_platform.is_cpu() else CUDA_BACKEND).rpartition(".")[0]
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"its interfaces are different: {type(error).__name__}: {error}"
    return None


def watch_requests() -> list[str]:
    """Look at requests when they come in, and keep apart those that ask for different things; what cannot be."""
    found = {
        "requests that ask for what is not there run dense instead of being refused": _watched(_install),
        "what requests ask for in a place where vLLM does not read it is lost without a word": _watched(_stand_guard),
        "the prefix cache cannot tell apart what requests ask for": _watched(_keep_apart),
        "stores beside the prefix cache may mix up what requests ask for": _watched(_bar),
    }
    return [f"{what}: {why}" for what, why in found.items() if why]


def watch_starts() -> list[str]:
    """Read the options of every engine that a flag of ours is given to; why that cannot be, if it cannot."""
    from .start import install

    try:
        from vllm.v1.executor.abstract import Executor

        why = install(Executor)
    except ImportError as error:
        why = str(error)
    return [f"options are not read where the model has no layer for the backend: {why}"] if why else []


def _watched(begin: Callable[[], str | None]) -> str | None:
    try:
        return begin()
    except ImportError as error:
        return str(error)


def _install() -> str | None:
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    from .admission import install

    return install(InputProcessor, VLLMValidationError)


def _stand_guard() -> str | None:
    from vllm import plugins

    from .doors import watch

    return watch(plugins)


def _keep_apart() -> str | None:
    from vllm.v1.request import Request

    from .admission import keep_apart

    return keep_apart(Request)


def _bar() -> str | None:
    from vllm.v1.engine.core import EngineCore

    from .admission import bar

    return bar(EngineCore)


def objection(version: str) -> str | None:
    """Reason for which this version of vLLM is not supported, or None. ``vllm.__version__``: distributions go by many
    names."""
    found = VERSION.match(version)
    if found is None:
        return f"its version is {version!r}, which says nothing about its interfaces"
    if _parts(found) < OLDEST:
        return f"version {version} is too old, {_text(OLDEST)} or later is needed"
    return None


def untested(version: str) -> str | None:
    """A remark on a version that is newer than those that were tried, or None."""
    found = VERSION.match(version)
    if found is None or _parts(found) <= NEWEST:
        return None
    tried = f"{_text(OLDEST)} to {_text(NEWEST)}"
    known = "its source was compared with theirs" if _parts(found) <= READ else "nobody has compared its source"
    return f"vLLM {version} is newer than the versions that ran ({tried}); {known}; it is used, see docs/vllm.md"


def _parts(found: re.Match[str]) -> tuple[int, int]:
    return int(found[1]), int(found[2])


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


@cache
def _warn(text: str) -> None:
    log.warning("sparseprefill: %s", text)
