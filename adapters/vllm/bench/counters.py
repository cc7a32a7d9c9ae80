"""The adapter's own metrics in this process."""

# prometheus_client is there where vLLM is.
# pyright: reportMissingImports=false

from __future__ import annotations


def pairs() -> tuple[float, float]:
    """Query-key pairs so far, computed and causal, of calls that were measured."""
    from prometheus_client import REGISTRY

    found = (REGISTRY.get_sample_value("sparseprefill:pairs_total", {"kind": kind}) for kind in ("computed", "causal"))
    computed, causal = (float(x or 0.0) for x in found)
    return computed, causal
