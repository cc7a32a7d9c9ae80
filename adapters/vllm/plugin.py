"""register(): what vLLM calls in each of its processes. It names classes by path and does nothing else."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import logging
import re
from functools import cache

OLDEST, TESTED = (0, 29), (0, 32)
CPU_BACKEND = "sparseprefill.adapters.vllm.cpu.SparseCPUBackend"
CUDA_BACKEND = "sparseprefill.adapters.vllm.cuda.SparseTritonBackend"
CPU_MLA_BACKENDS = {
    "CPU_MLA": "sparseprefill.adapters.vllm.mla.WatchedCPUMLA",
    "AMX_MLA": "sparseprefill.adapters.vllm.mla.WatchedAMXMLA",
}
log = logging.getLogger(__name__)


def register() -> None:
    """Offer the attention backend ``CUSTOM`` to vLLM. Never raises: a plugin's exception would stop vLLM.

    On CUDA, vLLM takes the class of a selected backend. On a CPU it takes the class of ``CPU_ATTN`` whatever is
    selected, so that one is replaced by a subclass, which is its parent in all respects until ``CUSTOM`` is selected;
    the classes for MLA models as well, which then only say that nothing runs sparse.
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
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)
    register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    for name, path in CPU_MLA_BACKENDS.items():
        if name in AttentionBackendEnum.__members__:
            register_backend(AttentionBackendEnum[name], path)


def objection(version: str) -> str | None:
    """Why this version of vLLM is not supported, or None. ``vllm.__version__``: distributions go by many names."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        return f"its version is {version!r}, which says nothing about its interfaces"
    have = (int(found[1]), int(found[2]))
    if have < OLDEST:
        return f"version {version} is too old, 0.29 or later is needed"
    return None


@cache
def _warn(text: str) -> None:
    log.warning("sparseprefill: %s", text)
