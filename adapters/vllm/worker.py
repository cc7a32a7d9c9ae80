"""What a worker can be asked: ``--worker-extension-cls sparseprefill.adapters.vllm.worker.ReportExtension``."""

from __future__ import annotations

from typing import Any

from attrs import asdict

from .runtime import existing


class ReportExtension:
    """Mixed into vLLM's worker by vLLM itself: ``llm.collective_rpc("sparseprefill_report")``, one answer a worker."""

    def sparseprefill_report(self) -> dict[str, Any]:
        """The report as plain data, with its ``text``; empty where the backend is not in use."""
        runtime = existing(getattr(self, "vllm_config", None))
        if runtime is None:
            return {}
        report = runtime.report()
        return {**asdict(report), "density": report.density, "fallbacks": report.fallbacks, "text": str(report)}
