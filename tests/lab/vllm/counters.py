"""The adapter's own metrics in this process."""

# prometheus_client is there where vLLM is.
# pyright: reportMissingImports=false

from __future__ import annotations


def pairs() -> tuple[float, float]:
    """Query-key pairs so far, computed and causal, of calls that were measured."""
    return _total("pairs", "kind", "computed"), _total("pairs", "kind", "causal")


def tokens() -> tuple[float, float]:
    """Prompt tokens computed so far: in chunks that a layer ran sparse, and in all."""
    sparse, dense = (_total("prefill_tokens", "mode", mode) for mode in ("sparse", "dense"))
    return sparse, sparse + dense


def _total(name: str, label: str, value: str) -> float:
    from prometheus_client import REGISTRY

    samples = [
        one for metric in REGISTRY.collect() for one in metric.samples if one.name == f"sparseprefill:{name}_total"
    ]
    return sum(float(one.value) for one in samples if one.labels[label] == value)
