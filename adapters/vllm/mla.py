"""vLLM's CPU backends for multi-head latent attention: unchanged, but while ``CUSTOM`` is selected they say so.

On a GPU vLLM itself refuses ``CUSTOM`` for such a model. On a CPU it takes these backends without a word.
"""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from ..serving.layer import LATENT
from .runtime import runtime_of


class WatchedCPUMLA(CPUMLABackend):
    """CPU_MLA in all respects."""

    @staticmethod
    def get_impl_cls() -> Any:
        """The host's; asked for by each layer when it is made."""
        _say(CPUMLABackend.get_name())
        return CPUMLABackend.get_impl_cls()


class WatchedAMXMLA(AMXMLABackend):
    """AMX_MLA in all respects."""

    @staticmethod
    def get_impl_cls() -> Any:
        """The host's; asked for by each layer when it is made."""
        _say(AMXMLABackend.get_name())
        return AMXMLABackend.get_impl_cls()


def _say(name: str) -> None:
    runtime = runtime_of(get_current_vllm_config(), name)
    if runtime is not None and not runtime.surveyed:
        runtime.surveyed = True
        runtime.nothing(LATENT)
