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


def outside(server_args: Any) -> str:
    """The flag of a server that selects a store outside of its process, which may bring keys that others have computed;
    empty where there is none. A hierarchical cache in the host's memory is none."""
    backend = getattr(server_args, "hicache_storage_backend", None)
    flags = {
        f"--hicache-storage-backend {backend}": backend,
        "--enable-lmcache": getattr(server_args, "enable_lmcache", False),
        "--enable-unified-cache-external-linker": getattr(server_args, "enable_unified_cache_external_linker", False),
    }
    return next((flag for flag, on in flags.items() if on), next(iter(unsalted(server_args)), ""))
