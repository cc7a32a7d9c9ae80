"""A worker's extension that lets stages of a pipeline run on a CPU. Not a test module."""

# vLLM is not there where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from sparseprefill.adapters.vllm.worker import ReportExtension
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

gather = GPUModelRunner.sync_and_gather_intermediate_tensors


class Stages(ReportExtension):
    """As ours."""


def gathered(self: Any, *given: Any) -> Any:
    """With room for what the stage before hands over, which vLLM makes while it warms up, and not on a CPU."""
    if self.intermediate_tensors is None:
        make = self.model.make_empty_intermediate_tensors
        self.intermediate_tensors = make(batch_size=self.max_num_tokens, dtype=self.dtype, device=self.device)
    return gather(self, *given)


GPUModelRunner.sync_and_gather_intermediate_tensors = gathered
