"""SGLang's stores of keys beside its radix cache: which of them keep apart what requests ask for.

What requests ask for is part of their `cache_salt`, with which SGLang begins the hash of a prompt's pages. By this hash
its hierarchical cache knows them, in the host's memory and in every ``--hicache-storage-backend``.
"""

from __future__ import annotations

from typing import Any

REMEDY = "use a store that does, such as --hicache-storage-backend (docs/sglang.md has them all)"


def unsalted(server_args: Any) -> tuple[str, ...]:
    """The flags of a server that select stores which are not known to keep apart what requests ask for."""
    chosen, found = getattr(server_args, "radix_cache_backend", None), []
    if chosen:  # one that was registered by name: FlexKV's, or somebody else's
        found.append(f"--radix-cache-backend {chosen}")
    elif getattr(server_args, "enable_flexkv", False):
        found.append("--enable-flexkv")
    linked = getattr(server_args, "enable_unified_cache_external_linker", False)
    if linked and getattr(server_args, "unified_cache_external_linker_backend", None) == "dynamic":
        found.append("--unified-cache-external-linker-backend dynamic")
    return tuple(found)
