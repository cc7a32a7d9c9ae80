"""vLLM: prefill through any method, as an out-of-tree attention backend that vLLM finds by itself.

`register` is the entry point of the group ``vllm.general_plugins``. Importing this package imports no vLLM.
"""

from __future__ import annotations

from .plugin import register

__all__ = ["register"]
