"""Questions to a worker: ``--worker-extension-cls sparseprefill.adapters.vllm.worker.ReportExtension``."""

from __future__ import annotations

from typing import Any

from ..serving.runtime import plain
from ..session.report import Report
from .plugin import excluded
from .runtime import LATENT_FLAG, NAME, existing, selected

NOBODY = f"{NAME} is selected, but this model has no attention layer that uses it: nothing can run sparse"
LATENT = f"{NOBODY}; for this model it is {LATENT_FLAG}"


class ReportExtension:
    """Mixed into vLLM's worker by vLLM itself: ``llm.collective_rpc("sparseprefill_report")``, one answer a worker."""

    def sparseprefill_report(self) -> dict[str, Any]:
        """The report as plain data, with its ``text``; empty where the backend is not selected.

        ``profiles`` has the same by name, of the requests that asked for another.
        """
        config = getattr(self, "vllm_config", None)
        runtime = existing(config)
        if runtime is not None:
            return runtime.answer()
        if config is None or not selected(config):
            return {}
        name = str(config.model_config.model)
        nobody = LATENT if getattr(config.model_config, "use_mla", False) else NOBODY
        note = f"{NAME} is selected, but {why}" if (why := excluded()) is not None else nobody
        return plain(Report(method=NAME, host=name, implementation="vLLM", min_query=0, notes={note: 1}))
