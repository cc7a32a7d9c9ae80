"""SGLang: prefill through any method, as an out-of-tree attention backend that SGLang finds by itself.

`register` is the entry point of the group ``sglang.srt.plugins``. Importing this package imports no SGLang.
"""

from __future__ import annotations

from .plugin import register

__all__ = ["register"]
