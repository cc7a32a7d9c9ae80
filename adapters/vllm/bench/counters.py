"""The adapter's own metrics in this process."""

# prometheus_client is there where vLLM is.
# pyright: reportMissingImports=false

from __future__ import annotations


def pairs() -> tuple[float, float]:
    """Query-key pairs so far, computed and causal, of calls that were measured."""
    from prometheus_client import REGISTRY

    samples = [
        one for metric in REGISTRY.collect() for one in metric.samples if one.name == "sparseprefill:pairs_total"
    ]
    computed, causal = (
        sum(float(one.value) for one in samples if one.labels["kind"] == kind) for kind in ("computed", "causal")
    )
    return computed, causal
