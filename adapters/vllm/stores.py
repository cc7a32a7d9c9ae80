"""vLLM's connectors to stores of keys: which of them keep apart what requests ask for.

What requests ask for is part of their salt (`wishes.salt`), which is part of vLLM's hash of each block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MULTI = "MultiConnector"
BY_SALT = ("LMCacheMPConnector", "MooncakeStoreConnector", "OffloadingConnector", "SimpleCPUOffloadConnector")
"""Connectors that know keys by vLLM's hash of their block, or hand the request's salt on."""
BY_REQUEST = ("MoRIIOConnector", "MooncakeConnector", "NixlConnector", "NixlPullConnector", "NixlPushConnector")
"""Connectors that hand a request's keys from one server to another, for this request alone."""
NO_STORE = ("DecodeBenchConnector", "ExampleHiddenStatesConnector", "HiSparseConnector")
"""Connectors out of which no request reads what another has written."""
BY_TOKENS = ("ExampleConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "LMCacheConnectorV1")
"""Connectors that know keys by their tokens alone."""
APART = frozenset((*BY_SALT, *BY_REQUEST, *NO_STORE))
REMEDY = "use a connector that does, such as OffloadingConnector (docs/vllm-operate.md has them all)"


def unsalted(config: Any) -> tuple[str, ...]:
    """The connectors of an engine that are not known to keep apart what requests ask for, by name. config: the
    VllmConfig."""
    given: Any = getattr(config, "kv_transfer_config", None)
    if given is None or getattr(given, "kv_connector", None) is None:
        return ()
    module = getattr(given, "kv_connector_module_path", None)
    found = _unsalted(given.kv_connector, module, getattr(given, "kv_connector_extra_config", None))
    return tuple(dict.fromkeys(found))


def _unsalted(name: Any, module: Any, more: Any) -> Iterator[str]:
    if module and not str(module).startswith("vllm."):
        yield f"{module}.{name}"  # somebody else's, whatever it is called
    elif name == MULTI:
        for one in (more or {}).get("connectors", ()):
            if isinstance(one, Mapping):
                names = ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")
                yield from _unsalted(*map(one.get, names))
    elif name not in APART:
        yield str(name)
